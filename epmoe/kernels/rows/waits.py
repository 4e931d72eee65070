"""Bounded waits of the rows kernels, and the common beginning and end of a call."""

from typing import NamedTuple

from epmoe.device import (atomic_add_relaxed_gpu_i32, device_fn, globaltimer, grid_dim, i32, ld_acquire_sys_i32,
                          ld_acquire_sys_u32, ld_acquire_sys_u64, ld_relaxed_gpu_u64, ld_relaxed_sys_u32,
                          ld_relaxed_sys_u64, load_u64, prefetch, red_add_release_gpu_i32, store_i32, store_u64,
                          syncthreads_or, thread_idx, u32, u64, warp_broadcast_i32)

from ..params import in_context
from ..spin import POLLS_PER_LOOK, gives_up, wait_for_own_blocks
from ..status import has_failed, record_expired
from . import control
from .status import FOR_BLOCKS

LINE = 128              # bytes that prefetch brings


@device_fn
def told(epoch, number):
    """A word that says a number (32 bits) in this call."""
    return u64(u64(u64(epoch) << u64(32)) | u64(u32(number)))


def _wait_for_word(load):
    @device_fn
    def wait(address, seen, epoch, status, timeout_ns, phase, waited_for, index):
        """The word at the address once it is of this epoch, 0 if that takes too long; seen: its value before."""
        if u32(u64(seen) >> u64(32)) == u32(epoch):
            return u64(seen)
        since = u64(globaltimer())
        polls = 0
        while u32(u64(seen) >> u64(32)) != u32(epoch):
            polls += 1
            if polls % POLLS_PER_LOOK == 0 and gives_up(status, since, timeout_ns):
                record_expired(status, phase, waited_for, index, i32(epoch), i32(u64(seen) >> u64(32)))
                return u64(0)
            seen = u64(load(address))
        return u64(seen)

    return wait


wait_for_word_of_rank = _wait_for_word(ld_relaxed_gpu_u64)          # written by a block of this rank
wait_for_word_of_peer = _wait_for_word(ld_acquire_sys_u64)          # behind the fence of its clerk
wait_for_tagged_word = _wait_for_word(ld_relaxed_sys_u64)           # the word is its own ready flag


def _wait_until_equal(load):
    @device_fn
    def wait(address, wanted, status, timeout_ns, phase, waited_for, index):
        """Waits until the word that peers write at the address equals `wanted`, acquired; whether it does."""
        if load(address) == wanted:
            return True
        since = u64(globaltimer())
        polls = 0
        while load(address) != wanted:
            polls += 1
            if polls % POLLS_PER_LOOK == 0 and gives_up(status, since, timeout_ns):
                record_expired(status, phase, waited_for, index, i32(wanted), -1)
                return False
        return True

    return wait


wait_for_count = _wait_until_equal(ld_acquire_sys_i32)
wait_for_flag = _wait_until_equal(ld_acquire_sys_u32)
_see_flag = _wait_until_equal(ld_relaxed_sys_u32)


@device_fn
def see_flag(address, wanted, status, timeout_ns, phase, waited_for, index):
    """As wait_for_flag, polled relaxed: acquiring polls would empty an L1 again and again that others work with."""
    seen = _see_flag(address, wanted, status, timeout_ns, phase, waited_for, index)
    if seen:
        ld_acquire_sys_u32(address)
    return seen


def claims(block, counter):
    """Device function claim(params, epoch, lane) -> the next unit of work that no warp of this rank has.

    counter: CLAIMED or TAKEN.
    """
    p_words = block.index("words")

    @device_fn
    def claim(params, epoch, lane):
        unit = i32(0)
        if lane == 0:
            words = params[p_words]
            unit = atomic_add_relaxed_gpu_i32(words + u64(counter) + u64(4) * (u64(epoch) & u64(1)), i32(1))
        return i32(warp_broadcast_i32(unit, i32(0)))

    return claim


class OfBlock(NamedTuple):
    """The functions of of_block()."""

    begin: callable
    epoch_now: callable
    goes_on: callable
    say_begun: callable
    has_begun: callable
    all_begun: callable
    end: callable


def of_block(block, n_ranks):
    """Device functions for one kernel.

    begin(params, words, told) -> what goes_on() needs. words: as in params, and an argument of the kernels besides, so
    that the first look at them need not wait for the look at params; told: shared uint64 array [1]. epoch_now(words):
    for a warp that does not wait for others, before goes_on(); as that gives it. goes_on(begun): the first barrier
    of a block -> this call's epoch, 0 if a wait of this rank expired in an earlier one. say_begun(params): one thread
    of a block, behind that barrier; whoever needs no fence of its own for it says it when the block has nothing urgent
    to do. has_begun(params, phase): a thread of the leader block, some time in the call; whether all blocks of this rank have
    said so, which it acquires. all_begun(params, phase): the same of the whole block.
    end(params, epoch, my_rank): of the leader block, when all have begun and no peer writes here any more.
    """
    p_words, p_timeout, control_of = block.index("words"), block.index("timeout_ns"), in_context(block, "control_ptrs")
    p_context, n_lines = block.index("context"), -(-8 * block.context_words // LINE)

    @device_fn
    def begin(params, words, told):
        if thread_idx() < n_lines:              # one miss for all of them
            prefetch(params[p_context] + u64(LINE) * u64(thread_idx()))
        failed, last_epoch = False, u64(0)
        if thread_idx() == 0:                   # others need not wait for it until the barrier
            failed = has_failed(words + u64(control.STATUS))
            last_epoch = u64(load_u64(words + u64(control.EPOCH)))
        return failed, last_epoch, told

    @device_fn
    def epoch_now(words):
        epoch = u64(u64(load_u64(words + u64(control.EPOCH))) + u64(1))
        if has_failed(words + u64(control.STATUS)):
            epoch = u64(0)
        return epoch

    @device_fn
    def goes_on(begun):
        if thread_idx() == 0:
            begun[2][0] = u64(begun[1] + u64(1))
        if syncthreads_or(begun[0]):
            return u64(0)
        return u64(begun[2][0])

    @device_fn
    def say_begun(params):
        red_add_release_gpu_i32(params[p_words] + u64(control.BEGUN), i32(1))

    @device_fn
    def has_begun(params, phase):
        words = params[p_words]
        return wait_for_own_blocks(words + u64(control.BEGUN), i32(grid_dim()), words + u64(control.STATUS),
                                   params[p_timeout], phase, FOR_BLOCKS, i32(0))

    @device_fn
    def all_begun(params, phase):
        ok = True
        if thread_idx() == 0:
            ok = has_begun(params, phase)
        return not syncthreads_or(not ok)       # thread 0 acquired for all

    @device_fn
    def end(params, epoch, my_rank):
        words, i = params[p_words], i32(thread_idx())
        other = u64(u64(u64(epoch) & u64(1)) ^ u64(1))
        if i < n_ranks:                         # arrivals, which lie at the beginning of control memory
            mine = control_of(params, my_rank)
            store_i32(mine + u64(4) * (other * u64(n_ranks) + u64(i)), i32(0))
        if i == 0:
            store_i32(words + u64(control.CLAIMED) + u64(4) * other, i32(0))
            store_i32(words + u64(control.TAKEN) + u64(4) * other, i32(0))
            store_i32(words + u64(control.NUMBERED) + u64(4) * other, i32(0))
            store_i32(words + u64(control.BEGUN), i32(0))
            store_u64(words + u64(control.EPOCH), epoch)

    return OfBlock(begin, epoch_now, goes_on, say_begun, has_begun, all_begun, end)
