"""Calls as Megatron-Core's token dispatcher makes them, r0.16 to 0.19: names, defaults, shapes of tuples.

Its two managers, with tensors: tests/epmoe_torch/megatron_managers.py.
"""

import inspect

import numpy as np
from rows_group import assert_same, group_of, host, tokens

from epmoe import fused_a2a
from epmoe.fused_a2a import hybrid_ep_combine, hybrid_ep_dispatch

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
    "init_hybrid_ep_buffer": "(group, hidden_dim, seq_len, num_local_experts, num_sms_dispatch_api=None, "
    "num_sms_combine_api=None, fp8_dispatch=False, *, num_blocks_permute=None, num_blocks_unpermute=None, "
    "num_sms_preprocessing_api=None)",
    "HybridEPDispatch.forward": "(ctx, x, routing_map, probs, group, num_local_experts, num_sms_dispatch_api=24, "
    "num_sms_combine_api=24, num_permuted_tokens=None, pad_multiple=None)",
    "HybridEPDispatch.backward": "(ctx, grad_x, grad_probs, grad_scaling_factor, grad_tokens_per_expert, grad_handle)",
    "HybridEPCombine.forward": "(ctx, x, handle, num_permuted_tokens=None, pad_multiple=None)",
    "HybridEPCombine.backward": "(ctx, grad_x)",
    "fused_dispatch": "(x, token_indices, token_probs, num_experts, group, async_finish=False, "
    "allocate_on_comm_stream=False)",
    "fused_combine": "(x, group, handle, async_finish=False, allocate_on_comm_stream=False)",
    "hybrid_ep_dispatch": "(x, routing_map, probs, group, num_local_experts, num_sms_dispatch_api=24, "
    "num_sms_combine_api=24, *, num_permuted_tokens=None, pad_multiple=None, "
    "num_blocks_permute=None, num_blocks_unpermute=None, fused=False, "
    "num_sms_preprocessing_api=None)",
    "hybrid_ep_combine": "(x, handle, num_permuted_tokens=None, pad_multiple=None, fused=False)",
    "set_deepep_num_sms": "(num_sms)",
}


def test_parameters_and_defaults_are_the_pages():
    for name, wanted in SIGNATURES.items():
        function = fused_a2a
        for part in name.split("."):
            function = getattr(function, part)
        parameters = inspect.signature(function).parameters.values()
        bare = inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters])
        assert str(bare) == wanted, name


def test_calls_of_all_releases_have_the_same_rows_and_sums():
    """As many rows as there are, and a budget with padding: as r0.16 calls, then as 0.17 to 0.19 do."""
    group, rng = group_of(2), np.random.default_rng(2)
    x, maps = tokens(rng, (3, 2), 8), [rng.random((n, 4)) < 0.6 for n in (3, 2)]
    probs = [rng.random(m.shape, np.float32) for m in maps]
    fused_a2a.init_hybrid_ep_buffer(group, 8, 3, 2, 16, 16, False)
    given = dict(x=x, routing_map=maps, probs=probs, group=group, num_local_experts=2)
    sms = dict(num_sms_dispatch_api=16, num_sms_combine_api=16)
    sizes = dict(num_permuted_tokens=None, pad_multiple=None)
    rows, row_probs, _, per_expert, handle = hybrid_ep_dispatch(**given, **sms, **sizes)
    assert sum(map(len, rows)) == sum(m.sum() for m in maps)
    assert row_probs[0].shape == (len(rows[0]),)
    sizes["num_permuted_tokens"] = [n.sum() for n in per_expert]  # 0-d, as torch's sum is
    out = host(hybrid_ep_combine(x=rows, handle=handle, **sizes))

    later = dict(num_blocks_permute=None, num_blocks_unpermute=4, num_sms_preprocessing_api=108)
    later |= dict(num_sms_dispatch_api=None, num_sms_combine_api=None, fused=True)
    padded = None
    for budget, of_dispatch, of_combine in (24, {}, {}), (24, later, dict(fused=True)), (4, later, dict(fused=True)):
        sizes = dict(num_permuted_tokens=budget, pad_multiple=4)
        rows, _, _, per_expert, handle = hybrid_ep_dispatch(**given, **of_dispatch, **sizes)
        padded = padded or host(rows)
        assert_same(rows, [h[:budget] for h in padded], "as later releases call")
        assert [h.shape for h in rows] == [(budget, 8)] * 2 and all((host(n) % 4 == 0).all() for n in per_expert)
        assert any((host(flag) != 0).item() for flag in handle[-1]) == (budget == 4)
        combined = hybrid_ep_combine(x=rows, handle=handle, **sizes, **of_combine)
        if budget == 24:
            assert_same(combined, out, "combined, with and without padding")
    fused_a2a.reset_hybrid_ep_buffer()
