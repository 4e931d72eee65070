"""HybridEPDispatch and HybridEPCombine: what is not read, calls of one handle, edges. Rows and sums: tests/oracle."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from fused_a2a_laws import assert_same_bits, law
from hypothesis import given

from epmoe_ref import fused_a2a, strategies

BF16, FP16, FP32 = (np.dtype(name) for name in (ml_dtypes.bfloat16, np.float16, np.float32))

anything = strategies.hybrid_worlds()


def dispatch(world, **changes):
    return fused_a2a.hybrid_dispatch_forward(**{**vars(world), **changes})


def padded_rows(world):
    """int [R, L]: rows of each expert, rounded up to pad_multiple."""
    counts = np.concatenate(world.routing_map).sum(axis=0)
    multiple = world.pad_multiple or 1
    return (-(-counts // multiple) * multiple).reshape(len(world.x), world.num_local_experts)


@law
@given(anything)
def test_tokens_without_expert_and_probs_not_routed_are_not_read(world):
    """They hold NaN here (the probs do in every world); such a token's results are exact zeros."""
    lost = [~m.any(axis=1) for m in world.routing_map]
    ones = [np.where(own[:, None], np.nan, np.ones((len(own), 128))).astype(BF16) for own in lost]
    hidden, probs, scales, _, handle = dispatch(world, x=ones)
    combined = fused_a2a.hybrid_combine_forward([np.ones((n, 8), BF16) for n in handle.num_rows], handle)
    for rank, own in enumerate(lost):
        assert np.isfinite(hidden[rank].astype(np.float32)).all()
        assert world.probs is None or np.isfinite(probs[rank]).all()
        assert not world.fp8_dispatch or np.isfinite(scales[rank]).all()
        assert combined[rank][own].tobytes() == bytes(combined[rank][own].nbytes)


@law
@given(strategies.hybrid_worlds(kinds=("normal",)))
def test_a_handle_serves_any_number_of_calls_and_gradients_round_as_combine_does(world):
    hidden, *_, handle = dispatch(world, fp8_dispatch=False)
    combined = fused_a2a.hybrid_combine_forward(hidden, handle)
    grad_x, grad_probs = fused_a2a.hybrid_dispatch_backward(handle, hidden, None)
    assert_same_bits(grad_x, combined, "grad_x")
    assert grad_probs == [None] * len(hidden)
    assert_same_bits(fused_a2a.hybrid_combine_backward(handle, world.x), hidden, "cached dispatch")
    assert_same_bits(fused_a2a.hybrid_combine_forward(hidden, handle), combined, "second combine")


@law
@given(anything)
def test_probs_may_be_left_out_in_every_call(world):
    _, none, _, _, handle = dispatch(world, probs=None)
    assert none == [None] * len(world.x)
    assert dispatch(world, probs=none)[1] == none
    zeros = [np.zeros((n, 8), BF16) for n in handle.num_rows]
    assert fused_a2a.hybrid_dispatch_backward(handle, zeros, none)[1] == none


@law
@given(anything)
def test_results_share_no_memory_with_arguments_or_handle(world):
    hidden, probs, scales, counts, handle = dispatch(world)
    before = [own.copy() for own in handle.tokens_per_expert]
    for result in (*counts, *hidden, *(own for own in (*probs, *scales) if own is not None)):
        assert not any(np.shares_memory(result, array) for array in (*world.x, *(world.probs or [])))
        result[...] = 0
    assert_same_bits(handle.tokens_per_expert, before, "handle.tokens_per_expert")


@law
@given(anything)
def test_combine_takes_the_numbers_of_its_handle(world):
    """As passed by callers who compute P as the sum of tokens_per_expert."""
    hidden, *_, counts, handle = dispatch(world, fp8_dispatch=False)
    want = fused_a2a.hybrid_combine_forward(hidden, handle)
    numbers = [int(own.sum()) for own in counts] if world.num_permuted_tokens is None else world.num_permuted_tokens
    got = fused_a2a.hybrid_combine_forward(
        hidden, handle, num_permuted_tokens=numbers, pad_multiple=world.pad_multiple or 0
    )
    assert_same_bits(got, want, "combined_x")


@law
@given(strategies.hybrid_worlds(dtypes=(BF16,), kinds=("normal", "special")))
def test_fp8_dispatch_moves_the_encoded_token_with_its_scales(world):
    """values * scale is the token within half a step of e4m3; every expert gets the same bytes."""
    if world.x[0].shape[1] != 128:
        world = dataclasses.replace(world, x=[np.resize(own, (len(own), 128)) for own in world.x])
    hidden, _, scales, _, handle = dispatch(world, fp8_dispatch=True)
    for rank, rows in enumerate(hidden):
        assert rows.dtype == ml_dtypes.float8_e4m3fn and scales[rank].shape == (len(rows), 1)
        bytes_of = {}
        for row in np.flatnonzero(handle.src_rank[rank] >= 0):
            place = (handle.src_rank[rank][row], handle.src_token[rank][row])
            token = world.x[place[0]][place[1]].astype(np.float64)
            if np.isfinite(token).all():
                scale = float(scales[rank][row, 0])
                half_step = np.maximum(abs(token) / 16, scale * 2.0**-10)
                assert (abs(rows[row].astype(np.float64) * scale - token) <= half_step * 1.001).all()
            got = rows[row].tobytes() + scales[rank][row].tobytes()
            assert bytes_of.setdefault(place, got) == got


EDGES = {
    "no tokens anywhere": [np.zeros((0, 4), bool), np.zeros((0, 4), bool)],
    "one rank without tokens": [np.ones((3, 4), bool), np.zeros((0, 4), bool)],
    "nothing routed": [np.zeros((3, 4), bool), np.zeros((2, 4), bool)],
    "one hot expert": [np.tile([False, False, True, False], (n, 1)) for n in (5, 4)],
    "one expert a token": [np.eye(4, dtype=bool), np.eye(4, dtype=bool)[::-1]],
    "all experts": [np.ones((n, 4), bool) for n in (2, 3)],
}


@pytest.mark.parametrize("pad_multiple", [None, 0, 1, 16, 128])
@pytest.mark.parametrize("edge", EDGES)
def test_edges_of_routing(edge, pad_multiple):
    """Two ranks, four experts: shapes, dtypes, counts, and combined rows."""
    routing_map, rng = EDGES[edge], np.random.default_rng(1)
    x = [rng.integers(-4, 5, (len(m), 8)).astype(BF16) for m in routing_map]
    probs = [rng.random(m.shape, np.float32) for m in routing_map]
    world = strategies.HybridWorld(x, routing_map, probs, 2, None, pad_multiple, False, None)
    hidden, row_probs, scales, counts, handle = dispatch(world)
    padded = padded_rows(world)
    for rank in range(2):
        rows = int(padded[rank].sum())
        assert (hidden[rank].shape, hidden[rank].dtype) == ((rows, 8), BF16)
        assert (row_probs[rank].shape, row_probs[rank].dtype) == ((rows,), np.float32)
        assert scales[rank] is None
        assert counts[rank].dtype == np.int64 and np.array_equal(counts[rank], padded[rank])
    want = [(own * m.sum(axis=1, keepdims=True) + 0.0).astype(BF16) for own, m in zip(x, routing_map)]
    assert_same_bits(fused_a2a.hybrid_combine_forward(hidden, handle), want, "combined_x")


def test_a_world_worked_by_hand():
    """Two ranks with two experts each; segments padded to 2; then with room for three rows only."""
    x = [np.repeat([[1], [2]], 8, axis=1).astype(BF16), np.repeat([[3]], 8, axis=1).astype(BF16)]
    routing_map = [np.array([[1, 1, 0, 0], [0, 1, 1, 0]], bool), np.array([[0, 1, 0, 0]], bool)]
    probs = [np.array([[0.5, 0.25, 9, 9], [9, 0.125, 0.75, 9]], np.float32), np.array([[9, 1, 9, 9]], np.float32)]
    hidden, row_probs, _, counts, handle = fused_a2a.hybrid_dispatch_forward(x, routing_map, probs, 2, pad_multiple=2)
    assert [rows[:, 0].tolist() for rows in hidden] == [[1, 0, 1, 2, 3, 0], [2, 0]]
    assert [rows.tolist() for rows in row_probs] == [[0.5, 0, 0.25, 0.125, 1, 0], [0.75, 0]]
    assert [count.tolist() for count in counts] == [[2, 4], [2, 0]]
    assert [out[:, 0].tolist() for out in fused_a2a.hybrid_combine_forward(hidden, handle)] == [[2, 4], [3]]

    hidden, row_probs, _, counts, handle = fused_a2a.hybrid_dispatch_forward(
        x, routing_map, probs, 2, pad_multiple=2, num_permuted_tokens=3
    )
    assert [rows[:, 0].tolist() for rows in hidden] == [[1, 0, 1], [2, 0, 0]]
    assert [rows.tolist() for rows in row_probs] == [[0.5, 0, 0.25], [0.75, 0, 0]]
    assert [count.tolist() for count in counts] == [[2, 1], [2, 0]]
    assert [flag.tolist() for flag in handle.overflow] == [[1], [0]]
    assert [out[:, 0].tolist() for out in fused_a2a.hybrid_combine_forward(hidden, handle)] == [[2, 2], [0]]


@pytest.mark.parametrize("p2p_world_size", [None, 1], ids=["ranks", "worlds"])
@pytest.mark.parametrize("values, total", [((2.0**30, 1, -(2.0**30)), 0), ((2.0**30, -(2.0**30), 1), 1)])
def test_ranks_and_worlds_are_added_up_in_ascending_order(values, total, p2p_world_size):
    """Rank 0's only token goes to one expert on each of three ranks, whose rows hold these values."""
    tokens = (1, 0, 0)
    x, routing_map = [np.zeros((n, 8), BF16) for n in tokens], [np.ones((n, 3), bool) for n in tokens]
    *_, handle = fused_a2a.hybrid_dispatch_forward(x, routing_map, None, 1, p2p_world_size=p2p_world_size)
    rows = [np.full((1, 8), value, BF16) for value in values]
    assert (fused_a2a.hybrid_combine_forward(rows, handle)[0] == total).all()
