"""Calls as Megatron-Core's token dispatcher makes them, r0.16 to 0.19: names, defaults, shapes of tuples, dtypes."""

import inspect

import numpy as np
from rows_group import BF16, FP32, assert_same, group_of, host, tokens

from epmoe import fused_a2a
from epmoe.fused_a2a import (
    fused_combine,
    fused_dispatch,
    hybrid_ep_combine,
    hybrid_ep_dispatch,
    init_hybrid_ep_buffer,
    reset_hybrid_ep_buffer,
    set_deepep_num_sms,
)

# name -> parameters with defaults, as on the fused_a2a page and in the module behind it; what later releases give
# besides is taken by name alone
SIGNATURES = {
    "get_hidden_bytes": "(x)",
    "get_buffer": "(group, hidden_bytes)",
    "FusedDispatch.forward": "(ctx, x, token_indices, token_probs, num_experts, group, async_finish=False, "
    "allocate_on_comm_stream=False)",
    "FusedDispatch.backward": "(ctx, grad_output, grad_token_indices, grad_token_probs, grad_tokens_per_expert, "
    "grad_handle)",
    "FusedCombine.forward": "(ctx, x, group, handle, async_finish=False, allocate_on_comm_stream=False)",
    "FusedCombine.backward": "(ctx, grad_output, previous_event=None)",
    "init_hybrid_ep_buffer": "(group, hidden_dim, seq_len, num_local_experts, num_sms_dispatch_api, "
    "num_sms_combine_api, fp8_dispatch)",
    "HybridEPDispatch.forward": "(ctx, x, routing_map, probs, group, num_local_experts, num_sms_dispatch_api=24, "
    "num_sms_combine_api=24, num_permuted_tokens=None, pad_multiple=None)",
    "HybridEPDispatch.backward": "(ctx, grad_x, grad_probs, grad_scaling_factor, grad_tokens_per_expert, grad_handle)",
    "HybridEPCombine.forward": "(ctx, x, handle, num_permuted_tokens=None, pad_multiple=None)",
    "HybridEPCombine.backward": "(ctx, grad_x)",
    "fused_dispatch": "(x, token_indices, token_probs, num_experts, group, async_finish=False, "
    "allocate_on_comm_stream=False)",
    "fused_combine": "(x, group, handle, async_finish=False, allocate_on_comm_stream=False)",
    "hybrid_ep_dispatch": "(x, routing_map, probs, group, num_local_experts, num_sms_dispatch_api=24, "
    "num_sms_combine_api=24, num_permuted_tokens=None, pad_multiple=None, *, "
    "num_blocks_permute=None, num_blocks_unpermute=None, fused=False, "
    "num_sms_preprocessing_api=None)",
    "hybrid_ep_combine": "(x, handle, num_permuted_tokens=None, pad_multiple=None, *, fused=False)",
    "set_deepep_num_sms": "(num_sms)",
}


def test_parameters_and_defaults_are_the_pages():
    for name, wanted in SIGNATURES.items():
        function = fused_a2a
        for part in name.split("."):
            function = getattr(function, part)
        parameters = inspect.signature(function).parameters.values()
        bare = inspect.Signature(
            [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
        )
        assert str(bare) == wanted, name


class DeepepManager:
    """Dispatch and combine of _DeepepManager, with its attributes."""

    def __init__(self, group, num_experts, router_topk, num_local_experts):
        self.group, self.num_experts, self.router_topk = group, num_experts, router_topk
        self.num_local_experts, self.handle = num_local_experts, None
        set_deepep_num_sms(20)

    def setup_metadata(self, routing_map, probs):
        probs = [p * m for p, m in zip(probs, routing_map)]
        order = [np.argsort(-p, axis=1, kind="stable")[:, : self.router_topk] for p in probs]
        self.token_probs = [np.take_along_axis(p, i, axis=1) for p, i in zip(probs, order)]
        self.token_indices = [np.where(p == 0, -1, i) for p, i in zip(self.token_probs, order)]

    def dispatch(self, hidden_states, async_finish=True, allocate_on_comm_stream=True):
        hidden_states, dispatched_indices, dispatched_probs, num_tokens_per_expert, handle = (
            fused_dispatch(
                hidden_states,
                self.token_indices,
                self.token_probs,
                self.num_experts,
                self.group,
                async_finish=async_finish,
                allocate_on_comm_stream=allocate_on_comm_stream,
            )
        )
        self.handle, self.tokens_per_expert = handle, num_tokens_per_expert
        self.dispatched_indices, self.dispatched_probs = dispatched_indices, dispatched_probs
        return hidden_states

    def combine(self, hidden_states, async_finish=True, allocate_on_comm_stream=True):
        hidden_states, _ = fused_combine(
            hidden_states,
            self.group,
            self.handle,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        self.handle = None
        return hidden_states


class HybridEPManager:
    """Dispatch and combine of _HybridEPManager, with its attributes."""

    def __init__(
        self, group, num_local_experts, num_permuted_tokens=None, pad_multiple=None, num_sms=16
    ):
        self.group, self.num_local_experts, self.num_sms = group, num_local_experts, num_sms
        self.num_permuted_tokens, self.pad_multiple, self.handle = (
            num_permuted_tokens,
            pad_multiple,
            None,
        )

    def dispatch(self, hidden_states, routing_map, token_probs):
        dispatched_hidden, self.dispatched_probs, _, tokens_per_expert, self.handle = (
            hybrid_ep_dispatch(
                x=hidden_states,
                routing_map=routing_map,
                probs=token_probs,
                group=self.group,
                num_local_experts=self.num_local_experts,
                num_sms_dispatch_api=self.num_sms,
                num_sms_combine_api=self.num_sms,
                num_permuted_tokens=self.num_permuted_tokens,
                pad_multiple=self.pad_multiple,
            )
        )
        self.tokens_per_expert = tokens_per_expert
        if self.num_permuted_tokens is None:
            self.num_permuted_tokens = [
                n.sum() for n in tokens_per_expert
            ]  # 0-d, as torch's sum is
        return dispatched_hidden

    def combine(self, hidden_states):
        hidden_states = hybrid_ep_combine(
            x=hidden_states,
            handle=self.handle,
            num_permuted_tokens=self.num_permuted_tokens,
            pad_multiple=self.pad_multiple,
        )
        self.handle = None
        return hidden_states


class LaterHybridEPManager(HybridEPManager):
    """As in Megatron-Core 0.17 to 0.19: SMs may be left to the library, and more is said of how it is to work."""

    over_budget = False

    def dispatch(self, hidden_states, routing_map, token_probs):
        hidden_states, self.dispatched_probs, _, self.tokens_per_expert, self.handle = (
            hybrid_ep_dispatch(
                x=hidden_states,
                routing_map=routing_map,
                probs=token_probs,
                group=self.group,
                num_local_experts=self.num_local_experts,
                num_sms_dispatch_api=None,
                num_sms_combine_api=None,
                num_blocks_permute=None,
                num_blocks_unpermute=4,
                num_permuted_tokens=self.num_permuted_tokens,
                pad_multiple=self.pad_multiple,
                fused=True,
                num_sms_preprocessing_api=108,
            )
        )
        self.over_budget |= any((host(flag) != 0).item() for flag in self.handle[-1])
        return hidden_states

    def combine(self, hidden_states):
        return hybrid_ep_combine(
            x=hidden_states,
            handle=self.handle,
            num_permuted_tokens=self.num_permuted_tokens,
            pad_multiple=self.pad_multiple,
            fused=True,
        )


def experts(x, weights):
    """A layer whose expert e scales its rows by e + 1; probs weigh them."""
    return (np.asarray(x, FP32) * weights).astype(BF16)


def test_deepep_manager_needs_nothing_but_the_import_changed():
    group, rng = group_of(2), np.random.default_rng(1)
    x, maps = tokens(rng, (5, 4), 16), [rng.random((n, 4)) < 0.6 for n in (5, 4)]
    probs = [(rng.random(m.shape, np.float32) + 0.1) for m in maps]
    manager = DeepepManager(group, 4, 2, 2)
    manager.setup_metadata(maps, probs)
    try:
        hidden = manager.dispatch(x)
        rows = [(host(i) >= 0).any(axis=1).sum() for i in manager.dispatched_indices]
        assert [len(h) for h in hidden] == rows and manager.dispatched_indices[0].dtype == np.int64
        assert (
            manager.dispatched_probs[0].dtype == FP32
            and manager.tokens_per_expert[0].dtype == np.int64
        )
        assert [n.tolist() for n in manager.tokens_per_expert] == [
            [int((host(i) == e).sum()) for e in range(2)] for i in manager.dispatched_indices
        ]
        out = manager.combine(
            [
                experts(h, host(p).sum(axis=1, keepdims=True))
                for h, p in zip(host(hidden), manager.dispatched_probs)
            ]
        )
    finally:
        set_deepep_num_sms(None)
    assert [(o.shape, o.dtype) for o in out] == [
        (a.shape, a.dtype) for a in x
    ] and manager.handle is None


def test_hybrid_manager_needs_nothing_but_the_import_changed():
    group, rng = group_of(2), np.random.default_rng(2)
    x, maps = tokens(rng, (5, 4), 16), [rng.random((n, 4)) < 0.6 for n in (5, 4)]
    probs = [rng.random(m.shape, np.float32) for m in maps]
    sizes = [m.sum() for m in maps]
    init_hybrid_ep_buffer(group, 16, 5, 2, 16, 16, False)
    exact = HybridEPManager(group, 2)
    hidden = exact.dispatch(x, maps, probs)
    assert sum(len(h) for h in hidden) == sum(sizes) and exact.dispatched_probs[0].shape == (
        len(hidden[0]),
    )
    out = exact.combine(hidden)
    given = HybridEPManager(group, 2, num_permuted_tokens=24, pad_multiple=4)
    padded = given.dispatch(x, maps, probs)
    assert [h.shape for h in padded] == [(24, 16)] * 2
    assert all((host(n) % 4 == 0).all() for n in given.tokens_per_expert)
    assert_same(given.combine(padded), host(out), "combined, with and without padding")
    for num_permuted_tokens, is_too_little in ((24, False), (4, True)):
        later = LaterHybridEPManager(group, 2, num_permuted_tokens, pad_multiple=4)
        rows = later.dispatch(x, maps, probs)
        assert_same(rows, [h[:num_permuted_tokens] for h in host(padded)], "as later releases call")
        assert later.over_budget == is_too_little
        combined = later.combine(rows)
        if not is_too_little:
            assert_same(combined, host(out), "combined as later releases do")
    reset_hybrid_ep_buffer()
