"""Bounded waits of the rows kernels: for a peer's flag to hold this call's epoch, and for the blocks of this rank."""

from epmoe.device import (atomic_add_acq_rel_gpu_i32, device_fn, globaltimer, grid_dim, i32, ld_acquire_sys_u64,
                          ld_relaxed_gpu_i32, load_u64, st_relaxed_gpu_i32, st_release_gpu_i32, syncthreads,
                          syncthreads_or, thread_idx, u64)

from ..spin import POLLS_PER_LOOK, gives_up, wait_for_own_blocks
from ..status import has_failed, record_expired
from . import control
from .status import FOR_BLOCKS


@device_fn
def wait_for_epoch(flag, epoch, status, timeout_ns, phase, waited_for, source):
    """Waits until a flag that a peer writes holds the epoch, acquired at system scope; whether it does."""
    if u64(ld_acquire_sys_u64(flag)) == epoch:
        return True
    since = u64(globaltimer())
    polls = 0
    while u64(ld_acquire_sys_u64(flag)) != epoch:
        polls += 1
        if polls % POLLS_PER_LOOK == 0 and gives_up(status, since, timeout_ns):
            record_expired(status, phase, waited_for, source, i32(epoch), -1)
            return False
    return True


def of_block(block):
    """Device functions for one kernel: (failed, begin, meet).

    failed(params): whether a wait of this rank expired earlier; the same in all threads of a block.
    begin(params) -> this call's epoch. meet(params, phase): barrier over all blocks of this rank; whether all came.
    """
    p_words, p_timeout = block.offset("words"), block.offset("timeout_ns")

    @device_fn
    def failed(params):
        status = u64(u64(load_u64(params + u64(p_words))) + u64(control.STATUS))
        return syncthreads_or(thread_idx() == 0 and has_failed(status))

    @device_fn
    def begin(params):
        return u64(u64(load_u64(u64(load_u64(params + u64(p_words))) + u64(control.EPOCH))) + u64(1))

    @device_fn
    def meet(params, phase):
        words = u64(load_u64(params + u64(p_words)))
        syncthreads()                           # all of this block is done before it says so
        ok = True
        if thread_idx() == 0:
            turn = i32(ld_relaxed_gpu_i32(words + u64(control.BARRIER_TURN)))
            if atomic_add_acq_rel_gpu_i32(words + u64(control.BARRIER_COUNT), i32(1)) == grid_dim() - 1:
                # nobody comes again before the turn changes
                st_relaxed_gpu_i32(words + u64(control.BARRIER_COUNT), i32(0))
                st_release_gpu_i32(words + u64(control.BARRIER_TURN), i32(turn + 1))
            else:
                ok = wait_for_own_blocks(words + u64(control.BARRIER_TURN), i32(turn + 1), words + u64(control.STATUS),
                                         u64(load_u64(params + u64(p_timeout))), phase, FOR_BLOCKS, i32(turn + 1))
        return not syncthreads_or(not ok)       # thread 0 acquired for all

    return failed, begin, meet
