"""Counts the messages to every expert, announces the counts at once, and signals when all messages are written.

The owner of an expert learns the count early, as ANNOUNCED + count in its recv_count word. So it knows every row's
place while messages are under way. The same word becomes the plain count, the signal, when they have arrived. No block
waits for this. `finished` counts the pieces of an expert's messages as they are written; when the messages have been
counted, their number of pieces is subtracted. The thread that brings the word to zero, a sender or the counting block,
signals. So `finished` is 0 again at the end, and no block of the sending half ever waits for another.
"""

from typing import NamedTuple

from epmoe.device import (atomic_add_acq_rel_gpu_i32, block_dim, device_fn, i32, lane_id, load_i32, n_warps,
                          shared_add_i32, shared_array, syncthreads, syncthreads_or, thread_idx, u64, warp_id)
from epmoe.device import int32
from epmoe.layout import ANNOUNCED

from . import counters, ids, stamps, transport

WINDOW = 2048       # experts that are counted at a time, in shared memory


class Signaller(NamedTuple):
    """Device functions.

    announce(params, topk_ids, num_tokens, my_rank, n_parts, failed) -> whether to go on: one block counts the ids,
        tells the owners, and enters n_parts pieces a message as a debt. Every expert is told of in every round, also
        where the count is 0, which is a signal at once; under skip_a2a the own experts only. failed: of any thread of
        the block.
    finish(params, expert, my_rank, n): one thread, when it and all threads that a barrier joins it to have written n
        pieces of messages to that expert.
    """

    announce: callable
    finish: callable


def make(cfg, block, mark) -> Signaller:
    """The functions for one parameter block. mark: of stamps.py."""
    at, clean_id = counters.words(cfg), ids.make(cfg).clean
    send = transport.make(cfg, block)
    signal, tell, crosses, is_far = send.signal, send.tell, send.crosses, send.is_far
    top_k, local, ranks, keeps_own = cfg.top_k, cfg.n_local_experts, cfg.n_src_ranks, cfg.skip_a2a
    n_signalled = local if keeps_own else cfg.n_experts
    window = min(WINDOW, n_signalled)
    tokens_a_warp = 32 // top_k
    ids_a_warp = tokens_a_warp * top_k
    p_counters = block.index("ep_counters")

    @device_fn
    def entry_of(expert):
        """The word of `reserved` and of `finished` that counts messages to an expert."""
        entry = i32(expert % local * ranks + expert // local)
        if keeps_own:
            entry = i32(expert % local)
        return entry

    @device_fn
    def index_of(expert, my_rank):
        """The word of the owner's recv_count that this rank writes."""
        source = i32(my_rank)
        if keeps_own:
            source = i32(0)
        return i32(expert % local * ranks + source)

    @device_fn
    def signal_expert(params, expert, my_rank, count):
        """The signal to the expert's owner."""
        # what this thread acquired from `finished` goes with it, at system scope
        signal(params, i32(expert // local), my_rank, index_of(expert, my_rank), count)

    @device_fn
    def finish(params, expert, my_rank, n):
        words, entry = params[p_counters], entry_of(expert)
        # release: the pieces that were written here; acquire: all the others, if these are the last
        before = atomic_add_acq_rel_gpu_i32(words + u64(at.finished) + u64(4) * u64(entry), i32(n))
        if before == -n:
            # as many places were claimed as there are messages
            count = i32(load_i32(words + u64(at.reserved) + u64(4) * u64(entry)))
            signal_expert(params, expert, my_rank, count)

    @device_fn
    def load_ids(topk_ids, at_id, n_ids, lane):
        """A lane's id out of the list of all tokens' ids; -1 behind the end."""
        value = i32(-1)
        if lane < ids_a_warp and at_id + lane < n_ids:
            value = i32(load_i32(topk_ids + u64(4) * u64(at_id + lane)))
        return value

    @device_fn
    def count_id(value, first, wanted, lane):
        """Counts a lane's id if it is one of the window's experts."""
        expert = clean_id(value, i32(lane // top_k), lane)
        if expert >= first and expert < first + window:
            shared_add_i32(wanted, i32(expert - first), i32(1))

    @device_fn
    def count_ids(topk_ids, num_tokens, first, wanted):
        """Adds up the cleaned ids of [first, first + window); a warp takes as many tokens at a time as have room."""
        lane = lane_id()
        n_ids = i32(num_tokens * top_k)
        at_id, stride = i32(warp_id() * ids_a_warp), i32(n_warps() * ids_a_warp)
        while at_id < n_ids:
            a = load_ids(topk_ids, at_id, n_ids, lane)                      # four loads in flight
            b = load_ids(topk_ids, i32(at_id + stride), n_ids, lane)
            c = load_ids(topk_ids, i32(at_id + 2 * stride), n_ids, lane)
            d = load_ids(topk_ids, i32(at_id + 3 * stride), n_ids, lane)
            count_id(a, first, wanted, lane)
            if at_id + stride < n_ids:
                count_id(b, first, wanted, lane)
                count_id(c, first, wanted, lane)
                count_id(d, first, wanted, lane)
            at_id = i32(at_id + 4 * stride)

    @device_fn
    def announce_expert(params, expert, count, my_rank, n_parts):
        """Announces its count to an expert's owner, and subtracts its pieces; sends the signal if there are none."""
        owner, index = i32(expert // local), index_of(expert, my_rank)
        if count == 0:
            signal(params, owner, my_rank, index, count)
        else:
            near = True
            if crosses:
                near = not is_far(owner, my_rank)   # two signals to another world might arrive in either order
            if near:
                tell(params, owner, index, u64(ANNOUNCED) + u64(count))
            debt = i32(count * n_parts)
            finished = params[p_counters] + u64(at.finished) + u64(4) * u64(entry_of(expert))
            # release: the signal comes after the announcement; acquire: the messages, if all are written
            if atomic_add_acq_rel_gpu_i32(finished, i32(-debt)) == debt:
                signal_expert(params, expert, my_rank, count)

    @device_fn
    def announce(params, topk_ids, num_tokens, my_rank, n_parts, failed):
        wanted = shared_array(window, int32)
        first = i32(0)
        if keeps_own:
            first = i32(my_rank * local)
        end = i32(first + n_signalled)
        while first < end:
            i = i32(thread_idx())
            while i < window:
                wanted[i] = 0
                i = i32(i + block_dim())
            if syncthreads_or(failed):          # zeros before counts
                return False
            count_ids(topk_ids, num_tokens, first, wanted)
            mark(params, stamps.ANNOUNCED)      # ahead of the barrier: no peer knows anything of it before
            syncthreads()                       # counts before they are told
            i = i32(thread_idx())
            while i < window and first + i < end:
                announce_expert(params, i32(first + i), wanted[i], my_rank, n_parts)
                i = i32(i + block_dim())
            first = i32(first + window)
        return True

    return Signaller(announce, finish)
