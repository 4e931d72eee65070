"""What goes wrong is recorded, and told: peers that never come, arrays that do not fit."""

import numpy as np
import pytest
from ml_dtypes import bfloat16 as BF16

from epmoe import EPLocalSyncCounters, device
from epmoe.kernels import plain
from epmoe.kernels.plain.arguments import capacity
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import DeadlockError, EPValueError, OutOfBoundsError, PeerTimeout

CFG = EPConfig(n_ranks=2, n_experts=4, top_k=2, hidden=8, max_tokens_per_rank=4)


def tokens(n):
    return np.arange(8 * n, dtype=np.float32).reshape(n, 8).astype(BF16)


def hand_made():
    """(arguments of dispatch_kernel for rank 0 of CFG, machine, stream), of NumPy arrays."""
    machine, new = device.machine(2, expire_waits=True), np.zeros
    size = CFG.format.msg_size()
    recv, counts = new((2, 2, 4, size), np.uint8), np.full((2, 2), 2**64 - 1, np.uint64)
    arguments = [
        tokens(2),
        np.array([[0, 1], [0, 1]], np.int32),
        dict(output_tokens=new((capacity(CFG), 8), BF16)),
        new(3, np.uint32),
        new(2, np.int32),
        new((capacity(CFG), 2), np.int32),
        new((4, size), np.uint8),
        (recv, new((2, 2, 4, size), np.uint8)),
        (counts, np.full((2, 2), 2**64 - 1, np.uint64)),
        EPLocalSyncCounters(4, np.zeros(EPLocalSyncCounters(4).total_size(), np.int32)),
        0,
    ]
    return arguments, machine, machine.stream(0)


def test_a_peer_that_never_comes_is_named_and_the_kernel_ends():
    arguments, machine, stream = hand_made()
    kernel = plain.dispatch_kernel(CFG)
    kernel[2, 64, stream](*arguments, timeout=0.01)
    with pytest.raises(PeerTimeout, match="rank 0, dispatch_wait: no signal from .*rank 1"):
        kernel.check()
    machine.synchronize()
    assert not arguments[3].any(), "row_offsets were written, though counts are missing"


def test_a_launch_without_a_stream_runs_alone_and_its_deadlock_is_reported():
    arguments, _, _ = hand_made()
    with pytest.raises(DeadlockError, match="recv_count"):
        plain.dispatch_kernel(CFG)[2, 64](*arguments)


REFUSED = [
    (0, tokens(5), "5 tokens are more than max_tokens_per_rank=4|shape"),
    (0, tokens(2).astype(np.float32), "input_tokens has dtype float32, bfloat16 is needed"),
    (0, tokens(4)[::2], "input_tokens is not C-contiguous"),
    (1, np.zeros((2, 3), np.int32), r"topk_ids has shape \(2, 3\), \(num_tokens=2, 2\) is needed"),
    (1, np.zeros((2, 2), np.int64), "topk_ids has dtype int64, int32 is needed"),
    (2, dict(output_tokens=np.zeros((3, 8), BF16)), "output_tokens has 3 rows; 16 are needed"),
    (2, dict(), "format_handler has no output_tokens"),
    (3, np.zeros(2, np.uint32), r"row_offsets has shape \(2,\), \(3\) is needed"),
    (5, np.zeros((4, 2), np.int32), "src_info has 4 rows; 16 are needed"),
    (7, (0,), "recv_buf_ptrs has 1 entries; p2p_world_size=2"),
    (10, 2, "my_rank=2 must be a number in"),
    (6, None, "send_buf_p is None: an address or an array is needed"),
]


@pytest.mark.parametrize("place, value, words", REFUSED, ids=[w[:30] for _, _, w in REFUSED])
def test_arguments_that_do_not_fit_are_refused(place, value, words):
    arguments, machine, stream = hand_made()
    arguments[place] = value
    with pytest.raises(EPValueError, match=words):
        plain.dispatch_kernel(CFG)[2, 64, stream](*arguments)
    assert not machine.in_flight()


def test_the_number_and_the_names_of_arguments_are_checked():
    arguments, _, stream = hand_made()
    kernel = plain.dispatch_kernel(CFG)
    with pytest.raises(EPValueError, match="dispatch_kernel takes 11 arguments .input_tokens, topk_ids, .*not 10"):
        kernel[2, 64, stream](*arguments[:-1])
    with pytest.raises(EPValueError, match="does not take weights; by keyword it takes status, timeout, clean_topk"):
        kernel[2, 64, stream](*arguments, weights=1)


@pytest.mark.parametrize("grid, block", [(0, 64), ("2", 64), (2, 40), (2, 0), (2, 2048), (2.5, 32)])
def test_grids_and_blocks_are_whole_warps(grid, block):
    arguments, _, stream = hand_made()
    with pytest.raises(EPValueError, match=r"dispatch_kernel\[.*at least 1, .*a multiple of 32 and at most 1024"):
        plain.dispatch_kernel(CFG)[grid, block, stream](*arguments)


def test_buffers_that_are_too_small_are_seen_where_they_are_written():
    arguments, machine, stream = hand_made()
    arguments[6] = np.zeros(8, np.uint8)
    plain.dispatch_kernel(CFG)[2, 64, stream](*arguments)
    with pytest.raises(OutOfBoundsError, match="send_buf_p"):
        machine.synchronize()


def test_grids_are_kept_within_the_ready_flags():
    cfg = EPConfig(n_ranks=1, n_experts=1, top_k=1, hidden=8, max_tokens_per_rank=8)
    kernel = plain.combine_wait_kernel(cfg, router_weights_wrapper=plain.given_weights, n_sms=6, num_threads=32)
    assert kernel.grid(device.machine(1)) == 2 and kernel.block() == 32
    assert plain.combine_async_kernel(cfg, n_sms=6).grid(device.machine(1)) == 6
