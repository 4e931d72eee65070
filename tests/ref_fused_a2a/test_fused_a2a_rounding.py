"""Order of sums and rounding points of the combines, on numbers that show them."""

import ml_dtypes
import numpy as np
import pytest

from epmoe_ref import fused_a2a

BF16, FP16, FP32 = (np.dtype(name) for name in (ml_dtypes.bfloat16, np.float16, np.float32))


def combined(n_ranks, values, dtype):
    """Rank 0's only token goes to all ranks, whose rows hold these values; the combined result."""
    x = [np.zeros((int(rank == 0), 8), dtype) for rank in range(n_ranks)]
    ids = [np.arange(n_ranks)[None][: len(own)] for own in x]
    probs = [np.zeros((len(own), n_ranks), np.float32) for own in x]
    *_, handle = fused_a2a.dispatch_forward(x, ids, probs, n_ranks)
    rows = [np.full((1, 8), value, dtype) for value in values]
    return fused_a2a.combine_forward(rows, handle)[0][0, 0]


def test_combine_sums_ranks_in_ascending_order():
    assert combined(3, (1e8, 1, -1e8), FP32) == 0
    assert combined(3, (1e8, -1e8, 1), FP32) == 1


@pytest.mark.parametrize("dtype, step", [(BF16, 256), (FP16, 2048)])
def test_combine_sums_in_float32_and_rounds_once(dtype, step):
    # rounding after each step would stay at the step
    assert combined(3, (step, 1, 1), dtype) == step + 2


def test_combine_starts_from_plus_zero():
    assert not np.signbit(combined(2, (-0.0, -0.0), FP32))


def test_combine_of_too_large_a_sum_is_infinite():
    assert combined(2, (65504, 65504), FP16) == np.inf


def hybrid_combined(n_ranks, n_local, values, dtype, p2p_world_size=None):
    """Rank 0's only token goes to all experts, whose rows hold these values; the combined result."""
    tokens = [int(rank == 0) for rank in range(n_ranks)]
    routing_map = [np.ones((n, n_ranks * n_local), bool) for n in tokens]
    x = [np.zeros((n, 8), dtype) for n in tokens]
    *_, handle = fused_a2a.hybrid_dispatch_forward(x, routing_map, None, n_local, p2p_world_size=p2p_world_size)
    values = np.reshape(values, (n_ranks, n_local, 1)).astype(dtype)
    rows = list(np.repeat(values, 8, axis=2))
    return float(fused_a2a.hybrid_combine_forward(rows, handle)[0][0, 0])


def test_hybrid_combine_sums_local_experts_in_float32_in_ascending_order_and_rounds_once():
    assert hybrid_combined(1, 3, (256, 1, 1), BF16) == 258
    big = 2.0**30
    assert hybrid_combined(1, 3, (big, 1, -big), BF16) == 0
    assert hybrid_combined(1, 3, (big, -big, 1), BF16) == 1


def test_hybrid_combine_rounds_on_each_rank_before_it_sums_ranks():
    """256 + 1 on rank 0 is 256 in bfloat16; unrounded, 257 + 1 would give 258."""
    assert hybrid_combined(2, 2, (256, 1, 1, 0), BF16) == 256
    assert hybrid_combined(2, 2, (256, 0, 1, 1), BF16) == 258


def test_hybrid_combine_sums_ranks_in_float32_in_ascending_order_and_rounds_once():
    assert hybrid_combined(3, 1, (256, 1, 1), BF16) == 258
    big = 2.0**30
    assert hybrid_combined(3, 1, (big, 1, -big), BF16) == 0
    assert hybrid_combined(3, 1, (big, -big, 1), BF16) == 1


def test_hybrid_combine_rounds_in_each_p2p_world_before_it_sums_worlds():
    """Ranks 256, 1, 1, 0: one world gives 258, worlds of two 256 + 1 -> 256, 1 + 0 -> 1, together 256."""
    assert hybrid_combined(4, 1, (256, 1, 1, 0), BF16) == 258
    assert hybrid_combined(4, 1, (256, 1, 1, 0), BF16, p2p_world_size=4) == 258
    assert hybrid_combined(4, 1, (256, 1, 1, 0), BF16, p2p_world_size=2) == 256
    assert hybrid_combined(4, 1, (256, 0, 1, 1), BF16, p2p_world_size=2) == 258


def test_hybrid_combine_sums_worlds_in_ascending_order():
    big = 2.0**30
    assert hybrid_combined(3, 1, (big, 1, -big), BF16, p2p_world_size=1) == 0
    assert hybrid_combined(3, 1, (big, -big, 1), BF16, p2p_world_size=1) == 1


def test_hybrid_combine_of_too_large_a_sum_is_infinite():
    assert hybrid_combined(1, 2, (65504, 65504), FP16) == np.inf
