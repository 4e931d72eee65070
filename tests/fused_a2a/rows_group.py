"""What the device tests of fused_a2a share: small groups, NumPy copies of results, exact equality over a world."""

import os
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import settings

from epmoe import DeviceArray, LaunchConfig, LocalWorld, device
from epmoe.fused_a2a import buffers
from epmoe.fused_a2a.buffer import Buffer

sys.path.append(str(Path(__file__).parents[1] / "ref_fused_a2a"))
import fused_a2a_laws as laws

BF16, FP16, FP32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

law = settings(laws.law, max_examples=12 if "EPMOE_FUZZ" in os.environ else 6)  # at night, by day
SMALL_LAUNCH = LaunchConfig(n_sms=2, num_threads=32)


def group_of(
    n_ranks,
    *,
    n_sms=SMALL_LAUNCH.n_sms,
    num_threads=SMALL_LAUNCH.num_threads,
    timeout=30.0,
    lamport_rows=True,
    **simulation,
):
    """A LocalWorld whose two buffers use few threads in the simulator; on a GPU, the GPU's own.

    lamport_rows=False: no row goes without flags.
    """
    group = LocalWorld(n_ranks, **simulation)
    launch = LaunchConfig(n_sms=n_sms, num_threads=num_threads) if device.SIM else None
    for of_kind in (buffers._buffer, buffers._hybrid_ep_buffer):
        buffer = of_kind[group] = Buffer(weakref.proxy(group), launch=launch, timeout=timeout)
        if not lamport_rows:
            buffer.launches.tuning = replace(buffer.launches.tuning, lamport_tokens=0, lamport_rows=0)
        weakref.finalize(group, buffer.close, collective=False)
    return group


ABSENT = 2**32 - 1


def expect_nothing_left(group, buffer):
    """Every word of the buffer's Lamport rows is ABSENT, as before the first call; and no access raced."""
    at = buffer.pool_layout
    assert at.lamport_bytes > 0
    for r in buffer.ranks:
        words = buffer.pool.buffers[r.rank].read(np.uint32, (2 * at.lamport_bytes // 4,), at.lamport_at)
        assert (words == ABSENT).all(), f"rank {r.rank}: {np.flatnonzero(words != ABSENT)} of the windows' words"
    assert not group.machine.races


class OneRank:
    """A world of one rank seen as one rank a process: plain arrays, and all launches on the caller's stream."""

    lists = False

    def __init__(self, world):
        self._world = world

    def launching(self, fused):
        """As LocalWorld's, without streams of its own."""
        return self._world.launching(False)

    def stream_of(self, rank, fused=False):
        """The caller's stream."""
        return self._world.stream_of(rank)

    def __getattr__(self, name):
        return getattr(self._world, name)


def host(result):
    """A result, or a list or pair of them, as NumPy copies; None stays None."""
    if isinstance(result, (list, tuple)):
        return [host(one) for one in result]
    if isinstance(result, DeviceArray):
        return result.numpy()
    return None if result is None else np.array(result)


def assert_same(got, want, name):
    """As assert_same_bits, of results on the device."""
    laws.assert_same_bits(host(got), want, name)


def routing(rng, num_tokens, num_experts, top_k, dropped=0.2):
    """token_indices int64 [T, K] and token_probs float32 [T, K] of each rank."""
    ids = [np.argsort(rng.random((n, num_experts)), axis=1)[:, :top_k].astype(np.int64) for n in num_tokens]
    ids = [np.where(rng.random(a.shape) < dropped, -1, a) for a in ids]
    return ids, [rng.random(a.shape, np.float32) for a in ids]


def tokens(rng, num_tokens, hidden, dtype=BF16):
    """Normal data [T, H] of each rank."""
    return [rng.standard_normal((n, hidden)).astype(dtype) for n in num_tokens]


def fp8_pairs(rng, num_tokens, hidden):
    """Blockwise FP8 of each rank: pairs of e4m3 values [T, H] and scales float32 [T, H / 128], all of them numbers."""
    return [
        (rng.integers(0, 127, (n, hidden), np.uint8).view(E4M3), rng.random((n, hidden // 128), np.float32))
        for n in num_tokens
    ]
