"""Bounded waits. Plain kernels poll memory in wait_for_signal and wait_for_counter, which give up after the timeout.

A wait that gives up records what it waited for in the status words, and raises FAILED there, which ends every other
wait of this rank, in this launch and in later ones.
"""

from typing import NamedTuple

from epmoe.device import (block_dim, device_fn, globaltimer, i32, ld_acquire_gpu_i32, ld_acquire_sys_u64, store_u64,
                          syncthreads_or, thread_idx, u64)
from epmoe.layout import MAX_FINITE

from ..status import FOR_RECV_COUNT, record_expired
from ..wait import POLLS_PER_LOOK, gives_up

LONGER_NS = 1_000_000_000   # added to the timeout of a wait for block 0


class Waiter(NamedTuple):
    """Arguments of a wait: address of the status words, timeout [ns], phase (a number of status.PHASES)."""

    status: int
    timeout_ns: int
    phase: int


@device_fn
def with_longer_timeout(waiter):
    """For a wait for a flag of block 0: block 0 then gives up first, and records which signal is missing."""
    return Waiter(waiter.status, u64(waiter.timeout_ns) + u64(LONGER_NS), waiter.phase)


@device_fn
def wait_for_signal(word, segment, waiter):
    """Waits for a recv_count word. Returns the count, acquired at system scope, or MAX_FINITE if it gave up."""
    count = u64(ld_acquire_sys_u64(word))
    since = u64(globaltimer())
    polls = 0
    while count == u64(MAX_FINITE):
        polls += 1
        if polls % POLLS_PER_LOOK == 0 and gives_up(waiter.status, since, waiter.timeout_ns):
            record_expired(waiter.status, waiter.phase, FOR_RECV_COUNT, segment, 0, -1)
            return u64(MAX_FINITE)
        count = u64(ld_acquire_sys_u64(word))
    return count


@device_fn
def wait_for_counter(word, wanted, waiter, waited_for, index):
    """Waits until a counter of this rank equals `wanted`, its maximum. Acquires at device scope. Returns success."""
    seen = ld_acquire_gpu_i32(word)
    since = u64(globaltimer())
    polls = 0
    while seen != wanted:
        polls += 1
        if polls % POLLS_PER_LOOK == 0 and gives_up(waiter.status, since, waiter.timeout_ns):
            record_expired(waiter.status, waiter.phase, waited_for, index, wanted, seen)
            return False
        seen = ld_acquire_gpu_i32(word)
    return True


def all_signals(cfg, keep):
    """Device function (inbox, waiter) -> whether all signals came; by all threads of one block.

    It waits for all words of recv_count, calls keep(ep_counters, i, count) for each, and then resets them all.
    """
    n_words = cfg.n_local_experts * cfg.n_src_ranks

    @device_fn
    def await_signals(inbox, waiter):
        missing = False
        i = i32(thread_idx())
        while i < n_words:
            count = wait_for_signal(u64(inbox.recv_count_p) + u64(8 * i), i, waiter)
            if count == u64(MAX_FINITE):
                missing = True
            else:
                keep(inbox.ep_counters, i, i32(count))
            i = i32(i + block_dim())
        ok, i = not syncthreads_or(missing), i32(thread_idx())
        while ok and i < n_words:               # not after a timeout: the words then tell which signals are missing
            store_u64(u64(inbox.recv_count_p) + u64(8 * i), u64(MAX_FINITE))
            i = i32(i + block_dim())
        return ok

    return await_signals
