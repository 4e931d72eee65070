"""The communication of a call: what each rank's leader block announces to all others at the beginning, and arrivals at
the end.
"""

from typing import NamedTuple

from epmoe.device import (block_dim, device_fn, fence_acq_rel_sys, i32, lane_id, ld_acquire_sys_u64, ld_relaxed_sys_u64,
                          load_i32, red_add_release_sys_i32, shfl_idx, st_relaxed_sys_u64, syncthreads_or,
                          thread_idx, u32, u64)

from .. import stamps
from ..params import chosen, in_context
from . import control, roles, waits
from .shape import MAX_PLACES
from .status import FOR_ANNOUNCEMENT, FOR_ARRIVAL


class Telling(NamedTuple):
    """Device functions by which a warp of the leader block tells every peer some words of this rank's note.

    look(params, num_tokens, my_rank, first) -> looked: what it takes besides the call's number and the counts, of the
    words [first, first + 32) of all peers; looking takes longer than telling, so the caller looks before it waits for
    those. tell(params, epoch, num_tokens, my_rank, counts, looked): them all; looked: at the first ones. counts: of the
    tokens for rank r, in lane r.
    """

    look: callable
    tell: callable


class Exchange(NamedTuple):
    """Device functions made for one kernel.

    announce: a Telling, behind a fence of the same warp for what earlier launches of this rank have done, of this
    rank's note, without counts of experts. announce_facts, announce_places: its two halves; only places, which peers
    write to, have to lie behind that fence. announce_tokens, announce_counts: two parts of the facts, the second the
    counts of rows. announce_experts(params, epoch, my_rank, counts, at): of the leader block; those of experts,
    counts[at + expert]. load_counts(counts, notes): every block, where counts are those of a handle, at this address;
    these and the tokens of all ranks into a shared int32 array. await_notes(params, epoch, my_rank, notes): every
    block; what the ranks tell; whether all ranks have announced themselves. await_facts: all of it but the places.
    await_tokens: what announce_tokens tells, without acquiring anything. expert_count(params, epoch,
    my_rank, source, expert): a number of a note, -1 if it did not come. sent(params, epoch, my_rank, ok): every block
    that sends, when it has sent its part (ok). await_arrivals(params, epoch, my_rank, notes): of the leader block; whether
    every rank has sent all its rows.
    """

    announce: Telling
    announce_facts: Telling
    announce_places: Telling
    announce_tokens: Telling
    announce_counts: Telling
    announce_experts: callable
    load_counts: callable
    await_notes: callable
    await_facts: callable
    await_tokens: callable
    expert_count: callable
    sent: callable
    await_arrivals: callable


def words_of_notes(n_ranks):
    """Numbers of all notes, but for counts of experts, and behind them each rank's tokens as a handle knows them."""
    return n_ranks * control.experts_at(n_ranks) + n_ranks


def heralding(epoch_now, telling, mark_own, totals=None):
    """Device function herald(params, words, num_tokens, my_rank, ids): of a warp, before its block's first barrier.

    It waits for no other warp: all peers wait for it. telling: a Telling. totals: of numbering.py, where it tells
    counts, and then no places; else it fences first, while nothing is on its way that the fence would wait for.
    """
    (look, tell), counts, tells_places = telling, totals or _none, totals is None

    @device_fn
    def herald(params, words, num_tokens, my_rank, ids):
        if tells_places:
            fence_acq_rel_sys()                 # earlier launches of this rank, before what it tells its peers
        looked = look(params, num_tokens, my_rank, i32(0))
        now, mine = epoch_now(words), counts(ids, num_tokens)
        if now != u64(0):
            tell(params, now, num_tokens, my_rank, mine, looked)
            if lane_id() == 0:
                mark_own(params, stamps.ANNOUNCED)

    return herald


@device_fn
def _none(ids, num_tokens):
    return i32(0)


def closing(of_block, await_notes, phase):
    """Device function (params, epoch, my_rank, notes), of the leader block: whether it may end the call, once all have come.

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


def ending(of_block, await_notes, phase):
    """Device function (params, epoch, my_rank, notes), of the leader block that has nothing else to do: it ends the call."""
    may_end, end = closing(of_block, await_notes, phase), of_block.end

    @device_fn
    def end_when_all_have_begun(params, epoch, my_rank, notes):
        if may_end(params, epoch, my_rank, notes):
            end(params, epoch, my_rank)

    return end_when_all_have_begun


def make(shape, block, phase, *, with_counts):
    """with_counts: the notes tell the counts of rows; else these are those of a handle."""
    ranks, local, n_experts, sending = shape.n_ranks, shape.n_local_experts, shape.n_experts, roles.sending(shape)
    n_words, n_told, n_notes = control.experts_at(ranks), control.COUNTS, ranks * control.experts_at(ranks)
    if with_counts:
        n_told = n_words
    control_of, p_words, p_timeout = in_context(block, "control_ptrs"), block.index("words"), block.index("timeout_ns")
    p_notes, p_note_bytes = block.index("notes_at"), block.index("note_bytes")
    place_of, p_capacity = chosen(block, "places"), block.index("capacity")

    @device_fn
    def note_at(params, rank, epoch, source):
        """Address of the note of a src_rank in the control memory of a rank."""
        index = u64((u64(epoch) & u64(1)) * u64(ranks) + u64(source))
        base = control_of(params, rank)
        return u64(base + params[p_notes] + index * params[p_note_bytes])

    @device_fn
    def word_of(params, num_tokens, word):
        """The number in a word of this rank's note, but for counts."""
        number = i32(num_tokens)
        if word < MAX_PLACES:
            place = place_of(params, word)
            number = i32(place // u64(control.PLACE_BYTES))
        if word == control.CAPACITY:
            number = i32(params[p_capacity])
        if word == control.BLOCKS:
            number = sending()
        return number

    def telling(begin, end):
        """The Telling of the words [begin, end) of this rank's note."""
        n = end - begin

        @device_fn
        def word_at(first):
            """(peer, word of the note) of this lane; lanes past the last have the last one."""
            i = i32(min(i32(first + lane_id()), ranks * n - 1))
            peer = i32(u32(i) // u32(n))
            return peer, i32(begin + i - peer * n)

        @device_fn
        def look(params, num_tokens, my_rank, first):
            """(address of the word in calls of parity 0, bytes to that of the other, its number but for counts)."""
            peer, word = word_at(first)
            at = u64(note_at(params, peer, u64(0), my_rank) + u64(8) * u64(word))
            other = u64(params[p_note_bytes] * u64(ranks))
            return at, other, i32(word_of(params, num_tokens, word))

        @device_fn
        def tell(params, epoch, num_tokens, my_rank, counts, looked):
            lane, first, (at, other, number) = i32(lane_id()), i32(0), looked
            while first < ranks * n:
                _, word = word_at(first)
                if with_counts:
                    count = i32(shfl_idx(counts, i32(max(0, word - control.COUNTS))))
                    if word >= control.COUNTS:
                        number = count
                if first + lane < ranks * n:
                    st_relaxed_sys_u64(at + (u64(epoch) & u64(1)) * other, waits.told(epoch, number))
                first = i32(first + 32)
                if first < ranks * n:
                    at, other, number = look(params, num_tokens, my_rank, first)

        return Telling(look, tell)

    @device_fn
    def announce_experts(params, epoch, my_rank, counts, at):
        i = i32(thread_idx())
        while i < n_experts:
            word = i32(n_words + i32(u32(i) % u32(local)))
            st_relaxed_sys_u64(note_at(params, i32(u32(i) // u32(local)), epoch, my_rank) + u64(8) * u64(word),
                               waits.told(epoch, i32(counts[at + i])))
            i = i32(i + block_dim())

    def waiting(load, wait):
        """Device function that waits for a word of a src_rank's note, polled by `load`."""
        @device_fn
        def await_word(params, epoch, my_rank, source, word):
            address = u64(note_at(params, my_rank, epoch, source) + u64(8) * u64(word))
            status = u64(params[p_words] + u64(control.STATUS))
            return wait(address, u64(load(address)), epoch, status, params[p_timeout], phase,
                        FOR_ANNOUNCEMENT, source)

        return await_word

    await_word = waiting(ld_acquire_sys_u64, waits.wait_for_word_of_peer)
    see_word = waiting(ld_relaxed_sys_u64, waits.wait_for_tagged_word)     # nothing lies behind it

    @device_fn
    def load_counts(counts, notes):
        i = i32(thread_idx())
        if i < ranks:                           # before the counts lie the ranks' tokens (records.py)
            notes[n_notes + i] = i32(load_i32(u64(counts) + u64(4) * u64(i) - u64(4 * ranks)))
        while i < ranks * ranks:
            source, target = u32(u32(i) // u32(ranks)), u32(u32(i) % u32(ranks))
            notes[i32(source) * n_words + control.COUNTS + i32(target)] = i32(load_i32(u64(counts) + u64(4) * u64(i)))
            i = i32(i + block_dim())

    def awaiting(begin, end, await_word=await_word):
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
        return u64(control_of(params, rank) + u64(4) * index)

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
                                      params[p_words] + u64(control.STATUS),
                                      params[p_timeout], phase, FOR_ARRIVAL, source)
        return not syncthreads_or(not ok)

    return Exchange(telling(0, n_told), telling(MAX_PLACES, n_told), telling(0, MAX_PLACES),
                    telling(MAX_PLACES, control.COUNTS), telling(control.COUNTS, n_words), announce_experts,
                    load_counts, awaiting(0, n_told), awaiting(MAX_PLACES, n_told),
                    awaiting(MAX_PLACES, control.COUNTS, see_word), expert_count, sent, await_arrivals)
