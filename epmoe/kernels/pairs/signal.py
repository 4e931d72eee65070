"""Counts the messages to every expert, announces the counts early, and signals when all messages are written.

Steps 1, 4 and 7 of dispatch.py; combine uses `resetting`, too. No block waits for another here.
"""

from epmoe.device import (atomic_add_acq_rel_gpu_i32, device_fn, grid_dim, i32, lane_id, load_i32, n_warps,
                          shared_add_i32, shared_array, store_i32, store_u64, syncthreads, syncthreads_or, syncwarp,
                          u64, warp_broadcast_i32, warp_id)
from epmoe.device import int32
from epmoe.layout import ANNOUNCED, MAX_FINITE

from .. import ids, stamps
from ..bits import in_fours
from ..params import by_threads, clear, namespace, tuple_of
from ..plain import counters
from . import peers


def make(build):
    """Namespace "signals" of device functions.

    announce(call, n_parts, failed) -> whether to go on: one block counts the ids, announces the counts, and subtracts
        n_parts parts for each message. Every expert gets a word in every round, under skip_a2a only this rank's. A
        count of 0 is itself the signal. failed: from failed_before.
    finish(call, expert, n): one thread adds n parts of messages to the expert, which were written before a barrier of
        the warp or block. It signals if they were the last.
    segment_of(expert): the index of `reserved` and of `finished` for messages to an expert.
    """
    cfg, mark = build.cfg, stamps.make(build.trace)
    word, to, of_ids = counters.words(cfg), peers.make(cfg), ids.make(cfg.n_experts, cfg.top_k, build.id_bytes)
    top_k, local, skip_a2a = cfg.top_k, cfg.n_local_experts, cfg.skip_a2a
    n_signals = local if skip_a2a else cfg.n_experts
    window, ids_a_warp = min(build.tuning.counted_experts, n_signals), 32 // top_k * top_k

    @device_fn
    def segment_of(expert):
        return word.segment(i32(expert % local), i32(expert // local))

    @device_fn
    def signal(call, expert, count):
        """Signals to the expert's owner, at system scope, after what this thread acquired from `finished`."""
        to.signal(call, i32(expert // local), word.segment(i32(expert % local), call.my_rank), count)

    @device_fn
    def finish(call, expert, n):
        segment = segment_of(expert)
        # release: the parts that were written here; acquire: all the others, if these are the last
        before = atomic_add_acq_rel_gpu_i32(word.finished(call.ep_counters, segment), i32(n))
        if before == -n:
            # all messages have claimed their slots, so this is their number
            signal(call, expert, i32(load_i32(word.reserved(call.ep_counters, segment))))

    @device_fn
    def load_id(given, i):
        """This lane's id in the list of all tokens' ids, starting at i; -1 past its end."""
        call = given[0]
        is_there = lane_id() < ids_a_warp and i + lane_id() < call.num_tokens * top_k
        return i32(of_ids.read(call.topk_ids, i + lane_id())) if is_there else i32(-1)

    @device_fn
    def count_id(n_ids, given, i, value):
        """Counts a lane's id, of the ids from i to n_ids, if it is one of the window's experts."""
        _, first, wanted = given
        if i < n_ids:
            expert = of_ids.clean(value, i32(lane_id() // top_k), lane_id())
            if expert >= first and expert < first + window:
                shared_add_i32(wanted, i32(expert - first), i32(1))
        return n_ids

    count_ids = in_fours(load_id, count_id)

    @by_threads
    def announce_expert(i, call, first, wanted, n_parts):
        """Announces the count to an expert's owner and subtracts its parts. If there are none, it signals at once."""
        expert, count = i32(first + i), wanted[i]
        if count == 0:
            signal(call, expert, count)
        else:
            if not to.is_far(call, i32(expert // local)):       # two signals there might arrive in either order
                index = word.segment(i32(expert % local), call.my_rank)
                to.write_word(call, i32(expert // local), index, u64(ANNOUNCED) + u64(count))
            n_all_parts = i32(count * n_parts)
            finished = word.finished(call.ep_counters, segment_of(expert))
            # release: the signal comes after the announcement; acquire: the messages, if all are written
            if atomic_add_acq_rel_gpu_i32(finished, i32(-n_all_parts)) == n_all_parts:
                signal(call, expert, count)

    @device_fn
    def announce(call, n_parts, failed):
        wanted = shared_array(window, int32)
        first_expert = i32(call.my_rank * local) if skip_a2a else i32(0)
        first, end, n_ids = first_expert, i32(first_expert + n_signals), i32(call.num_tokens * top_k)
        while first < end:
            clear(window, wanted)
            if syncthreads_or(failed):          # zeros before counts
                return False
            # a warp takes as many tokens at a time as its lanes hold
            count_ids(n_ids, (call, first, wanted), i32(warp_id() * ids_a_warp), i32(n_warps() * ids_a_warp), n_ids)
            mark(call, stamps.ANNOUNCED)        # before the barrier: no peer knows anything earlier
            syncthreads()                       # counts before they are announced
            announce_expert(min(window, i32(end - first)), call, first, wanted, n_parts)
            first = i32(first + window)
        return True

    return namespace("signals", announce=announce, finish=finish, segment_of=segment_of)


def resetting(cfg, by_segment, single=(), *, recv_count=True):
    """Device function leave(call): the last block of a kernel to call it resets the counters, so the host need not.

    A block calls it when it no longer needs the counters. Its last warp adds 1 to D; the others return at once. What
    they did with the counters must be ordered before lane 0 of the last warp: by a barrier or an acquire of lane 0.

    by_segment, single: names of the words of `counters` to reset, for all segments and alone. D is reset, too, and so
    is this rank's recv_count, unless recv_count is False.
    """
    word, n_segments, single = counters.words(cfg), cfg.n_local_experts * cfg.n_src_ranks, ("d", *single)

    def clearing(names):
        def of(address):
            @device_fn
            def clear(ep_counters, i):
                store_i32(address(ep_counters, i), i32(0))

            return clear

        return tuple_of(len(names), lambda j: of(getattr(word, names[j])))

    clear_segment, clear_single = clearing(by_segment), clearing(single)

    @device_fn
    def leave(call):
        if warp_id() != n_warps() - 1:
            return
        lane, last = i32(lane_id()), i32(0)
        if lane == 0:
            # release: what this block did with the counters; acquire: what all the others did
            last = i32(atomic_add_acq_rel_gpu_i32(word.d(call.ep_counters, 0), i32(1)) == grid_dim() - 1)
        last = i32(warp_broadcast_i32(last, 0))
        syncwarp()                      # lane 0 acquired for all
        if last != 0:
            i = lane
            while i < n_segments:
                if recv_count:          # a peer signals it again only when this rank has answered, in a later kernel
                    store_u64(call.recv_count_p + u64(8) * u64(i), u64(MAX_FINITE))
                clear_segment(call.ep_counters, i)
                i = i32(i + 32)
            if lane == 0:
                clear_single(call.ep_counters, i32(0))

    return leave
