"""The receiving blocks of dispatch: copy messages from recv_buf into the rows of the grouped output, as they
arrive.

Rows are assigned to the warps in order, the same order in which messages are sent (senders.py). If there are more
warps than rows, a row has several parts. A warp waits for the signal of its row's segment (local expert, src_rank),
then copies. So some messages are copied while others are still under way. The payload is in the message itself or,
if the sender shares payloads, in another message to this rank, which the same signal covers.
"""

from epmoe import layout
from epmoe.device import (ballot, device_fn, ffs, i32, lane_id, n_warps, shared_array, store_i32, syncthreads,
                          syncthreads_or, syncwarp, u32, u64, warp_broadcast_u64, warp_id)
from epmoe.device import int32, uint64
from epmoe.layout import DESCRIBED, MAX_FINITE

from . import formats, known_rows, message, offsets, shared_expert, stamps
from .described import message_of
from .division import divided
from .params import fields_of
from .spin import wait_for_signal
from .status import DISPATCH_WAIT


def make(cfg, block, threads, mark, leave, are_few=False):
    """Device function receive(params, num_tokens, my_rank, copier, n_copiers, failed) -> (gave_up, is_out).

    copier: which of the n_copiers receiving blocks this one is; the first one writes down offsets and counts. failed:
    whether this thread knows of an earlier wait that expired. leave: device function params; the last warp of the block
    calls it, and is_out says so, where all messages are here as soon as their counts are known, so that it need not
    look at recv_count again. Where it does not say so it ends with a barrier. are_few: there are never so many messages
    that it is worth the while to begin with some of them before all are here.
    """
    fmt, sizes, places = formats.of(cfg), layout.message(cfg), offsets.make(cfg, block, threads)
    has_tiles, decode, finish_group = shared_expert.formats_with_tiles(fmt), fmt.decode, fmt.finish_group
    decode_parts, pack_shared = fmt.decode_parts, shared_expert.make(cfg, block).pack
    trailer = message.make(cfg)
    load_source, load_id, slot_of = trailer.load_source, trailer.load_id, trailer.slot_of
    share = shared_expert.share_of(cfg)
    await_counts, await_messages, place, begin = (places.await_counts, places.await_messages, places.place,
                                                  places.begin)
    write, write_first = places.write, places.write_first
    window, window_counts, known = places.experts, places.counts, places.known
    local, ranks, front = cfg.n_local_experts, cfg.n_src_ranks, int(cfg.fused_shared_expert)
    tokens_per_rank, msg_bytes = cfg.max_tokens_per_rank, sizes.msg_bytes
    leaves_early = not cfg.fused_shared_expert      # whose words F and G other warps may still need
    p_status, p_timeout, p_count = block.index("status"), block.index("timeout_ns"), block.index("recv_count_p")
    p_recv, fields, p_src_info = block.index("recv_buf_p"), fields_of(block, "format_handler"), block.index("src_info")

    @device_fn
    def segment_of(ends, n_segments, q, lane):
        """The first segment that ends behind row q of the window; a warp looks at 32 places at a time."""
        low, n = i32(0), i32(n_segments)
        while n > 1:
            stride = i32((n + 31) // 32)
            last = i32(min(low + n - 1, low + (lane + 1) * stride - 1))     # of the lane's part of them
            part = i32(i32(ffs(ballot(ends[last] > q))) - 1)
            n = i32(min(stride, n - part * stride))
            low = i32(low + part * stride)
        return low

    @device_fn
    def await_signal(params, entry, lane):
        """Waits for a segment's messages, by a whole warp; returns its word, MAX_FINITE if it gave up."""
        word = u64(0)
        if lane == 0:
            address = params[p_count] + u64(8) * u64(entry)
            word = u64(wait_for_signal(address, params[p_status],
                                       params[p_timeout], DISPATCH_WAIT, entry))
        word = u64(warp_broadcast_u64(word, 0))
        syncwarp()                      # lane 0 acquired for all
        return word

    @device_fn
    def message_at(recv_buf, entry, slot):
        """Address of a message in recv_buf."""
        return u64(recv_buf + (u64(entry) * u64(tokens_per_rank) + u64(slot)) * u64(msg_bytes))

    @device_fn
    def look_up(recv_buf, at, part, lane):
        """(token, payload, id in the slot of this lane) of the message at that address, from its trailer."""
        (token, reference), id16, payload = load_source(at), i32(0), u64(at)
        if part == 0:
            id16 = load_id(at, lane)
        if reference != u32(0):
            payload = u64(recv_buf + u64(reference - u32(1)) * u64(msg_bytes))
        return token, payload, id16

    @device_fn
    def copy_row(params, recv_buf, word, entry, slot, row, group, row_in_group, tile, my_rank, part, n_parts, lane):
        """A warp decodes its part of a message to the row; with the first part goes src_info."""
        is_described = word >= u64(DESCRIBED)
        if is_described:
            token, k = message_of(word, slot)
            payload, id16 = message_at(recv_buf, i32(entry % ranks), token), i32(0)
        else:
            (token, payload, id16), k = look_up(recv_buf, message_at(recv_buf, entry, slot), part, lane), i32(0)
        decode(payload, fields(params), row, group, row_in_group, tile, part, n_parts, lane)
        if part == 0:
            half = token
            if not is_described:
                k = slot_of(id16, i32(my_rank * local + group - front))
            if lane == 1:
                half = k
            if lane < 2:
                store_i32(params[p_src_info] + u64(4) * u64(2 * row + lane), half)

    @device_fn
    def copy_window(params, recv_buf, first, here, my_rank, warp, warps, free, before, ends, starts, tiles, words,
                    is_known):
        """Every warps-th part of a row, from `warp` on; whether all arrived.

        is_known: the block has acquired all messages, and words are those of all segments. Rows are cut into as many
        parts as the first `free` warps can take at once.
        """
        lane, n_rows = i32(lane_id()), i32(ends[here * ranks - 1])
        n_parts = i32(max(1, min(decode_parts, divided(free, i32(max(1, n_rows))))))
        unit, seen, ok, word = i32(warp), i32(-1), True, u64(0)
        while ok and unit < n_rows * n_parts:
            q = divided(unit, n_parts)
            j = segment_of(ends, i32(here * ranks), q, lane)
            expert, entry, slot = i32(j // ranks), i32(first * ranks + j), q
            if j > 0:
                slot = i32(q - ends[j - 1])
            if entry != seen:
                if is_known:
                    word = u64(words[j])
                else:
                    word = await_signal(params, entry, lane)
                ok = word != u64(MAX_FINITE)
                if seen < 0:
                    mark(params, stamps.ARRIVED)
                seen = entry
            if ok:
                row_in_group = i32(before[j] + slot)
                copy_row(params, recv_buf, word, entry, slot, i32(starts[expert] + row_in_group),
                         i32(front + first + expert), row_in_group, i32(tiles[expert]), my_rank,
                         i32(unit - q * n_parts), n_parts, lane)
            unit = i32(unit + warps)
        return ok

    @device_fn
    def finish_groups(params, first, here, warp, warps, counts, before, starts, tiles):
        """Clears the scales behind the rows of each group's last tile; a warp takes a group."""
        i = i32(warp)
        while i < here:
            last = i32(i * ranks + ranks - 1)
            finish_group(fields(params), i32(front + first + i), i32(starts[i]), i32(before[last] + counts[last]),
                         i32(tiles[i]), lane_id())
            i = i32(i + warps)

    has_quick_way = known_rows.applies(cfg, places)
    copy_known, write_known = known_rows.make(cfg, mark, places, copy_row)

    @device_fn
    def receive_known(params, recv_buf, my_rank, copier, worker, workers, counts, words):
        """Where all messages are here and rows need no padding: what each warp of the block does, by itself."""
        if warp_id() == n_warps() - 1:
            leave(params)
        elif copier > 0:
            copy_known(params, recv_buf, my_rank, worker, workers, counts, words)
        elif warp_id() == 0:
            write_known(params, counts)
        mark(params, stamps.COPIED)

    @device_fn
    def receive_few(params, num_tokens, my_rank, copier, n_copiers, failed):
        counts, words, ok = shared_array(window_counts, int32), shared_array(known, uint64), not failed
        if ok:
            ok, _ = await_messages(params, i32(0), local, counts, words)
        if syncthreads_or(not ok):                          # every thread acquired for all
            return True, False
        mark(params, stamps.COUNTED)
        # The last warp of a block leaves for it; the first block writes, and has rows only if it is the only one.
        others, last = i32(n_copiers - 1), i32(n_warps() - 1)
        n_free = i32(max(1, last))
        worker, workers = i32(warp_id() * others + copier - 1), i32(n_free * others)
        if others == 0:
            worker, workers = i32(warp_id()), n_free
        if copier == 0:
            write_first(params, num_tokens, my_rank)
        if warp_id() == last:
            leave(params)
        if copier == 0 and warp_id() == 0:
            write_known(params, counts)
        if (copier > 0 or others == 0) and warp_id() < n_free:
            recv_buf = params[p_recv]
            copy_known(params, recv_buf, my_rank, worker, workers, counts, words)
        mark(params, stamps.COPIED)
        return False, True

    if are_few and has_quick_way:
        return receive_few

    @device_fn
    def receive(params, num_tokens, my_rank, copier, n_copiers, failed):
        counts, before = shared_array(window_counts, int32), shared_array(window_counts, int32)
        ends, partial = shared_array(window_counts, int32), shared_array(32, int32)
        starts, tiles = shared_array(window, int32), shared_array(window, int32)
        words = shared_array(known, uint64)
        # The warps of one block take rows far from each other, so that all blocks have work to the end. Of few rows
        # those have none that may have to leave first, nor the block that writes.
        others, warps = i32(n_copiers - 1), i32(n_warps() * n_copiers)
        warp, free = i32(warp_id() * others + copier - 1), i32((n_warps() - 1) * others)
        if copier == 0:
            warp = i32(n_warps() * others + warp_id())
        recv_buf = params[p_recv]
        start, first, ok, is_out = begin(params, num_tokens, my_rank), i32(0), not failed, False
        while first < local:
            here = i32(min(window, local - first))
            fits, is_final = here * ranks <= known, False
            if ok:
                ok, is_final = await_counts(params, first, here, counts, words)
            if syncthreads_or(not ok):                      # every thread acquired for all
                return True, False
            # the same in all blocks, which share the rows out
            is_final = syncthreads_or(not (fits and is_final)) == 0
            mark(params, stamps.COUNTED)
            if has_quick_way:
                if is_final and others > 0 and n_warps() > 1:
                    if copier == 0:
                        write_first(params, num_tokens, my_rank)
                    receive_known(params, recv_buf, my_rank, copier, warp, free, counts, words)
                    return False, True
            start = place(here, start, counts, before, ends, starts, tiles, partial)
            syncthreads()                                   # all places by all threads
            mark(params, stamps.PLACED)
            if copier == 0:
                if first == 0:
                    write_first(params, num_tokens, my_rank)
                write(params, first, here, counts, before, starts, tiles)
            if first == 0:
                if pack_shared(params, num_tokens, my_rank):
                    return True, False
            if is_final and leaves_early and first + here == local:
                is_out = True
                if warp_id() == n_warps() - 1:
                    leave(params)
            ok = copy_window(params, recv_buf, first, here, my_rank, warp, warps, free, before, ends, starts, tiles,
                             words, is_final)
            if has_tiles:
                finish_groups(params, first, here, warp, warps, counts, before, starts, tiles)
                if first == 0 and front == 1 and warp == 0:
                    n_shared, _ = share(num_tokens, my_rank)
                    finish_group(fields(params), i32(0), i32(0), n_shared, i32(0), lane_id())
            first = i32(first + here)
            if first < local:
                syncthreads()                               # all have read the old window
        mark(params, stamps.COPIED)
        return syncthreads_or(not ok) != 0, is_out

    return receive
