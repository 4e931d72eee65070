"""Sends rows: a warp takes a token, or a part of one, reads it once and stores it at every rank that it goes to.

The rows of a src_rank are together at the receiver, in the order of its tokens, after those of lower ranks. So every
row is written to its final place.
"""

from types import SimpleNamespace

from epmoe.device import (ballot, device_fn, f32, ffs, i32, lane_id, load_i32, load_u32, n_warps, prefetch,
                          store_u32, syncthreads_or, syncwarp, u32, u64, warp_broadcast_u64, warp_id)

from ..formats import blockwise_fp8
from . import companions, control, layout, peers, roles, waits
from .row_copy import VECTOR, copy_to_lanes, fewest_parts, parts
from .waits import LINE

BF16_BYTES = 2
STEP, A_SCALE = 32, 8   # vectors of encoded values that are made in one step, and that have a scale in common


def fp8_format(hidden):
    """The blockwise FP8 token format for rows of this many elements; in expert-major, values and scales share a row."""
    return blockwise_fp8.make(SimpleNamespace(hidden=hidden, alignment=16))


def vectors_of(shape):
    """16-byte vectors of a row as it travels, without scales behind them."""
    return (shape.value_bytes if shape.encode else shape.row_bytes) // VECTOR


def bytes_of(shape):
    """Bytes of an input row."""
    return shape.value_bytes * BF16_BYTES if shape.encode else shape.row_bytes


def _encode(shape, block):
    """Device function encode(params, token, first, end, to, mask, lane) -> where the encoded row lies.

    A warp makes its vectors [first, end), whole steps of the encoder, and sends their scales to the rows at `to`.
    """
    row_bytes, value_bytes, n_scales = shape.row_bytes, shape.value_bytes, shape.scale_words
    encode_part, n_steps = fp8_format(value_bytes).encode_part, -(-value_bytes // (STEP * VECTOR))
    p_x, p_encoded = block.index("x"), block.index("encoded")

    @device_fn
    def encode(params, token, first, end, to, mask, lane):
        src = params[p_x] + u64(token) * u64(value_bytes * BF16_BYTES)
        staged = params[p_encoded] + u64(token) * u64(row_bytes)
        step, left = i32(first // STEP), u32(mask)
        while left != u32(0) and STEP * step < end:
            encode_part(src, staged, f32(1), step, n_steps, lane)
            step = i32(step + 1)
        syncwarp()                              # the payload by all lanes, before any lane reads it
        while left != u32(0):
            there, i = u64(warp_broadcast_u64(to, i32(ffs(left) - 1))) + u64(value_bytes), i32(first // A_SCALE + lane)
            while i < n_scales and A_SCALE * i < end:
                store_u32(there + u64(4) * u64(i), load_u32(staged + u64(value_bytes) + u64(4) * u64(i)))
                i = i32(i + 32)
            left = u32(left & u32(left - u32(1)))
        return staged

    return encode


def _ahead(shape, block):
    """Device function bring(params, token, part, n_parts, lane): prefetches the next work item into L2."""
    has_probs, expert_major = shape.has_probs, shape.expert_major
    src_bytes, slots_bytes = bytes_of(shape), 4 * shape.top_k
    (_, part_span), n_apart = parts(vectors_of(shape)), companions.apart(shape)
    a_vector = src_bytes // vectors_of(shape)       # bytes that become a vector
    p_x, p_probs = block.index("x"), block.index("probs")

    @device_fn
    def bring(params, token, part, n_parts, lane):
        a, b = part_span(part, n_parts)
        row, at = params[p_x] + u64(token) * u64(src_bytes), i32(a_vector * a + LINE * lane)
        while at < a_vector * b:
            prefetch(row + u64(at))
            at = i32(at + 32 * LINE)
        if has_probs and not expert_major and part == n_parts * n_apart and lane == 0:
            prefetch(params[p_probs] + u64(token) * u64(slots_bytes))

    return bring


def make(shape, block, flags=None, await_numbers=None):
    """Device function send(params, epoch, num_tokens, my_rank, notes) -> whether this block's tokens are sent.

    If every rank has room; else nothing is. Where there are more tokens than blocks, the blocks share them: some reach
    the links sooner than others. flags: of row_flags, where rows are expanded while they arrive. await_numbers: of the
    layout, which is made in the same launch; then a warp sends the first half of a token of its own block meanwhile.
    """
    ranks, row_bytes, encodes = shape.n_ranks, shape.row_bytes, shape.encode
    place, (before_me, _, _, _, _) = peers.place_in(block, ranks), peers.sums(ranks)
    has_room = peers.room(ranks)
    n_vectors = vectors_of(shape)
    count_parts, part_span = parts(n_vectors)
    if flags is not None:
        count_flags, raise_flags, _, _, _ = flags
    raises, tokens_of_block = flags is not None, layout.tokens_of(shape)
    sending, n_apart, has_more = roles.sending(shape), companions.apart(shape), companions.exist(shape)
    (look, send_companions), places_of_more = companions.make(shape, block), companions.places(shape, block)
    fewest, src_bytes = fewest_parts(n_vectors), bytes_of(shape)
    _, _, copy = copy_to_lanes(read_only=not encodes)
    if encodes:
        encode = _encode(shape, block)
    bring, take, are_shared = _ahead(shape, block), waits.claims(block, control.TAKEN), roles.sharing(shape)
    is_numbered_now, begins_with_own = await_numbers is not None, roles.beginning(shape)
    p_x, p_rows = block.index("x"), block.index("row_of")

    @device_fn
    def part_of(unit, first, rest, own, mine):
        """(token, part of its row) of a unit of work: below 0 the first parts of one's own token, then what is left."""
        token, part = own, i32(unit + mine)
        if unit >= 0:
            turn = u32(u32(unit) // u32(rest))
            token, part = i32(first + i32(turn)), i32(mine + unit - i32(turn) * rest)
        return token, part

    @device_fn
    def parts_of(n_tokens, warps):
        return i32(max(fewest, count_parts(n_tokens, i32(warps - n_apart * n_tokens))))

    @device_fn
    def send(params, epoch, num_tokens, my_rank, notes):
        if not has_room(notes):
            return True
        lane, first_row = i32(lane_id()), before_me(notes, my_rank)
        rows_at, at_more = u64(0), places_of_more(params, notes, lane)
        if lane < ranks:
            rows_at = place(params, notes, i32(0), lane)
        x, row_of = params[p_x], params[p_rows]
        start = i32((my_rank + 1) & 31)
        first, end = tokens_of_block(num_tokens)
        warps, shared = i32(n_warps()), are_shared(num_tokens)
        if shared:                              # all tokens, which warps take in turn
            first, end, warps = i32(0), i32(num_tokens), i32(n_warps() * sending())
        n_parts = i32(1)
        if raises:
            n_parts = count_flags(notes)
        else:
            n_parts = parts_of(i32(end - first), warps)
        units, with_row, mine, own, own_end = i32(n_parts + n_apart), i32(n_parts * n_apart), i32(0), i32(0), i32(0)
        if is_numbered_now and begins_with_own(num_tokens):
            own, own_end = tokens_of_block(num_tokens)
            own, mine = i32(own + warp_id()), i32(units // 2)
        rest, unit, ok, are_numbered = i32(units - mine), i32(warp_id()), True, not (is_numbered_now and shared)
        if is_numbered_now and mine == 0 and shared:
            if warp_id() == 0:
                ok = await_numbers(params, epoch, lane)
            ok, are_numbered = not syncthreads_or(not ok), True     # what one thread acquired, all read
        if shared:
            unit = i32(-mine)                   # below 0: a part of its own token
            if own >= own_end:
                unit = take(params, epoch, lane)
        n_units = i32((end - first) * rest)
        while ok and unit < n_units:
            following = i32(unit + n_warps())
            if shared:
                following = i32(unit + 1)
                if following >= 0:
                    following = take(params, epoch, lane)
            if is_numbered_now and unit >= 0 and not are_numbered:
                ok, are_numbered = await_numbers(params, epoch, lane), True
            (token, part), row = part_of(unit, first, rest, own, mine), i32(-1)
            if lane < ranks and ok:
                row = i32(load_i32(row_of + u64(4) * u64(token * ranks + lane)))
            mask = u32(ballot(row >= 0))
            row = i32(first_row + row)
            src, to = x + u64(token) * u64(src_bytes), rows_at + u64(row) * u64(row_bytes)
            a, b = part_span(part, n_parts)
            if encodes:
                src = u64(encode(params, token, a, b, to, mask, lane))
            if following < n_units:
                next_token, next_part = part_of(following, first, rest, own, mine)
                bring(params, next_token, next_part, n_parts, lane)
            copy(src, to, mask, start, a, b, lane)  # nothing behind the last part
            if has_more and part == with_row:
                send_companions(params, token, look(params, token, lane), mask, row, at_more, lane)
            if raises:
                raise_flags(params, mask, row, part, epoch, lane)
            unit = i32(following)
        return ok

    return send
