"""Bounded waits (epmoe/kernels/wait.py) of the rows kernels, and the errors that they raise on the host.

what: (phase, FOR_...), recorded if the wait expires. index: number of the awaited thing, mostly a src_rank.
"""

import numpy as np

from epmoe.device import (any_lane, device_fn, i32, ld_acquire_sys_i32, ld_acquire_sys_u32, ld_acquire_sys_u64,
                          ld_relaxed_gpu_u64, ld_relaxed_sys_u64, syncwarp, u32, u64)
from epmoe_ref.errors import EPValueError, PeerTimeout

from .. import status
from ..wait import until, wait_for_own_blocks
from . import mailbox
from .shape import p

ROWS_DISPATCH, ROWS_COMBINE = 11, 12
PHASES = {ROWS_DISPATCH: "dispatch of rows", ROWS_COMBINE: "combine of rows"}
FOR_ANNOUNCEMENT, FOR_ARRIVAL, FOR_BLOCKS, FOR_WINDOW = 11, 12, 13, 14


@device_fn
def tagged(epoch, number):
    """A word with a number (32 bits) and the call's number above it, so that it is its own ready flag."""
    return u64(u64(u64(epoch) << u64(32)) | u64(u32(number)))


@device_fn
def status_of(params):
    """Address of the status words."""
    return u64(params[p.words] + u64(mailbox.STATUS))


@device_fn
def for_blocks(params, address, wanted, phase):
    """One thread waits until a counter of this rank's blocks is `wanted`, and acquires. Returns success."""
    return wait_for_own_blocks(address, wanted, status_of(params), params[p.timeout_ns], phase, FOR_BLOCKS, i32(0))


@device_fn
def in_warp(ok):
    """Whether the waits of all lanes of a warp succeeded. Afterwards all lanes may read what one has acquired."""
    failed = any_lane(not ok)
    syncwarp()
    return failed == 0


def _until(load, part_of):
    """Device function: waits until part_of the word at the address is `wanted` -> (whether it is, the word)."""
    wait = until(load, device_fn(lambda word, wanted: part_of(word) == u32(wanted)),
                 device_fn(lambda word: i32(part_of(word))))
    return device_fn(lambda params, address, wanted, what, index:
                     wait(address, wanted, status_of(params), params[p.timeout_ns], what, index))


_tag, _all = device_fn(lambda word: u32(word >> u64(32))), device_fn(lambda word: u32(word))
for_word_of_rank = _until(ld_relaxed_gpu_u64, _tag)       # tagged by a block of this rank
for_word_of_peer = _until(ld_acquire_sys_u64, _tag)       # may guard other data, by a fence of its leader block
for_tagged_word = _until(ld_relaxed_sys_u64, _tag)        # guards no other data
for_count = _until(ld_acquire_sys_i32, _all)
for_flag = _until(ld_acquire_sys_u32, _all)


def raise_if_failed(words, rank: int, timeout_s: float, announced):
    """Raises PeerTimeout if a wait of this rank expired.

    words: the status words. announced: [2, n_ranks], the calls of which this rank has announced, by parity.
    """
    if not words[status.FAILED]:
        return
    phase, waited_for = PHASES[int(words[status.FAILED])], int(words[status.WAITED_FOR])
    if waited_for == FOR_BLOCKS:
        text = ("waited for this rank's own blocks, which do not all run at once: take fewer SMs or share the device "
                "less")
    else:
        missing, did = [int(words[status.INDEX])], "send all its rows"
        if waited_for in (FOR_ANNOUNCEMENT, FOR_WINDOW):
            epoch = int(words[status.EXPECTED])
            silent = np.flatnonzero(np.asarray(announced)[epoch & 1] != epoch).tolist()
            if waited_for == FOR_ANNOUNCEMENT or silent:
                missing, did = silent or missing, "begin the call"
        text = f"src_rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} did not {did}"
    raise PeerTimeout(f"rank {rank}, {phase}: {text}; gave up after timeout={timeout_s:g} s")


def raise_if_bad_ids(words, rank: int):
    """Raises EPValueError if the kernels met ids that they had to treat as -1."""
    outside, repeated = int(words[status.BAD_IDS]), int(words[status.REPEATED_IDS])
    if outside or repeated:
        raise EPValueError(
            f"rank {rank}: token_indices[{words[status.BAD_TOKEN] - 1}, {words[status.BAD_K]}] is "
            f"{words[status.BAD_ID]}; {outside} ids outside [0, num_experts) and {repeated} repeated ids were "
            "treated as -1 (no expert): give each token distinct ids, and -1 where there is no expert")
