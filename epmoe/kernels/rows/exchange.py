"""How the ranks meet in a call: what the clerk of each tells all others at its beginning, arrivals at its end."""

from typing import NamedTuple

from epmoe.device import (block_dim, device_fn, i32, lane_id, ld_acquire_sys_u64, load_i32, load_u64,
                          red_add_release_sys_i32, shfl_idx, st_relaxed_sys_u64, syncthreads_or, thread_idx, u32, u64)

from . import control, roles, waits
from .shape import MAX_PLACES
from .status import FOR_ANNOUNCEMENT, FOR_ARRIVAL


class Exchange(NamedTuple):
    """Device functions made for one kernel.

    announce(params, epoch, num_tokens, my_rank, counts): of a warp of the clerk, behind a fence of its own for what
    earlier launches of this rank have done; this rank's note to every peer, without counts of experts; counts: of the
    tokens for rank r, in lane r. announce_experts(params, epoch, my_rank, counts, at): of the clerk; these,
    counts[at + expert].
    load_counts(counts, notes): every block, where counts are those of a handle, at this address; these, of all ranks,
    into a shared int32 array. await_notes(params, epoch, my_rank, notes): every block; what the ranks tell; whether all
    ranks have announced themselves. expert_count(params, epoch, my_rank, source, expert): a number of a note, -1 if it
    did not come. sent(params, epoch, my_rank, ok): every block that sends, when it has sent its part (ok).
    await_arrivals(params, epoch, my_rank, notes): of the clerk; whether every rank has sent all its rows.
    """

    announce: callable
    announce_experts: callable
    load_counts: callable
    await_notes: callable
    expert_count: callable
    sent: callable
    await_arrivals: callable


def words_of_notes(n_ranks):
    """Numbers of all notes, but for counts of experts."""
    return n_ranks * control.experts_at(n_ranks)


def make(shape, block, phase, *, with_counts):
    """with_counts: the notes tell the counts of rows; else these are those of a handle."""
    ranks, local, n_experts, sending = shape.n_ranks, shape.n_local_experts, shape.n_experts, roles.sending(shape)
    n_words, n_told = control.experts_at(ranks), control.COUNTS
    if with_counts:
        n_told = n_words
    p_control, p_words, p_timeout = block.offset("control_ptrs"), block.offset("words"), block.offset("timeout_ns")
    p_notes, p_note_bytes = block.offset("notes_at"), block.offset("note_bytes")
    p_places, p_capacity = block.offset("places"), block.offset("capacity")

    @device_fn
    def note_at(params, rank, epoch, source):
        """Address of the note of a source rank in the control memory of a rank."""
        index = u64((u64(epoch) & u64(1)) * u64(ranks) + u64(source))
        base = u64(load_u64(params + u64(p_control) + u64(8) * u64(rank)))
        return u64(base + u64(load_u64(params + u64(p_notes))) + index * u64(load_u64(params + u64(p_note_bytes))))

    @device_fn
    def word_of(params, num_tokens, word):
        """The number in a word of this rank's note, but for counts."""
        number = i32(num_tokens)
        if word < MAX_PLACES:
            place = u64(load_u64(params + u64(p_places) + u64(8) * u64(word)))
            number = i32(place // u64(control.PLACE_BYTES))
        if word == control.CAPACITY:
            number = i32(load_i32(params + u64(p_capacity)))
        if word == control.BLOCKS:
            number = sending()
        return number

    @device_fn
    def announce(params, epoch, num_tokens, my_rank, counts):
        lane, first = i32(lane_id()), i32(0)
        while first < ranks * n_told:
            i = i32(min(i32(first + lane), ranks * n_told - 1))
            peer = i32(u32(i) // u32(n_told))
            word = i32(i - peer * n_told)
            number = word_of(params, num_tokens, word)
            if with_counts:
                count = i32(shfl_idx(counts, i32(max(0, word - control.COUNTS))))
                if word >= control.COUNTS:
                    number = count
            if first + lane < ranks * n_told:
                st_relaxed_sys_u64(note_at(params, peer, epoch, my_rank) + u64(8) * u64(word),
                                   waits.told(epoch, number))
            first = i32(first + 32)

    @device_fn
    def announce_experts(params, epoch, my_rank, counts, at):
        i = i32(thread_idx())
        while i < n_experts:
            word = i32(n_words + i32(u32(i) % u32(local)))
            st_relaxed_sys_u64(note_at(params, i32(u32(i) // u32(local)), epoch, my_rank) + u64(8) * u64(word),
                               waits.told(epoch, i32(counts[at + i])))
            i = i32(i + block_dim())

    @device_fn
    def await_word(params, epoch, my_rank, source, word):
        address = u64(note_at(params, my_rank, epoch, source) + u64(8) * u64(word))
        status = u64(u64(load_u64(params + u64(p_words))) + u64(control.STATUS))
        return waits.wait_for_word_of_peer(address, u64(ld_acquire_sys_u64(address)), epoch, status,
                                           u64(load_u64(params + u64(p_timeout))), phase, FOR_ANNOUNCEMENT, source)

    @device_fn
    def load_counts(counts, notes):
        i = i32(thread_idx())
        while i < ranks * ranks:
            source, target = u32(u32(i) // u32(ranks)), u32(u32(i) % u32(ranks))
            notes[i32(source) * n_words + control.COUNTS + i32(target)] = i32(load_i32(u64(counts) + u64(4) * u64(i)))
            i = i32(i + block_dim())

    @device_fn
    def await_notes(params, epoch, my_rank, notes):
        ok, i = True, i32(thread_idx())
        while ok and i < ranks * n_told:
            source, word = i32(u32(i) // u32(n_told)), i32(u32(i) % u32(n_told))
            seen = u64(await_word(params, epoch, my_rank, source, word))
            ok = seen != u64(0)
            notes[source * n_words + word] = i32(seen)
            i = i32(i + block_dim())
        return not syncthreads_or(not ok)       # each thread acquired what it waited for, the barrier gives it to all

    @device_fn
    def expert_count(params, epoch, my_rank, source, expert):
        seen, number = u64(await_word(params, epoch, my_rank, source, i32(n_words + expert))), i32(-1)
        if seen != u64(0):
            number = i32(seen)
        return number

    @device_fn
    def arrived_at(params, rank, epoch, source):
        index = u64((u64(epoch) & u64(1)) * u64(ranks) + u64(source))
        return u64(u64(load_u64(params + u64(p_control) + u64(8) * u64(rank))) + u64(4) * index)

    @device_fn
    def sent(params, epoch, my_rank, ok):
        failed = syncthreads_or(not ok)         # all of this block's stores before it says so
        i = i32(thread_idx())
        if i < ranks and not failed:
            red_add_release_sys_i32(arrived_at(params, i, epoch, my_rank), i32(1))

    @device_fn
    def await_arrivals(params, epoch, my_rank, notes):
        ok, source = True, i32(thread_idx())
        if source < ranks:
            ok = waits.wait_for_count(arrived_at(params, my_rank, epoch, source),
                                      i32(notes[source * n_words + control.BLOCKS]),
                                      u64(load_u64(params + u64(p_words))) + u64(control.STATUS),
                                      u64(load_u64(params + u64(p_timeout))), phase, FOR_ARRIVAL, source)
        return not syncthreads_or(not ok)

    return Exchange(announce, announce_experts, load_counts, await_notes, expert_count, sent, await_arrivals)
