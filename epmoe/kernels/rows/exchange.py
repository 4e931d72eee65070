"""How the ranks meet in a call: what the clerk of each tells all others at its beginning, arrivals at its end."""

from typing import NamedTuple

from epmoe.device import (block_dim, device_fn, fence_acq_rel_sys, i32, lane_id, ld_acquire_sys_u64, load_i32, load_u64,
                          red_add_release_sys_i32, shfl_idx, st_relaxed_sys_u64, syncthreads_or, thread_idx, u32, u64)

from .. import stamps
from . import control, roles, waits
from .shape import MAX_PLACES
from .status import FOR_ANNOUNCEMENT, FOR_ARRIVAL


class Exchange(NamedTuple):
    """Device functions made for one kernel.

    announce(params, epoch, num_tokens, my_rank, counts): of a warp of the clerk, behind a fence of its own for what
    earlier launches of this rank have done; this rank's note to every peer, without counts of experts; counts: of the
    tokens for rank r, in lane r. announce_facts, announce_places: its two halves; only places, which peers write to,
    have to lie behind that fence. announce_experts(params, epoch, my_rank, counts, at): of the clerk; these, counts[at
    + expert]. load_counts(counts, notes): every block, where counts are those of a handle, at this address; these and
    the tokens of all ranks into a shared int32 array. await_notes(params, epoch, my_rank, notes): every block; what the
    ranks tell; whether all ranks have announced themselves. await_facts: all of it but the places. expert_count(params,
    epoch, my_rank, source, expert): a number of a note, -1 if it did not come. sent(params, epoch, my_rank, ok): every
    block that sends, when it has sent its part (ok). await_arrivals(params, epoch, my_rank, notes): of the clerk;
    whether every rank has sent all its rows.
    """

    announce: callable
    announce_facts: callable
    announce_places: callable
    announce_experts: callable
    load_counts: callable
    await_notes: callable
    await_facts: callable
    expert_count: callable
    sent: callable
    await_arrivals: callable


def words_of_notes(n_ranks):
    """Numbers of all notes, but for counts of experts, and behind them each rank's tokens as a handle knows them."""
    return n_ranks * control.experts_at(n_ranks) + n_ranks


def heralding(epoch_now, announce, mark_own, totals=None):
    """Device function herald(params, words, num_tokens, my_rank, ids): of a warp, before its block's first barrier.

    It waits for no other warp: all peers wait for it. announce: what it does. totals: of numbering.py, where it tells
    counts, and then no places; else it fences first, while nothing is on its way that the fence would wait for.
    """
    counts, tells_places = totals or _none, totals is None

    @device_fn
    def herald(params, words, num_tokens, my_rank, ids):
        if tells_places:
            fence_acq_rel_sys()                 # earlier launches of this rank, before what it tells its peers
        now, mine = epoch_now(words), counts(ids, num_tokens)
        if now != u64(0):
            announce(params, now, num_tokens, my_rank, mine)
            if lane_id() == 0:
                mark_own(params, stamps.ANNOUNCED)

    return herald


@device_fn
def _none(ids, num_tokens):
    return i32(0)


def closing(of_block, await_notes, phase):
    """Device function (params, epoch, my_rank, notes), of the clerk: whether it may end the call, once all have come.

    All ranks have announced themselves, and all blocks of this one have begun; both are waited for at once.
    """
    has_begun = of_block.has_begun

    @device_fn
    def may_end(params, epoch, my_rank, notes):
        ok = True
        if thread_idx() == block_dim() - 1:     # the first threads wait for notes
            ok = has_begun(params, phase)
        come = await_notes(params, epoch, my_rank, notes)
        return come and not syncthreads_or(not ok)

    return may_end


def make(shape, block, phase, *, with_counts):
    """with_counts: the notes tell the counts of rows; else these are those of a handle."""
    ranks, local, n_experts, sending = shape.n_ranks, shape.n_local_experts, shape.n_experts, roles.sending(shape)
    n_words, n_told, n_notes = control.experts_at(ranks), control.COUNTS, ranks * control.experts_at(ranks)
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

    def announcing(begin, end):
        """Device function that tells all peers the words [begin, end) of this rank's note."""
        n = end - begin

        @device_fn
        def announce(params, epoch, num_tokens, my_rank, counts):
            lane, first = i32(lane_id()), i32(0)
            while first < ranks * n:
                i = i32(min(i32(first + lane), ranks * n - 1))
                peer = i32(u32(i) // u32(n))
                word = i32(begin + i - peer * n)
                number = word_of(params, num_tokens, word)
                if with_counts:
                    count = i32(shfl_idx(counts, i32(max(0, word - control.COUNTS))))
                    if word >= control.COUNTS:
                        number = count
                if first + lane < ranks * n:
                    st_relaxed_sys_u64(note_at(params, peer, epoch, my_rank) + u64(8) * u64(word),
                                       waits.told(epoch, number))
                first = i32(first + 32)

        return announce

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
        if i < ranks:                           # before the counts lie the ranks' tokens (records.py)
            notes[n_notes + i] = i32(load_i32(u64(counts) + u64(4) * u64(i) - u64(4 * ranks)))
        while i < ranks * ranks:
            source, target = u32(u32(i) // u32(ranks)), u32(u32(i) % u32(ranks))
            notes[i32(source) * n_words + control.COUNTS + i32(target)] = i32(load_i32(u64(counts) + u64(4) * u64(i)))
            i = i32(i + block_dim())

    def awaiting(begin, end):
        """Device function that waits for the words [begin, end) of all ranks' notes."""
        n = end - begin

        @device_fn
        def await_notes(params, epoch, my_rank, notes):
            ok, i = True, i32(thread_idx())
            while ok and i < ranks * n:
                source = i32(u32(i) // u32(n))
                word = i32(begin + i - source * n)
                seen = u64(await_word(params, epoch, my_rank, source, word))
                ok = seen != u64(0)
                notes[source * n_words + word] = i32(seen)
                i = i32(i + block_dim())
            return not syncthreads_or(not ok)   # each thread acquired what it waited for, the barrier gives it to all

        return await_notes

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

    return Exchange(announcing(0, n_told), announcing(MAX_PLACES, n_told), announcing(0, MAX_PLACES), announce_experts,
                    load_counts, awaiting(0, n_told), awaiting(MAX_PLACES, n_told), expert_count, sent, await_arrivals)
