"""epmoe.fused_a2a under torch.autograd: the four functions, and Megatron-Core's plain ones.

Zero copy: torch's tensors go in as they lie, results come out by DLPack (GPU) or as views (CPU). Work is ordered with
torch's current stream. `group` is a world of epmoe; with a LocalWorld, whatever differs per rank is a list over ranks.
This module alone imports torch.
"""

from contextlib import contextmanager

import numpy as np
import torch

from epmoe import device, fused_a2a
from epmoe.arrays import DeviceArray
from epmoe.fused_a2a import (get_buffer, get_hidden_bytes, init_hybrid_ep_buffer, reset_hybrid_ep_buffer,
                             set_deepep_num_sms)

__all__ = ["FusedCombine", "FusedDispatch", "HybridEPCombine", "HybridEPDispatch", "fused_combine", "fused_dispatch",
           "get_buffer", "get_hidden_bytes", "hybrid_ep_combine", "hybrid_ep_dispatch", "init_hybrid_ep_buffer",
           "reset_hybrid_ep_buffer", "set_deepep_num_sms"]

# Types that NumPy knows through ml_dtypes only: looked at as integers on their way to torch
_BITS = {"bfloat16": (np.int16, torch.bfloat16), "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn)}


def _tensor(array):
    """A result as a tensor over the same memory."""
    if isinstance(array, DeviceArray):
        return torch.from_dlpack(array)
    bits, dtype = _BITS.get(array.dtype.name, (None, None))
    return torch.from_numpy(array) if bits is None else torch.from_numpy(array.view(bits)).view(dtype)


def _tensors(result):
    """A result of one rank or of all as a list of tensors; none if there is none."""
    if result is None:
        return []
    return [_tensor(a) for a in (result if isinstance(result, list) else [result])]


def _listed(group, argument):
    """An argument as a list over the ranks of this process."""
    return list(argument) if group.lists else [argument]


def _given(group, tensors):
    """Tensors of the ranks of this process as the functions of fused_a2a take them."""
    tensors = [t if t is None else t.contiguous() for t in tensors]
    return tensors if group.lists else tensors[0]


def _nested(group, tensors):
    return list(tensors) if group.lists else tensors[0]


@contextmanager
def _ordered(group):
    """Context in which the world's streams follow torch's current one, and after which it follows them."""
    if device.SIM:
        yield
        return
    current = torch.cuda.current_stream()
    own = {int(group.stream_of(rank).handle) for rank in group.ranks} - {current.cuda_stream}
    streams = [torch.cuda.ExternalStream(handle) for handle in own]
    for stream in streams:
        stream.wait_stream(current)
    yield
    for stream in streams:
        current.wait_stream(stream)


class _Shapes:
    """Shapes of results that may get no gradient: their missing gradients are zeros."""

    def __init__(self, tensors):
        self._like = [(t.shape, t.dtype, t.device) for t in tensors]

    def filled(self, grads):
        """The gradients, zeros for those that are None."""
        return [torch.zeros(shape, dtype=dtype, device=where) if g is None else g
                for g, (shape, dtype, where) in zip(grads, self._like)]


class FusedDispatch(torch.autograd.Function):
    """epmoe.fused_a2a.FusedDispatch; gradients of x and token_probs."""

    @classmethod
    def apply(cls, x, token_indices, token_probs, num_experts, group, async_finish=False,
              allocate_on_comm_stream=False):
        """(recv_x, recv_token_indices, recv_token_probs, tokens_per_expert, handle)."""
        lists = [_listed(group, a) for a in (x, token_indices, token_probs)]
        n, options = len(lists[0]), (num_experts, group, async_finish, allocate_on_comm_stream)
        *made, handle = super().apply(options, n, *(t for one in lists for t in one))
        return (*(_nested(group, made[i * n:(i + 1) * n]) for i in range(4)), handle)

    @staticmethod
    def forward(ctx, options, n, *tensors):
        """options, then x, token_indices, token_probs of n ranks, one after another."""
        group = options[1]
        with _ordered(group):
            *made, handle = fused_a2a.FusedDispatch.forward(
                ctx, *(_given(group, tensors[i * n:(i + 1) * n]) for i in range(3)), *options)
        x, ids, probs, per_expert = (_tensors(one) for one in made)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*ids, *per_expert)
        ctx.n, ctx.like_x, ctx.like_probs = n, _Shapes(x), _Shapes(probs)
        return (*x, *ids, *probs, *per_expert, handle)

    @staticmethod
    def backward(ctx, *grads):
        """Gradients of x and token_probs of every rank, in forward's order."""
        n, group = ctx.n, ctx.group
        of_x, of_probs = ctx.like_x.filled(grads[:n]), grads[2 * n:3 * n]
        has_probs = any(g is not None for g in of_probs)
        probs = _given(group, [g.float() for g in ctx.like_probs.filled(of_probs)]) if has_probs else None
        with _ordered(group):
            made = fused_a2a.FusedDispatch.backward(ctx, _given(group, of_x), None, probs, None, None)
        return (None, None, *_tensors(made[0]), *[None] * n, *(_tensors(made[2]) or [None] * n))


class FusedCombine(torch.autograd.Function):
    """epmoe.fused_a2a.FusedCombine; the gradient of x."""

    @classmethod
    def apply(cls, x, group, handle, async_finish=False, allocate_on_comm_stream=False):
        """(combined_x, None)."""
        made = super().apply((group, handle, async_finish, allocate_on_comm_stream), *_listed(group, x))
        return _nested(group, made), None

    @staticmethod
    def forward(ctx, options, *x):
        """options, then x of every rank."""
        with _ordered(options[0]):
            combined, _ = fused_a2a.FusedCombine.forward(ctx, _given(options[0], x), *options)
        made = _tensors(combined)
        ctx.set_materialize_grads(False)
        ctx.like = _Shapes(made)
        return tuple(made)

    @staticmethod
    def backward(ctx, *grads):
        """The gradient of x of every rank."""
        with _ordered(ctx.group):
            made = fused_a2a.FusedCombine.backward(ctx, _given(ctx.group, ctx.like.filled(grads)))
        return (None, *_tensors(made[0]))


class HybridEPDispatch(torch.autograd.Function):
    """epmoe.fused_a2a.HybridEPDispatch; gradients of x and probs."""

    @classmethod
    def apply(cls, x, routing_map, probs, group, num_local_experts, num_sms_dispatch_api=24, num_sms_combine_api=24,
              num_permuted_tokens=None, pad_multiple=None):
        """(dispatched_hidden, dispatched_probs, dispatched_scaling_factor, tokens_per_expert, handle)."""
        lists = [_listed(group, x), _listed(group, routing_map)]
        n = len(lists[0])
        lists.append([None] * n if probs is None else _listed(group, probs))
        options = (group, num_local_experts, num_sms_dispatch_api, num_sms_combine_api, num_permuted_tokens,
                   pad_multiple)
        *made, kinds, handle = super().apply(options, n, *(t for one in lists for t in one))
        nested = [_nested(group, made[i * n:(i + 1) * n]) for i in range(len(kinds))]
        named = dict(zip(kinds, nested))
        return (*(named.get(kind) for kind in ("hidden", "probs", "scales", "per_expert")), handle)

    @staticmethod
    def forward(ctx, options, n, *tensors):
        """options, then x, routing_map, probs (or None) of n ranks, one after another."""
        group = options[0]
        probs = None if tensors[2 * n] is None else _given(group, tensors[2 * n:])
        with _ordered(group):
            *made, handle = fused_a2a.HybridEPDispatch.forward(
                ctx, _given(group, tensors[:n]), _given(group, tensors[n:2 * n]), probs, *options)
        named = dict(zip(("hidden", "probs", "scales", "per_expert"), map(_tensors, made)))
        kinds = [kind for kind, tensors in named.items() if tensors]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*named["scales"], *named["per_expert"])
        ctx.n, ctx.kinds = n, kinds
        ctx.like = {kind: _Shapes(named[kind]) for kind in ("hidden", "probs")}
        return (*(t for kind in kinds for t in named[kind]), kinds, handle)

    @staticmethod
    def backward(ctx, *grads):
        """Gradients of x and probs of every rank, in forward's order."""
        n, group = ctx.n, ctx.group
        hidden, probs = ctx.like["hidden"].filled(grads[:n]), None
        if "probs" in ctx.kinds and any(g is not None for g in grads[n:2 * n]):
            probs = _given(group, [g.float() for g in ctx.like["probs"].filled(grads[n:2 * n])])
        with _ordered(group):
            made = fused_a2a.HybridEPDispatch.backward(ctx, _given(group, hidden), probs, None, None, None)
        return (None, None, *_tensors(made[0]), *[None] * n, *(_tensors(made[2]) or [None] * n))


class HybridEPCombine(torch.autograd.Function):
    """epmoe.fused_a2a.HybridEPCombine; the gradient of x."""

    @classmethod
    def apply(cls, x, handle, num_permuted_tokens=None, pad_multiple=None):
        """combined_x."""
        made = super().apply((handle, num_permuted_tokens, pad_multiple), *_listed(handle.group, x))
        return _nested(handle.group, made)

    @staticmethod
    def forward(ctx, options, *x):
        """options, then x of every rank."""
        group = options[0].group
        with _ordered(group):
            made = _tensors(fused_a2a.HybridEPCombine.forward(ctx, _given(group, x), *options))
        ctx.set_materialize_grads(False)
        ctx.like = _Shapes(made)
        return tuple(made)

    @staticmethod
    def backward(ctx, *grads):
        """The gradient of x of every rank."""
        with _ordered(ctx.group):
            made = fused_a2a.HybridEPCombine.backward(ctx, _given(ctx.group, ctx.like.filled(grads)))
        return (None, *_tensors(made[0]))


def fused_dispatch(x, token_indices, token_probs, num_experts, group, async_finish=False,
                   allocate_on_comm_stream=False):
    """FusedDispatch.apply."""
    return FusedDispatch.apply(x, token_indices, token_probs, num_experts, group, async_finish, allocate_on_comm_stream)


def fused_combine(x, group, handle, async_finish=False, allocate_on_comm_stream=False):
    """FusedCombine.apply."""
    return FusedCombine.apply(x, group, handle, async_finish, allocate_on_comm_stream)


def hybrid_ep_dispatch(x, routing_map, probs, group, num_local_experts, num_sms_dispatch_api=24, num_sms_combine_api=24,
                       num_permuted_tokens=None, pad_multiple=None):
    """HybridEPDispatch.apply."""
    return HybridEPDispatch.apply(x, routing_map, probs, group, num_local_experts, num_sms_dispatch_api,
                                  num_sms_combine_api, num_permuted_tokens, pad_multiple)


def hybrid_ep_combine(x, handle, num_permuted_tokens=None, pad_multiple=None):
    """HybridEPCombine.apply."""
    return HybridEPCombine.apply(x, handle, num_permuted_tokens, pad_multiple)
