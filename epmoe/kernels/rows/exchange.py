"""How the ranks meet in a call: notes and announcements at its beginning, arrivals at its end."""

from typing import NamedTuple

from epmoe.device import (atomic_add_acq_rel_gpu_i32, block_dim, device_fn, grid_dim, i32, load_i32, load_u64,
                          st_release_sys_u64, store_i32, store_u64, syncthreads, syncthreads_or, thread_idx, u64)

from . import control, waits
from .shape import MAX_PLACES
from .status import FOR_ANNOUNCEMENT, FOR_ARRIVAL


class Exchange(NamedTuple):
    """Device functions made for one kernel.

    announce(params, epoch, num_tokens, my_rank): one block writes this rank's note to every peer, then its flag there.
    await_notes(params, epoch, my_rank): every block; whether all ranks have announced themselves. note(params, epoch,
    my_rank, source):
    address of a note. finish(params, epoch, my_rank): every block, when it has sent all its part; the last one tells
    the peers, and makes the words ready for the next call; gives whether this block is that last one.
    await_arrivals(params, epoch, my_rank): a whole block; whether every rank has sent all its rows.
    """

    announce: callable
    await_notes: callable
    note: callable
    finish: callable
    await_arrivals: callable


def make(shape, block, phase, *, with_counts):
    """with_counts: the note tells tokens and counts too, out of `totals`, which are zero again after the call."""
    ranks, local = shape.n_ranks, shape.n_local_experts
    at = control.control(ranks, local)          # only where the flags lie: they depend on the ranks alone
    announced, arrived = at.announced, at.arrived
    p_control, p_words, p_timeout = block.offset("control_ptrs"), block.offset("words"), block.offset("timeout_ns")
    p_notes, p_note_bytes = block.offset("notes_at"), block.offset("note_bytes")
    p_places, p_capacity, p_totals = block.offset("places"), block.offset("capacity"), block.offset("totals")
    n_totals = ranks + ranks * local

    @device_fn
    def control_of(params, rank):
        return u64(load_u64(params + u64(p_control) + u64(8) * u64(rank)))

    @device_fn
    def note_in(params, base, epoch, source):
        index = u64((u64(epoch) & u64(1)) * u64(ranks) + u64(source))
        return u64(base + u64(load_u64(params + u64(p_notes))) + index * u64(load_u64(params + u64(p_note_bytes))))

    @device_fn
    def announce(params, epoch, num_tokens, my_rank):
        totals = u64(load_u64(params + u64(p_totals)))
        peer = i32(0)
        while peer < ranks:
            note = note_in(params, control_of(params, peer), epoch, my_rank)
            i = i32(thread_idx())
            if i < MAX_PLACES:
                place = u64(8) * u64(i)
                store_u64(note + u64(control.PLACES) + place, load_u64(params + u64(p_places) + place))
            if i == 0:
                store_i32(note + u64(control.CAPACITY), i32(load_i32(params + u64(p_capacity))))
                store_i32(note + u64(control.TOKENS), num_tokens)
            if with_counts:
                while i < ranks + local:
                    source = i
                    if i >= ranks:
                        source = i32(peer * local + i)          # totals: ranks, then experts
                    store_i32(note + u64(control.COUNTS) + u64(4) * u64(i), load_i32(totals + u64(4) * u64(source)))
                    i = i32(i + block_dim())
            peer = i32(peer + 1)
        syncthreads()                           # notes by all threads before the flags
        i = i32(thread_idx())
        if i < ranks:
            st_release_sys_u64(control_of(params, i) + u64(announced) + u64(8) * u64(my_rank), epoch)

    @device_fn
    def await_flags(params, epoch, my_rank, flags, waited_for):
        words, ok, source = u64(load_u64(params + u64(p_words))), True, i32(thread_idx())
        if source < ranks:
            ok = waits.wait_for_epoch(control_of(params, my_rank) + u64(flags) + u64(8) * u64(source), epoch,
                                      words + u64(control.STATUS), u64(load_u64(params + u64(p_timeout))), phase,
                                      waited_for, source)
        return not syncthreads_or(not ok)       # each thread acquired one rank's flag, the barrier gives it to all

    @device_fn
    def await_notes(params, epoch, my_rank):
        return await_flags(params, epoch, my_rank, announced, FOR_ANNOUNCEMENT)

    @device_fn
    def await_arrivals(params, epoch, my_rank):
        return await_flags(params, epoch, my_rank, arrived, FOR_ARRIVAL)

    @device_fn
    def note_of(params, epoch, my_rank, source):
        return note_in(params, control_of(params, my_rank), epoch, source)

    @device_fn
    def finish(params, epoch, my_rank):
        words = u64(load_u64(params + u64(p_words)))
        syncthreads()                           # all of this block's stores before it says so
        is_last = False
        if thread_idx() == 0:
            is_last = atomic_add_acq_rel_gpu_i32(words + u64(control.FINISHED), i32(1)) == grid_dim() - 1
        is_last = syncthreads_or(is_last) != 0
        if is_last:
            i = i32(thread_idx())
            if i < ranks:                       # cumulative: covers what all blocks of this rank wrote to that peer
                st_release_sys_u64(control_of(params, i) + u64(arrived) + u64(8) * u64(my_rank), epoch)
            # all blocks have read the epoch, the totals and the count of blocks
            if with_counts:
                totals = u64(load_u64(params + u64(p_totals)))
                while i < n_totals:
                    store_i32(totals + u64(4) * u64(i), i32(0))
                    i = i32(i + block_dim())
            if thread_idx() == 0:
                store_i32(words + u64(control.FINISHED), i32(0))
                store_u64(words + u64(control.EPOCH), epoch)
        return is_last

    return Exchange(announce, await_notes, note_of, finish, await_arrivals)
