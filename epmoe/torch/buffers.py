"""The functions that give and take back a group's memory, also for process groups of torch.distributed."""

from functools import wraps

from epmoe import fused_a2a
from epmoe.torch.process_group import world_of


@wraps(fused_a2a.get_buffer)
def get_buffer(group, hidden_bytes):
    return fused_a2a.get_buffer(world_of(group), hidden_bytes)


@wraps(fused_a2a.init_hybrid_ep_buffer)
def init_hybrid_ep_buffer(group, *arguments, **named):
    fused_a2a.init_hybrid_ep_buffer(world_of(group), *arguments, **named)


@wraps(fused_a2a.reset_hybrid_ep_buffer)
def reset_hybrid_ep_buffer(group=None):
    fused_a2a.reset_hybrid_ep_buffer(world_of(group))
