"""The receiving blocks of dispatch copy messages from recv_buf into the rows of the grouped output, as they arrive.

Steps 5 to 7 of dispatch.py. Rows are assigned to warps in the order in which messages are sent (send.py). If there are
more warps than rows, a row has several parts. If all messages are here when the counts are, and a row is its payload,
each warp works alone: it finds the places of its rows by itself, in less time than the block's barriers would take.
"""

from epmoe.device import (ballot, device_fn, i32, int32, lane_id, n_warps, shared_array, shfl_idx, store_i32,
                          syncthreads, syncthreads_or, syncwarp, u32, u64, uint64, warp_broadcast_u64,
                          warp_id, warp_inclusive_sum_i32)
from epmoe.layout import ANNOUNCED, DESCRIBED, MAX_FINITE

from .. import formats, stamps
from ..bits import lowest, parts_of_each, split
from ..params import LANES, namespace
from ..plain.receive import shared_expert_share
from ..wait import wait_below
from ..status import DISPATCH_WAIT, FOR_RECV_COUNT
from . import message, offsets, shared_expert, signal


def make(build):
    """Namespace "receiving" of device functions of a block.

    receive(call, receiver, n_receivers, failed) -> whether the block has yet to leave; if so, it ended with a barrier.
        If not, it gave up, or left before it copied, since it no longer needed the counters. receiver: number of this
        block among the n_receivers receiving ones; number 0 writes offsets and counts. failed: from failed_before.
    leave(call): the block adds 1 to D; the last one of the launch resets the counters (signal.resetting).
    """
    cfg, mark = build.cfg, stamps.make(build.trace)
    fmt, off = formats.of(cfg), offsets.make(build)
    share, own_share = shared_expert_share(cfg), shared_expert.make(cfg)
    leave = signal.resetting(cfg, ("reserved",), ("f", "g"))
    has_tiles, finish_group = off.has_tiles, fmt.finish_group
    local, ranks, front = cfg.n_local_experts, cfg.n_src_ranks, int(cfg.fused_shared_expert)
    n_words, n_counts, n_experts = off.n_words, off.n_counts, off.n_experts
    leaves_early = not front                        # else other warps may still need F and G
    rows = _rows(build, off)
    can_work_alone = fmt.direct and not front and local * ranks <= n_words  # rows are payloads, and all words are kept

    @device_fn
    def finish_groups(call, window, team):
        """Clears the scales in each group's last tile that no row has; a warp takes a group."""
        warp, warps, _ = team
        i = i32(warp)
        while i < window.here:
            last = i32(i * ranks + ranks - 1)
            n_rows = i32(window.before[last] + window.counts[last])
            finish_group(call.format_handler, n_rows, i32(window.tiles[i]), lane_id())
            i = i32(i + warps)
        if window.first == 0 and front == 1 and warp == 0:
            _, n_shared = share(call.num_tokens, call.my_rank)
            finish_group(call.format_handler, n_shared, i32(0), lane_id())

    @device_fn
    def receive_alone(call, receiver, n_receivers, counts, words):
        """If all messages are here and a row is its payload, each warp of the block does its part alone.

        The last warp adds to D. Block 0 of the receivers writes offsets, and copies rows only if there is no other.
        """
        others, last = i32(n_receivers - 1), i32(n_warps() - 1)
        n_free = i32(max(1, last))
        worker, workers = i32(warp_id() * others + receiver - 1), i32(n_free * others)
        if others == 0:
            worker, workers = i32(warp_id()), n_free
        if receiver == 0:
            off.write_first(call)
        leave(call)
        if receiver == 0 and warp_id() == 0:
            rows.write_alone(call, counts)
        if (receiver > 0 or others == 0) and warp_id() < n_free:
            rows.copy_alone(call, worker, workers, counts, words)
        mark(call, stamps.COPIED)

    @device_fn
    def receive_few(call, receiver, n_receivers, failed):
        """Waits for all messages, then receives them. With so few it does not pay to begin before all are here."""
        counts, words, ok = shared_array(n_counts, int32), shared_array(n_words, uint64), not failed
        if ok:
            ok, _ = off.await_messages(call, i32(0), local, counts, words)
        if syncthreads_or(not ok) == 0:                     # every thread acquired for all
            mark(call, stamps.COUNTED)
            receive_alone(call, receiver, n_receivers, counts, words)
        return False

    if build.are_few and can_work_alone:
        return namespace("receiving", receive=receive_few, leave=leave)

    @device_fn
    def receive(call, receiver, n_receivers, failed):
        counts, before = shared_array(n_counts, int32), shared_array(n_counts, int32)
        ends, partial = shared_array(n_counts, int32), shared_array(32, int32)
        starts, tiles = shared_array(n_experts, int32), shared_array(n_experts, int32)
        words, others = shared_array(n_words, uint64), i32(n_receivers - 1)
        # Numbers of a block's warps are far apart, so that all blocks have work to the end. The block that writes the
        # results comes last. team: (this warp, number of warps that copy, number of those that have no other task).
        warp = i32(n_warps() * others + warp_id()) if receiver == 0 else i32(warp_id() * others + receiver - 1)
        team = warp, i32(n_warps() * n_receivers), i32((n_warps() - 1) * others)
        start, first, ok, stays = off.begin(call), i32(0), not failed, True
        while first < local:
            here = i32(min(n_experts, local - first))
            window, is_final = offsets.Window(first, here, counts, words, before, ends, starts, tiles, partial), False
            if ok:
                ok, is_final = off.await_counts(call, first, here, counts, words)
            if syncthreads_or(not ok):                      # every thread acquired for all
                return False
            # the same in all blocks: they divide the rows in the same way
            is_final = syncthreads_or(not (here * ranks <= n_words and is_final)) == 0
            mark(call, stamps.COUNTED)
            if can_work_alone:
                if is_final:
                    receive_alone(call, receiver, n_receivers, counts, words)
                    return False
            start = off.place(window, start)
            syncthreads()                                   # all places by all threads
            mark(call, stamps.PLACED)
            if receiver == 0:
                off.write(call, window)
            if first == 0:
                if own_share.put_shared(call):
                    return False
            if is_final and leaves_early and first + here == local:
                stays = False
                leave(call)
            ok = rows.copy_window(call, window, team, is_final)
            if has_tiles:
                finish_groups(call, window, team)
            first = i32(first + here)
            if first < local:
                syncthreads()                               # all have read the old window
        mark(call, stamps.COPIED)
        return syncthreads_or(not ok) == 0 and stays

    return namespace("receiving", receive=receive, leave=leave)


def _rows(build, off):
    """Namespace "rows" of device functions of a warp.

    copy_window(call, window, team, is_final) -> whether all arrived: copies its share of the window's rows.
        is_final: the block has acquired all messages, and window.words has the words of all segments.
    These sum up counts by themselves, without a window. The block must have acquired all messages before:
    copy_alone(call, worker, workers, counts, words): copies this worker's parts of rows.
    write_alone(call, counts): writes row_offsets, expert_ids, regions A and B, and counts.
    """
    cfg, mark = build.cfg, stamps.make(build.trace)
    fmt, msg = formats.of(cfg), message.make(cfg)
    decode, decode_parts = fmt.decode, fmt.decode_parts
    local, ranks, front = cfg.n_local_experts, cfg.n_src_ranks, int(cfg.fused_shared_expert)
    experts_a_lane = -(-local // LANES)
    run, n_segments = experts_a_lane * ranks, local * ranks

    @device_fn
    def put_routed(call, word, segment, slot, row, part, n_parts):
        """Decodes a part of the message in a segment's slot to the RowPlace, and with the first part writes src_info.

        word: the segment's word of recv_count.
        """
        lane, id16, is_packed = i32(lane_id()), i32(0), word >= u64(DESCRIBED)
        if is_packed:
            src_index, (token, k) = i32(segment % ranks), message.message_of(word, slot)
            payload = msg.at(call.recv_buf_p, src_index, token)         # of local expert 0
        else:
            payload, k = msg.at(call.recv_buf_p, segment, slot), i32(0)
            token, reference = msg.load_src_info(payload)
            if part == 0:
                id16 = msg.load_id(payload)
            if reference != u32(0):
                payload = u64(call.recv_buf_p + u64(reference - u32(1)) * u64(msg.n_bytes))
        decode(payload, call.format_handler, row, part, n_parts, lane)
        if part == 0:
            if not is_packed:
                k = lowest(ballot(id16 == i32(call.my_rank * local + row.group - front)))     # of the row's expert
            if lane < 2:
                store_i32(call.src_info + u64(4) * u64(2 * row.row + lane), k if lane == 1 else token)

    @device_fn
    def copy_window(call, window, team, is_final):
        n_here, (warp, warps, n_free) = i32(window.here * ranks), team
        n_rows = i32(window.ends[n_here - 1])
        n_parts = parts_of_each(n_rows, n_free, decode_parts)
        unit, seen, ok, word = i32(warp), i32(-1), True, u64(0)
        while ok and unit < n_rows * n_parts:
            q, part = split(unit, n_parts)
            j = offsets.segment_of_row(window.ends, n_here, q)
            expert, segment = i32(j // ranks), i32(window.first * ranks + j)
            if segment != seen:
                if is_final:
                    word = u64(window.words[j])
                else:
                    if lane_id() == 0:
                        address = call.recv_count_p + u64(8) * u64(segment)
                        word = u64(wait_below(address, u64(ANNOUNCED), call, DISPATCH_WAIT, FOR_RECV_COUNT, segment))
                    word = u64(warp_broadcast_u64(word, 0))
                    syncwarp()          # lane 0 acquired for all
                ok = word != u64(MAX_FINITE)
                if seen < 0:
                    mark(call, stamps.ARRIVED)
                seen = segment
            if ok:
                slot = i32(q - window.ends[j - 1]) if j > 0 else q
                in_group = i32(window.before[j] + slot)
                row = formats.RowPlace(i32(window.starts[expert] + in_group), i32(front + window.first + expert),
                                       in_group, i32(window.tiles[expert]))
                put_routed(call, word, segment, slot, row, part, n_parts)
            unit = i32(unit + warps)
        return ok

    @device_fn
    def rows_of_lane(counts):
        """(number of rows in this lane's segments, which are adjacent; number of rows up to their end)"""
        n_rows, i = i32(0), i32(0)
        while i < run:
            if lane_id() * run + i < n_segments:
                n_rows = i32(n_rows + counts[lane_id() * run + i])
            i = i32(i + 1)
        return n_rows, i32(warp_inclusive_sum_i32(n_rows))

    @device_fn
    def copy_alone(call, worker, workers, counts, words):
        here, end = rows_of_lane(counts)
        n_rows, unit = i32(shfl_idx(end, i32(LANES - 1))), i32(worker)
        n_parts = parts_of_each(n_rows, workers, decode_parts)
        mark(call, stamps.PLACED)
        while unit < n_rows * n_parts:
            row, part = split(unit, n_parts)
            holder = lowest(ballot(end > row))
            slot, j = i32(row - i32(shfl_idx(i32(end - here), holder))), i32(holder * run)
            while slot >= counts[j]:
                slot, j = i32(slot - counts[j]), i32(j + 1)
            put_routed(call, u64(words[j]), j, slot, formats.RowPlace(row, i32(j // ranks), slot, i32(0)), part, n_parts)
            unit = i32(unit + workers)

    @device_fn
    def write_alone(call, counts):
        lane, (here, end) = i32(lane_id()), rows_of_lane(counts)
        start, i = i32(end - here), i32(0)
        mark(call, stamps.PLACED)
        while i < experts_a_lane:
            expert, before, src_rank = i32(lane * experts_a_lane + i), i32(0), i32(0)
            while expert < local and src_rank < ranks:
                segment = i32(expert * ranks + src_rank)
                off.write_segment(call, segment, start, before, i32(counts[segment]))
                before, src_rank = i32(before + counts[segment]), i32(src_rank + 1)
            if expert < local:
                off.write_group(call, expert, start, before, i32(0))
            start, i = i32(start + before), i32(i + 1)

    return namespace("rows", copy_window=copy_window, copy_alone=copy_alone, write_alone=write_alone)
