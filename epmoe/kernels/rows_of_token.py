"""Large batches: a payload that arrived once is read once, and stored into the rows of all its token's messages.

Copying row by row would read a payload from memory once for each of its experts here. So the sender of a shared payload
adds a list: for each k, 1 + the row in recv_buf of the token's message, or 0 if it goes to another rank. The list is
where another of these messages would have its payload. The carrier's reference gives the place: LISTED + 1 + that
message's row. Only carriers cause work for a receiver. Warps take messages as they become free, since it is not known
in advance which ones carry a payload.
"""

from epmoe import layout
from epmoe.device import (atomic_add_relaxed_gpu_i32, ballot, device_fn, ffs, i32, lane_id, load_u32, n_warps, shfl_idx, store_i32, store_u32, u32, u64, warp_broadcast_i32)
from epmoe.layout import DESCRIBED, MAX_FINITE

from . import counters, formats, message, stamps
from .described import message_of
from .division import divided
from .params import fields_of

LISTED = 1 << 31        # of a reference: this message carries the payload, and the list lies there
CLAIMED = 2             # messages that a warp takes at a time, or one where several warps share a payload
WARPS_A_ROW = 4         # of so many warps a row, each shares a payload with others; about rows a payload
LEAST_TOKENS = 512      # of max_tokens_per_rank: with few rows there are fewer carriers than warps


def are_listed(cfg):
    """Whether senders of shared payloads add lists; the same on all ranks."""
    return (formats.of(cfg).decode_rows is not None and cfg.max_tokens_per_rank >= LEAST_TOKENS and cfg.top_k > 1
            and cfg.n_local_experts > 1 and not cfg.skip_a2a and not cfg.use_shmem
            and layout.message(cfg).token_size >= 4 * cfg.top_k)


def lister(cfg):
    """Device function (buf, place, at_slot, is_there, places, lane) -> the carrier's reference, 0 where it is alone.

    By a warp: writes the list of a token whose messages have the places [at_slot, at_slot + top_k), of which the one at
    `place` carries the payload. is_there: whether the slot of this lane is to the rank with recv_buf `buf`.
    """
    top_k, msg_bytes = cfg.top_k, layout.message(cfg).msg_bytes

    @device_fn
    def write(buf, place, at_slot, is_there, places, lane):
        mine, row, reference = u64(0), u32(0), u32(0)
        if lane < top_k and is_there:
            mine = u64(places[at_slot + lane])
        if mine != u64(0):
            row = u32((mine - buf) // u64(msg_bytes) + u64(1))
        others = ballot(mine != u64(0) and mine != place)
        if others != u32(0):
            other = i32(i32(ffs(others)) - 1)
            reference = u32(u32(LISTED) + u32(shfl_idx(row, other)))
            if lane < top_k:
                store_u32(u64(places[at_slot + other]) + u64(4) * u64(lane), row)
        return reference

    return write


def make(cfg, block, mark, segment_of, await_signal, message_at):
    """Device function copy(params, recv_buf, my_rank, n_copiers, before, ends, starts, tiles, words, is_known) ->
    whether all arrived.

    The warps of all blocks take messages in region C as they become free, in the order in which these are sent. The
    arguments, and segment_of, await_signal, message_at: as in copiers.py, of all segments in one window.
    """
    fmt, trailer = formats.of(cfg), message.make(cfg)
    load_source, load_id, slot_of = trailer.load_source, trailer.load_id, trailer.slot_of
    decode_rows, n_steps = fmt.decode_rows
    local, ranks, front = cfg.n_local_experts, cfg.n_src_ranks, int(cfg.fused_shared_expert)
    tokens_per_rank, msg_bytes, top_k = cfg.max_tokens_per_rank, layout.message(cfg).msg_bytes, cfg.top_k
    fields, p_src_info = fields_of(block, "format_handler"), block.index("src_info")
    p_counters, at_c = block.index("ep_counters"), counters.words(cfg).c

    @device_fn
    def copy_token(params, recv_buf, word, entry, slot, my_rank, before, starts, tiles, part, n_parts, lane):
        """A warp decodes its part of a message's payload to the rows of all messages of its token, if it carries it."""
        at, reference, k = message_at(recv_buf, entry, slot), u32(0), i32(0)
        payload = at
        if word >= u64(DESCRIBED):
            token, k = message_of(word, slot)
            payload = message_at(recv_buf, i32(entry % ranks), token)
        else:
            token, reference = load_source(at)
            if reference == u32(0):
                k = slot_of(load_id(at, lane), i32(my_rank * local + entry // ranks))
        if reference == u32(0) or reference >= u32(LISTED):
            mine = i32(0)               # 1 + the row in recv_buf of the token's message in the slot of this lane
            if reference == u32(0):
                if lane == k:
                    mine = i32(entry * tokens_per_rank + slot + 1)
            elif lane < top_k:
                mine = i32(load_u32(recv_buf + u64(reference - u32(LISTED + 1)) * u64(msg_bytes) + u64(4) * u64(lane)))
            row, row_in_group, group, tile = i32(0), i32(0), i32(0), i32(0)
            if mine != 0:
                there = divided(i32(mine - 1), i32(tokens_per_rank))
                expert = divided(there, i32(ranks))
                row_in_group = i32(before[there] + mine - 1 - there * tokens_per_rank)
                row, group, tile = i32(starts[expert] + row_in_group), i32(front + expert), i32(tiles[expert])
                if part == 0:
                    src_info = params[p_src_info] + u64(8) * u64(row)
                    store_i32(src_info, token)
                    store_i32(src_info + u64(4), lane)
            wanted, step = u32(ballot(mine != 0)), i32(part)
            while step < n_steps:
                decode_rows(payload, fields(params), row, group, row_in_group, tile, wanted, step, lane)
                step = i32(step + n_parts)

    @device_fn
    def claim(params, n, lane):
        """The first one of the next n parts of messages, for a warp."""
        first = i32(0)
        if lane == 0:
            first = i32(atomic_add_relaxed_gpu_i32(params[p_counters] + u64(at_c), n))
        return i32(warp_broadcast_i32(first, 0))

    @device_fn
    def copy(params, recv_buf, my_rank, n_copiers, before, ends, starts, tiles, words, is_known):
        lane, n_rows = i32(lane_id()), i32(ends[local * ranks - 1])
        n_parts = i32(max(1, min(n_steps, divided(i32(n_copiers * n_warps() * WARPS_A_ROW), i32(max(1, n_rows))))))
        claimed = i32(CLAIMED)
        if n_parts > 1:
            claimed = i32(1)
        seen, ok, word, unit = i32(-1), True, u64(0), claim(params, claimed, lane)
        while ok and unit < n_rows * n_parts:
            q = divided(unit, n_parts)
            entry = segment_of(ends, i32(local * ranks), q, lane)
            slot = q
            if entry > 0:
                slot = i32(q - ends[entry - 1])
            if entry != seen:
                if is_known:
                    word = u64(words[entry])
                else:
                    word = await_signal(params, entry, lane)
                ok = word != u64(MAX_FINITE)
                if seen < 0:
                    mark(params, stamps.ARRIVED)
                seen = entry
            if ok:
                copy_token(params, recv_buf, word, entry, slot, my_rank, before, starts, tiles,
                           i32(unit - q * n_parts), n_parts, lane)
                unit = i32(unit + 1)
                if unit & (claimed - 1) == 0:
                    unit = claim(params, claimed, lane)
        return ok

    return copy
