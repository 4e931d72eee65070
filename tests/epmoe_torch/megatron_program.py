"""One rank of a process group: Megatron-Core's own token dispatcher over epmoe.torch, with exact results.

Releases 0.16 to 0.19. Nothing of Megatron is edited: its token dispatcher's functions are epmoe.torch's.
"""

import os
import sys
from dataclasses import fields
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from phases import device_of, say
from process_group_program import LOCAL, TOP_K, megatron_calls, num_tokens
from rows_kernels import compile_ahead

import epmoe.torch
from epmoe import device
from epmoe.torch.process_group import world_of

for name in ("fused_combine", "fused_dispatch", "hybrid_ep_combine", "hybrid_ep_dispatch", "set_deepep_num_sms"):
    setattr(token_dispatcher, name, getattr(epmoe.torch, name))

BACKENDS = {
    "deepep": [{}, dict(moe_expert_capacity_factor=1.0)],
    "hybridep": [{}, dict(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)],
}
BUDGET = "moe_expert_rank_capacity_factor"  # of rows, since release 0.18, where experts are padded to 256 rows
if BUDGET in (field.name for field in fields(TransformerConfig)):
    BACKENDS["hybridep"].append({BUDGET: 32.0})


def on_the_cpu(*shape, device=None, **options):
    """torch.zeros, where Megatron says "cuda" and there is none."""
    return PLAIN_ZEROS(*shape, **options)


PLAIN_ZEROS = torch.zeros


def dispatcher_of(groups, hidden, backend, options):
    """Megatron's dispatcher of this rank, as its MoE layer makes it."""
    n_ranks, rank = groups.ep.size(), groups.ep.rank()
    budget = options.get(BUDGET)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_moe_experts=LOCAL * n_ranks,
        moe_router_topk=TOP_K,
        expert_model_parallel_size=n_ranks,
        bf16=True,
        params_dtype=torch.bfloat16,
        add_bias_linear=False,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend=backend,
        **{name: value for name, value in options.items() if name != BUDGET},
    )
    if budget is not None:
        # afterwards, since it asks for an experts' kernel of a library that is not here
        setattr(config, BUDGET, budget)
        config.use_transformer_engine_op_fuser = True
    with patch("torch.zeros", on_the_cpu if device.SIM else torch.zeros):
        made = token_dispatcher.MoEFlexTokenDispatcher(LOCAL, [LOCAL * rank + e for e in range(LOCAL)], config, groups)
    made.budget = budget  # with it counts stay on the device
    return made


def through(dispatcher, hidden_states, routing_map, probs, experts, shared):
    """The steps of Megatron's MoE layer around its experts."""
    rows, row_probs = dispatcher.dispatch_preprocess(hidden_states, routing_map, probs)
    rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
    rows, tokens_per_expert, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
    rows = dispatcher.combine_preprocess(experts(rows, tokens_per_expert, row_probs))
    out = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
    return out if shared is None else out + shared.view(out.shape)


def main(hidden):
    where = device_of(lambda: os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo" if device.SIM else "nccl")
    group, groups = dist.group.WORLD, ProcessGroupCollection()
    rank, n_ranks = group.rank(), group.size()
    own = [dist.new_group([r]) for r in range(n_ranks)][rank]
    groups.ep = groups.tp_ep = group
    groups.tp = groups.expt_tp = own
    compile_ahead(world_of(group), hidden, LOCAL, TOP_K, num_tokens(group))
    say(rank, "compiled")
    for backend, configured in BACKENDS.items():
        for options in configured:
            dispatcher = dispatcher_of(groups, hidden, backend, options)
            for shared in (False, True):
                megatron_calls(group, dispatcher, where, hidden, through=through, shared=shared)
            say(rank, f"{backend} {options}")
    dist.destroy_process_group()
    print(f"rank {rank} of {n_ranks}: as wanted", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
