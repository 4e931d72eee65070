"""The leader block's announcement to all peers at the beginning of a call, and arrivals at its end.

A rank announces where peers write to it (places), for how many rows it has room there (capacity), how many tokens and
sending blocks it has and, unless there is a handle, how many rows it sends to each rank. Combine reads only places. It
stores this in a mailbox at each rank (mailbox.py). Peers write to the places as soon as they know them, so a fence must
order earlier launches of this rank before the places. The rest needs no fence.
"""

from epmoe.device import (block_dim, device_fn, fence_acq_rel_sys, i32, lane_id, load_i32, red_add_release_sys_i32,
                          shared_array, shfl_idx, st_relaxed_sys_u64, syncthreads_or, thread_idx, u64, uint64)

from .. import stamps
from ..bits import split
from ..params import by_threads, chosen
from . import call as calls
from . import mailbox, wait
from .shape import BLOCK, MAX_PLACES, memory_of, namespace, p


def mailbox_words(shape):
    """Device function (params, rank, epoch, src_rank, word) -> address of a word of a src_rank's mailbox at a rank."""
    ranks, memory = shape.n_ranks, memory_of(shape.n_ranks)

    @device_fn
    def word_at(params, rank, epoch, src_rank, word):
        index = u64((u64(epoch) & u64(1)) * u64(ranks) + u64(src_rank))
        mailbox_at = params[p.mailboxes_at] + index * params[p.mailbox_bytes]
        return u64(memory.control(params, rank) + mailbox_at + u64(8) * u64(word))

    return word_at


def parts_of_announcement(shape):
    """{part of an announcement: its words [begin, end)}, in this order: places (of the arrays that peers write), tokens
    (capacity, num_tokens, blocks), counts, experts. "header": all but experts; "sizes": the header without places.
    """
    experts = mailbox.experts_at(shape.n_ranks)
    return dict(header=(0, experts), without_counts=(0, mailbox.COUNTS), places=(0, MAX_PLACES),
                sizes=(MAX_PLACES, experts), tokens=(MAX_PLACES, mailbox.COUNTS), counts=(mailbox.COUNTS, experts),
                experts=(experts, experts + shape.num_local_experts))


def announcing(shape, part, marks=True):
    """Namespace of device functions by which a warp of the leader block announces a part to all ranks, also to its own.

    load(call, first) -> words: reads what announcing needs for the words [first, first + 32) of all peers, except for
    the call's number and the counts. It takes longer than announcing, so the caller loads before it waits for those.
    announce(call, counts, words): stores all words. words: of the first 32. counts: in lane r the tokens for rank r.
    announce_totals(call, totals, words): does this with counts in a shared array. marks: whether to stamp it.
    """
    ranks, (begin, end) = shape.n_ranks, parts_of_announcement(shape)[part]
    n, at_word = end - begin, mailbox_words(shape)
    place_of, has_counts = chosen(BLOCK, "places"), end > mailbox.COUNTS
    mark = stamps.make(shape.trace and marks, BLOCK, by_caller=True)

    @device_fn
    def load(call, first):
        """(address at parity 0, bytes from it to parity 1, number unless a count, word); past the end the last's."""
        peer, word = split(i32(min(i32(first + lane_id()), ranks * n - 1)), n)
        word, number = i32(begin + word), i32(call.num_tokens)
        if word < MAX_PLACES:
            number = i32(place_of(call.params, word) // u64(mailbox.PLACE_BYTES))
        if word == mailbox.CAPACITY:
            number = i32(call.params[p.capacity])
        if word == mailbox.BLOCKS:
            number = calls.num_senders()
        at = at_word(call.params, peer, u64(0), call.my_rank, word)
        return at, u64(call.params[p.mailbox_bytes] * u64(ranks)), number, word

    @device_fn
    def announce(call, counts, words):
        lane, first, (at, other, number, word) = i32(lane_id()), i32(0), words
        while first < ranks * n:
            if has_counts:
                count = i32(shfl_idx(counts, i32(max(0, word - mailbox.COUNTS))))
                number = count if word >= mailbox.COUNTS else number
            if first + lane < ranks * n:
                st_relaxed_sys_u64(at + (u64(call.epoch) & u64(1)) * other, wait.tagged(call.epoch, number))
            first = i32(first + 32)
            if first < ranks * n:
                at, other, number, word = load(call, first)
        if lane == 0:
            mark(call.params, stamps.ANNOUNCED)

    announce_totals = device_fn(lambda call, totals, words:
                                announce(call, i32(totals[min(lane_id(), ranks - 1)]), words))
    return namespace("announcing", load=load, announce=announce, announce_totals=announce_totals)


def early(shape, part, *, fences=True, marks=True):
    """Device function (call): a warp announces a part before its block's first barrier.

    It waits for no other warp, since all peers wait for it. fences: whether it first orders earlier launches of this
    rank. At this point no store is in flight that the fence would wait for.
    """
    announcement = announcing(shape, part, marks)

    @device_fn
    def announce(call):
        if fences:
            fence_acq_rel_sys()                 # earlier launches of this rank before its announcement
        words, call = announcement.load(call, i32(0)), calls.read_epoch(call)
        if not calls.is_over(call):
            announcement.announce(call, i32(0), words)

    return announce


def experts(shape):
    """Device function (call, counts, at): the leader block sends each rank its experts' tokens, counts[at + expert]."""
    n_local, num_experts, at_word = shape.num_local_experts, shape.num_experts, mailbox_words(shape)
    experts_at = mailbox.experts_at(shape.n_ranks)

    @by_threads
    def announce(i, call, counts, at):
        peer, expert = split(i, n_local)
        to = at_word(call.params, peer, call.epoch, call.my_rank, i32(experts_at + expert))
        st_relaxed_sys_u64(to, wait.tagged(call.epoch, i32(counts[at + i])))

    return device_fn(lambda call, counts, at: announce(num_experts, call, counts, at))


def awaiting(shape, phase, part, *, acquires=True):
    """Device function (call, announced) -> whether all came: a block waits for this part of all ranks' announcements.

    It stores the numbers in `announced`; for the part "experts", in a shared array [src_rank, local expert].
    """
    ranks, at_word, (begin, end) = shape.n_ranks, mailbox_words(shape), parts_of_announcement(shape)[part]
    n, what = end - begin, (phase, wait.FOR_ANNOUNCEMENT)
    stride, first = (n, 0) if part == "experts" else (mailbox.experts_at(ranks), begin)
    poll_word = wait.for_word_of_peer if acquires else wait.for_tagged_word    # relaxed: guards no other data

    @device_fn
    def await_part(call, announced):
        ok, i = True, i32(thread_idx())
        while ok and i < ranks * n:
            src_rank, word = split(i, n)
            address = at_word(call.params, call.my_rank, call.epoch, src_rank, i32(begin + word))
            ok, seen = poll_word(call.params, address, call.epoch, what, src_rank)
            announced[src_rank * stride + first + word] = i32(seen)
            i = i32(i + block_dim())
        return not syncthreads_or(not ok)       # each thread acquired what it waited for, the barrier gives it to all

    return await_part


def beginning(shape, mark, small):
    """Device function begin(call, announced) -> (call with its number, whether its kernel goes on), with a handle.

    small: None, or namespace for small batches, whose calls end here. prepare(call) -> prepared: before the number is
    known. fits(announced): whether this is one, the same on all ranks. rest(call, announced, prepared): the rest.
    """
    ranks, (begin_call, _) = shape.n_ranks, calls.begin_and_end(shape.n_ranks)
    has_small, announce_rank = small is not None, early(shape, "without_counts")
    n_words, prepare = mailbox.experts_at(ranks), small.prepare if has_small else device_fn(lambda call: None)

    @by_threads
    def load_counts(i, counts, announced):
        """Loads the counts of rows and tokens of all ranks from the call's handle."""
        if i < ranks:                           # the handle has the ranks' tokens before the counts (handle.py)
            announced[ranks * n_words + i] = i32(load_i32(u64(counts) + u64(4) * u64(i) - u64(4 * ranks)))
        src_rank, dst_rank = split(i, ranks)
        announced[src_rank * n_words + mailbox.COUNTS + dst_rank] = i32(load_i32(u64(counts) + u64(4) * u64(i)))

    @device_fn
    def begin(call, announced):
        mark(call.params, stamps.START)
        at_entry = begin_call(call.params, shared_array(1, uint64))
        if calls.is_notify_warp():
            announce_rank(call)
        load_counts(ranks * ranks, call.params[p.counts], announced)
        prepared = prepare(call)
        call = calls.share_epoch(call, at_entry)
        if calls.is_over(call):
            return call, False
        if has_small and small.fits(announced):
            small.rest(call, announced, prepared)
            return call, False
        return call, True

    return begin


def arrivals(shape):
    """Namespace of device functions by which blocks signal to all ranks that they have sent their part.

    sent(call, ok): every sending block calls it when it has sent its part (ok). await_all(call, announced): the leader
    block waits; returns whether every rank has sent all its rows.
    """
    ranks, memory, mail = shape.n_ranks, memory_of(shape.n_ranks), mailbox.reading(shape.n_ranks)
    what = wait.ROWS_DISPATCH, wait.FOR_ARRIVAL

    @device_fn
    def arrived_at(params, rank, epoch, src_rank):
        index = u64((u64(epoch) & u64(1)) * u64(ranks) + u64(src_rank))
        return u64(memory.control(params, rank) + u64(4) * index)

    @device_fn
    def sent(call, ok):
        failed = syncthreads_or(not ok)         # all of this block's stores before it signals
        i = i32(thread_idx())
        if i < ranks and not failed:
            red_add_release_sys_i32(arrived_at(call.params, i, call.epoch, call.my_rank), i32(1))

    @device_fn
    def await_all(call, announced):
        ok, src_rank = True, i32(thread_idx())
        if src_rank < ranks:
            address = arrived_at(call.params, call.my_rank, call.epoch, src_rank)
            ok, _ = wait.for_count(call.params, address, mail.blocks(announced, src_rank), what, src_rank)
        return not syncthreads_or(not ok)

    return namespace("arrivals", sent=sent, await_all=await_all)


def closing(shape, phase, part):
    """Device function (call, announced) -> whether the leader block may end the call; it waits until it may.

    All ranks must have announced themselves (part: the part of the announcement), and all blocks of this rank must have
    begun. It waits for both at once.
    """
    await_part = awaiting(shape, phase, part)

    @device_fn
    def may_end(call, announced):
        ok = not calls.is_last_thread() or calls.await_begun(call, phase)
        came = await_part(call, announced)
        return came and not syncthreads_or(not ok)

    return may_end
