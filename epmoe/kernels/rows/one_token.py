"""Sending where a block has one token at most: parts of its row by the warps of all blocks that share it.

What does not depend on what the peers tell is done before they have: there is time, and it is the way of few tokens.
"""

from epmoe.device import ballot, device_fn, i32, lane_id, load_u64, n_warps, u32, u64, warp_id

from . import companions, control, layout, peers, roles
from .row_copy import BATCH, VECTOR, copy_to_lanes, fewest_parts, parts


def make(shape, block):
    """Device functions (prepare, unprepared, send) for rows that travel as they are.

    prepare(params, x, num_tokens) -> prepared: what the warp sends first is on its way to its registers; of a block
    that goes this way, before it waits for anything, since loads come back in their order, and those by which it waits
    would wait for these. unprepared(): in its stead, for others. send(params, num_tokens, my_rank, notes, row,
    prepared): the block's share of its token, if every rank has room; in lane r, row is the token's number among the
    rows for rank r, -1 for none.
    """
    if not roles.sends_one(shape):
        return _never()
    ranks, row_bytes, n_apart = shape.n_ranks, shape.row_bytes, companions.apart(shape)
    n_vectors = row_bytes // VECTOR
    (count_parts, part_span), fewest = parts(n_vectors), fewest_parts(n_vectors)
    load_batch, store_batch, copy = copy_to_lanes(read_only=True)
    (before_me, _, _, _, _), has_room = peers.sums(ranks), peers.room(ranks)
    (look, send_companions), places = companions.make(shape, block), companions.places(shape, block)
    tokens_of_block, several = layout.tokens_of(shape), roles.blocks_a_token(shape)
    share_of_token = roles.share_of_token(shape)
    n_words, own_last = control.experts_at(ranks), int(ranks <= 2)      # of two ranks the own rows are half of all
    p_pools = block.offset("pool_ptrs")

    @device_fn
    def units_of(num_tokens):
        """(first unit of work of this warp, how many warps share the token, parts of its row)."""
        warps = i32(n_warps() * several(num_tokens))
        return (i32(share_of_token(num_tokens) * n_warps() + warp_id()), warps,
                i32(max(fewest, count_parts(i32(1), i32(warps - n_apart)))))

    @device_fn
    def unprepared():
        none = u32(0), u32(0), u32(0), u32(0)
        return i32(0), u64(0), u64(0), (i32(-1), u32(0)), (none, none, none, none)

    @device_fn
    def prepare(params, x, num_tokens):
        lane, (token, end), (unit, _, n_parts) = i32(lane_id()), tokens_of_block(num_tokens), units_of(num_tokens)
        _, _, pool, seen, batch = unprepared()
        src = u64(u64(x) + u64(token) * u64(row_bytes))
        if lane < ranks:
            pool = u64(load_u64(params + u64(p_pools) + u64(8) * u64(lane)))
        if token < end:
            a, b = part_span(unit, n_parts)     # none behind the last part
            if a < b:
                batch = load_batch(src, a, b, lane)
            if n_apart > 0 and unit == n_parts:
                seen = look(params, token, lane)
        return token, src, pool, seen, batch

    @device_fn
    def send(params, num_tokens, my_rank, notes, row, prepared):
        (token, src, pool, seen, batch), mask = prepared, u32(ballot(row >= 0))
        lane, n_units, to, first_row = i32(lane_id()), i32(0), u64(0), i32(0)
        unit, warps, n_parts = units_of(num_tokens)
        if token < num_tokens and has_room(notes):
            n_units = i32(n_parts + n_apart)
            first_row = before_me(notes, my_rank)
            if lane < ranks:
                to = u64(pool + u64(control.PLACE_BYTES) * u64(u32(notes[lane * n_words + control.PLACES])))
        row, start, is_first = i32(first_row + row), i32((my_rank + own_last) & 31), True
        to = u64(to + u64(row) * u64(row_bytes))
        while unit < n_units:
            a, b = part_span(unit, n_parts)
            if is_first:
                store_batch(batch, to, mask, start, a, b, lane)
                a = i32(min(i32(a + BATCH), b))
            copy(src, to, mask, start, a, b, lane)
            if n_apart > 0 and unit == n_parts:
                if not is_first:
                    seen = look(params, token, lane)
                send_companions(params, token, seen, mask, row, places(params, notes, lane), lane)
            unit, is_first = i32(unit + warps), False

    return prepare, unprepared, send


def _never():
    @device_fn
    def prepare(params, x, num_tokens):
        return i32(0)

    @device_fn
    def unprepared():
        return i32(0)

    @device_fn
    def send(params, num_tokens, my_rank, notes, row, prepared):
        return

    return prepare, unprepared, send
