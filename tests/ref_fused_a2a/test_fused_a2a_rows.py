"""FusedDispatch and FusedCombine: what is not read, calls of one handle, any type; worlds by hand. Sums: tests/oracle."""

import ml_dtypes
import numpy as np
import pytest
from fused_a2a_laws import assert_same_bits, law
from hypothesis import given
from hypothesis import strategies as st

from epmoe_ref import fused_a2a, strategies

BF16, FP32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def dispatch(world):
    return fused_a2a.dispatch_forward(world.x, world.token_indices, world.token_probs, world.num_experts)


def ranks_of(world):
    """Over src_ranks: int [T], how many distinct ranks a token goes to; -1 goes nowhere."""
    n_local = world.num_experts // len(world.x)
    ranks = [[{int(e) // n_local for e in token if e >= 0} for token in ids] for ids in world.token_indices]
    return [np.array([len(own) for own in tokens], int) for tokens in ranks]


@law
@given(strategies.rows_worlds(kinds=("integers",)))
def test_a_token_without_expert_goes_nowhere_is_not_read_and_gives_exact_zeros(world):
    """Such tokens hold NaN here."""
    nowhere = [n == 0 for n in ranks_of(world)]
    x = [np.where(lost[:, None], np.array(np.nan, own.dtype), own) for lost, own in zip(nowhere, world.x)]
    probs = [np.where(lost[:, None], np.float32(np.nan), own) for lost, own in zip(nowhere, world.token_probs)]
    recv_x, _, recv_probs, _, handle = fused_a2a.dispatch_forward(x, world.token_indices, probs, world.num_experts)
    combined = fused_a2a.combine_forward(recv_x, handle)
    grad_x, grad_probs = fused_a2a.dispatch_backward(handle, recv_x, recv_probs)
    for rank, lost in enumerate(nowhere):
        for result in (combined[rank], grad_x[rank], grad_probs[rank]):
            assert result[lost].tobytes() == bytes(result[lost].nbytes)
        assert np.isfinite(combined[rank].astype(np.float32)).all()


@law
@given(strategies.rows_worlds(kinds=("normal",)), st.data())
def test_a_handle_serves_any_number_of_calls_and_widths(world, data):
    recv_x, *_, handle = dispatch(world)
    first = fused_a2a.combine_forward(recv_x, handle)
    other = data.draw(strategies.matrices([len(own) for own in world.x], 4, FP32, ("normal",)))
    narrow = fused_a2a.combine_backward(handle, other)
    assert_same_bits(fused_a2a.combine_backward(handle, world.x), recv_x, "cached dispatch")
    assert_same_bits(fused_a2a.combine_forward(recv_x, handle), first, "second combine")
    for rank, rows in enumerate(narrow):
        want = [other[src][token] for src, token in zip(handle.src_rank[rank], handle.src_token[rank])]
        assert rows.shape == (len(want), 4) and all(np.array_equal(row, one) for row, one in zip(rows, want))


@law
@given(strategies.rows_worlds(), st.sampled_from((np.int8, np.int16, np.int32, np.int64)))
def test_ids_of_any_integer_type_mean_the_same(world, dtype):
    ids = [own.astype(dtype) for own in world.token_indices]
    got = fused_a2a.dispatch_forward(world.x, ids, world.token_probs, world.num_experts)
    for one, other in zip(got[:4], dispatch(world)[:4]):
        assert_same_bits(one, other, "result")


@pytest.mark.parametrize("dtype", [BF16, FP32, np.float64, np.uint8, np.int16, ml_dtypes.float8_e5m2], ids=str)
def test_dispatch_moves_the_bytes_of_any_dtype(dtype):
    rng = np.random.default_rng(0)
    x = [rng.integers(0, 256, (tokens, 16 * np.dtype(dtype).itemsize), np.uint8).view(dtype) for tokens in (3, 2)]
    ids = [np.array([[0], [1], [0]]), np.array([[1], [0]])]
    probs = [np.ones((len(own), 1), np.float32) for own in x]
    recv_x, *_ = fused_a2a.dispatch_forward(x, ids, probs, 2)
    assert [rows.dtype for rows in recv_x] == [np.dtype(dtype)] * 2
    assert recv_x[0].tobytes() == x[0][[0, 2]].tobytes() + x[1][[1]].tobytes()
    assert recv_x[1].tobytes() == x[0][[1]].tobytes() + x[1][[0]].tobytes()


@law
@given(strategies.rows_worlds(dtypes=(BF16,)), st.data())
def test_blockwise_fp8_pairs_travel_together(world, data):
    num_tokens = [len(own) for own in world.x]
    tokens = data.draw(strategies.matrices(num_tokens, 256, ml_dtypes.float8_e4m3fn, ("integers",)))
    scales = data.draw(strategies.matrices(num_tokens, 2, FP32, ("normal",)))
    pairs = list(zip(tokens, scales))
    recv_x, *_, handle = fused_a2a.dispatch_forward(pairs, world.token_indices, world.token_probs, world.num_experts)
    for rank, (recv_tokens, recv_scales) in enumerate(recv_x):
        source = list(zip(handle.src_rank[rank], handle.src_token[rank]))
        assert recv_tokens.shape == (len(source), 256) and recv_scales.shape == (len(source), 2)
        for row, (src, token) in enumerate(source):
            assert recv_tokens[row].tobytes() == tokens[src][token].tobytes()
            assert recv_scales[row].tobytes() == scales[src][token].tobytes()


EDGES = {
    "no tokens anywhere": ([0, 0], 2, lambda rng, n: np.zeros((n, 2), int)),
    "one rank without tokens": ([3, 0], 2, lambda rng, n: np.tile([0, 3], (n, 1))),
    "all slots empty": ([3, 2], 2, lambda rng, n: np.full((n, 2), -1)),
    "one hot expert": ([5, 4], 1, lambda rng, n: np.full((n, 1), 2)),
    "K = 1": ([5, 4], 1, lambda rng, n: rng.integers(0, 4, (n, 1))),
    "K = E": ([3, 4], 4, lambda rng, n: rng.permuted(np.tile(np.arange(4), (n, 1)), axis=1)),
}


@pytest.mark.parametrize("edge", EDGES)
def test_edges_of_routing(edge):
    """Two ranks, four experts: shapes, dtypes, counts, and combined rows."""
    tokens, top_k, routing = EDGES[edge]
    rng = np.random.default_rng(1)
    x = [rng.integers(-4, 5, (n, 8)).astype(BF16) for n in tokens]
    world = strategies.RowsWorld(
        x, [routing(rng, n) for n in tokens], [rng.random((n, top_k), np.float32) for n in tokens], 4
    )
    recv_x, recv_ids, recv_probs, counts, handle = dispatch(world)
    times = ranks_of(world)
    for rank in range(2):
        rows = handle.num_rows[rank]
        assert (recv_x[rank].shape, recv_x[rank].dtype) == ((rows, 8), BF16)
        assert (recv_ids[rank].shape, recv_ids[rank].dtype) == ((rows, top_k), np.int64)
        assert (recv_probs[rank].shape, recv_probs[rank].dtype) == ((rows, top_k), np.float32)
        assert (counts[rank].shape, counts[rank].dtype) == ((2,), np.int64)
    assert sum(handle.num_rows) == sum(int(n.sum()) for n in times)
    combined = fused_a2a.combine_forward(recv_x, handle)
    assert_same_bits(combined, [(own * n[:, None] + 0.0).astype(BF16) for own, n in zip(x, times)], "combined_x")


def test_a_world_worked_by_hand():
    """Two ranks, four experts (0, 1 on rank 0; 2, 3 on rank 1), top-2."""
    x = [np.repeat([[1], [2]], 4, axis=1).astype(np.float32), np.repeat([[3], [4]], 4, axis=1).astype(np.float32)]
    ids = [np.array([[1, 0], [2, 1]]), np.array([[-1, 3], [-1, -1]])]
    probs = [np.array([[0.25, 0.75], [0.5, 0.125]], np.float32), np.array([[9, 0.0625], [9, 9]], np.float32)]
    recv_x, recv_ids, recv_probs, counts, handle = fused_a2a.dispatch_forward(x, ids, probs, 4)
    assert [rows[:, 0].tolist() for rows in recv_x] == [[1, 2], [2, 3]]
    assert [rows.tolist() for rows in recv_ids] == [[[1, 0], [-1, 1]], [[0, -1], [-1, 1]]]
    assert [rows.tolist() for rows in recv_probs] == [[[0.25, 0.75], [0, 0.125]], [[0.5, 0], [0, 0.0625]]]
    assert [count.tolist() for count in counts] == [[1, 2], [1, 1]]
    rows = [np.repeat([[a], [b]], 4, axis=1).astype(np.float32) for a, b in ((10, 20), (300, 400))]
    assert [out[:, 0].tolist() for out in fused_a2a.combine_forward(rows, handle)] == [[10, 320], [400, 0]]


def test_hidden_bytes_bill_one_byte_inputs_at_two():
    assert fused_a2a.get_hidden_bytes(np.zeros((3, 64), BF16)) == 128
    assert fused_a2a.get_hidden_bytes(np.zeros((3, 64), np.float32)) == 256
    assert fused_a2a.get_hidden_bytes(np.zeros((0, 64), np.uint8)) == 128
    assert fused_a2a.get_hidden_bytes(np.zeros((3, 64), ml_dtypes.float8_e4m3fn)) == 128
