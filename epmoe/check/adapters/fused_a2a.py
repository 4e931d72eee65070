"""This project's fused_a2a as implementations, over a LocalWorld: rows (FusedDispatch) and HybridEP."""

import numpy as np

from epmoe import LocalWorld, fused_a2a
from epmoe.check.implementation import HybridImplementation, RowsImplementation
from epmoe.host.arrays import to_numpy


def host(result):
    """A result, or a list of them over ranks, as NumPy arrays. None stays None."""
    if isinstance(result, (list, tuple)):
        return [host(one) for one in result]
    return result if result is None or isinstance(result, np.ndarray) else to_numpy(result)


class OverLocalWorld:
    """The implementation's world. The first call makes it, with as many ranks as that call has."""

    _world = None

    def world_for(self, per_rank, **attributes):
        """The world, with these attributes set."""
        if self._world is None:
            self._world = self.new_world(per_rank)
            vars(self._world).update(attributes)
        return self._world

    def new_world(self, per_rank):
        """A LocalWorld of as many ranks as the argument has entries."""
        return LocalWorld(len(per_rank))


class Rows(OverLocalWorld, RowsImplementation):
    """FusedDispatch and FusedCombine."""

    def dispatch(self, x, token_indices, token_probs, num_experts):
        self._dispatched = fused_a2a.Context()
        *results, handle = fused_a2a.FusedDispatch.forward(
            self._dispatched, x, token_indices, token_probs, num_experts, self.world_for(x)
        )
        return (*map(host, results), handle)

    def combine(self, x, handle):
        self._combined = fused_a2a.Context()
        return host(fused_a2a.FusedCombine.forward(self._combined, x, self._world, handle)[0])

    def dispatch_backward(self, grad_recv_x, grad_recv_token_probs, handle):
        grad_x, _, grad_probs, *_ = fused_a2a.FusedDispatch.backward(
            self._dispatched, grad_recv_x, None, grad_recv_token_probs, None, None
        )
        return host(grad_x), host(grad_probs)

    def combine_backward(self, grad_combined_x, handle):
        return host(fused_a2a.FusedCombine.backward(self._combined, grad_combined_x)[0])

    def close(self):
        if self._world is not None:
            fused_a2a.get_buffer(self._world, 0).close()


class Told:
    """A handle whose overflow is on the host."""

    def __init__(self, handle):
        self.handle, self.overflow = handle, host(handle.overflow)


class Hybrid(OverLocalWorld, HybridImplementation):
    """HybridEPDispatch and HybridEPCombine."""

    def dispatch(self, x, routing_map, probs, num_local_experts, *, fp8_dispatch=False, p2p_world_size=None, **options):
        is_new = self._world is None
        world = self.world_for(x, p2p_world_size=p2p_world_size)
        if is_new and fp8_dispatch:
            hidden = (x[0] if world.lists else x).shape[1]
            fused_a2a.init_hybrid_ep_buffer(world, hidden, 1, num_local_experts, 24, 24, True)
        self._dispatched = fused_a2a.Context()
        *results, handle = fused_a2a.HybridEPDispatch.forward(
            self._dispatched, x, routing_map, probs, world, num_local_experts, **options
        )
        return (*map(host, results), Told(handle))

    def combine(self, x, handle):
        self._combined = fused_a2a.Context()
        return host(fused_a2a.HybridEPCombine.forward(self._combined, x, handle.handle))

    def dispatch_backward(self, grad_hidden, grad_probs, handle):
        grad_x, _, grad_probs, *_ = fused_a2a.HybridEPDispatch.backward(
            self._dispatched, grad_hidden, grad_probs, None, None, None
        )
        return host(grad_x), host(grad_probs)

    def combine_backward(self, grad_combined_x, handle):
        return host(fused_a2a.HybridEPCombine.backward(self._combined, grad_combined_x)[0])

    def close(self):
        if self._world is not None:
            fused_a2a.reset_hybrid_ep_buffer(self._world)
