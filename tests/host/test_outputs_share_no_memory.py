"""Arrays for results (out=) that overlap themselves, each other or inputs are refused before anything is launched."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from worlds_at_hand import BF16, batch, combine, config, parallel, same_bits

from epmoe import EPValueError
from epmoe.host.arrays import Array, view
from epmoe.host.out_arrays import expect_apart

T, H = 4, 16


def strided(n, *strides):
    return np.lib.stride_tricks.as_strided(np.zeros(n, BF16), (T, H), strides)


BOTH = np.zeros((T + 1, H), BF16)


@pytest.mark.parametrize(
    "out, says",
    [
        ([strided(H, 0, 2), strided(H, 0, 2)], r"strides \(0, 2\)"),
        ([BOTH[:T]] * 2, "share memory"),
        ([BOTH[:T], BOTH[1:]], "of rank 1 and out: .* of rank 0 share memory"),
        ([strided(64, 4, 2), BOTH[:T]], r"strides \(4, 2\)"),
    ],
    ids=["strides of zero", "one for both", "shifted", "sliding"],
)
def test_combine_refuses_them_and_the_round_goes_on(out, says):
    cfg = config()
    x, ids, weights = batch(cfg, num_tokens=[T, T])
    with parallel(cfg) as ep:
        d = ep.dispatch(x, ids)
        with pytest.raises(EPValueError, match=says):
            combine(ep, d, weights, out=out)
        side_by_side = np.zeros((T, 2, H), BF16)  # interleaved, and apart
        got = combine(ep, d, weights, out=[side_by_side[:, 0], side_by_side[:, 1]])
        assert same_bits(got, combine(ep, ep.dispatch(x, ids), weights))


def test_a_tensor_that_is_not_contiguous_is_written():
    torch = pytest.importorskip("torch")
    x, ids, weights = batch(config(), num_tokens=[T, T])
    outs = [torch.zeros(H, T, dtype=torch.bfloat16).T, torch.zeros(T, 2 * H).bfloat16()[:, H:]]
    with parallel(config()) as ep:
        made = combine(ep, ep.dispatch(x, ids), weights, out=outs)
        wanted = combine(ep, ep.dispatch(x, ids), weights)
    assert all(a is b for a, b in zip(made, outs))
    assert same_bits([a.contiguous().view(torch.int16).numpy().view(BF16) for a in outs], wanted)


def test_dispatch_refuses_one_array_for_two_ranks_and_for_two_results():
    cfg = config(n_experts=2)
    x, ids, _ = batch(cfg, num_tokens=[T, T])
    with parallel(cfg) as ep:
        one = ep.dispatch(x, ids)
        ep.reset()
        written = "output_tokens", "row_offsets", "src_info", "expert_ids", "recv_count"
        copies = [replace(d, **{name: np.array(getattr(d, name)) for name in written}) for d in one]
        same = replace(copies[1], output_tokens=copies[0].output_tokens)
        said = "out: output_tokens of rank 1 and out: output_tokens of rank 0 share"
        with pytest.raises(EPValueError, match=said):
            ep.dispatch(x, ids, out=[copies[0], same])
        both = np.zeros(3, np.uint32)
        counts = both[:2].view(np.int32).reshape(1, 2)
        same = replace(copies[0], row_offsets=both[:2], recv_count=counts)
        said = "out: recv_count of rank 0 and out: row_offsets of rank 0 share memory"
        with pytest.raises(EPValueError, match=said):
            ep.dispatch(x, ids, out=[same, copies[1]])
        for got, want in zip(ep.dispatch(x, ids, out=copies), one):
            assert np.array_equal(got.row_offsets, want.row_offsets)
            assert np.array_equal(got.recv_count, want.recv_count)


def test_in_device_memory_an_output_may_not_be_an_input_either():
    a = view(np.zeros((T, H), np.float32), "a")

    def on_gpu_at(address, shape):
        return Array(None, address, shape, a.dtype, 0, None, a)

    out = [("out", on_gpu_at(a.address, (T, H)))]
    with pytest.raises(EPValueError, match="out and y share memory"):
        expect_apart(out, [("y", on_gpu_at(a.address + 64, (1, H)))])
    expect_apart(out, [("y", on_gpu_at(a.address + T * H * 4, (T, H)))])
    expect_apart(out, [("y", on_gpu_at(a.address, (0, H)))])


@pytest.mark.parametrize(
    "array, apart",
    [
        (np.zeros((4, 6))[:, ::-1], True),
        (np.zeros((4, 6)).T, True),
        (np.zeros((4, 6, 2))[::2, :, 1], True),
        (np.lib.stride_tricks.sliding_window_view(np.zeros(8), 3, writeable=True), False),
        (np.broadcast_to(np.zeros(3), (1, 3)), True),
        (np.broadcast_to(np.zeros(3), (0, 3)), True),
        (np.broadcast_to(np.zeros(3), (2, 3)), False),
    ],
)
def test_overlap_with_itself_is_told_by_strides(array, apart):
    said = pytest.raises(EPValueError, match="several elements lie in one place")
    with nullcontext() if apart else said:
        expect_apart([("out", view(array, "out"))])
