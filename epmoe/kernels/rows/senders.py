"""Sending rows: a warp takes a token, or a part of one, reads it once and stores it at every rank that it goes to.

The rows of a source rank lie together at the receiver, in the order of its tokens, behind those of lower ranks. So
every row is written where it is to stay.
"""

from types import SimpleNamespace

from epmoe.device import (all_lanes, ballot, block_dim, device_fn, f32, ffs, i32, lane_id, load_i32, load_u32, load_u64,
                          n_warps, popc, prefetch, store_i32, store_u32, store_u64, syncthreads_or, syncwarp,
                          thread_idx, u32, u64, warp_broadcast_i32, warp_broadcast_u64, warp_id)

from ..formats import blockwise_fp8
from . import control, layout, peers, roles, routing, waits
from .row_copy import BATCH, VECTOR, copy_to_lanes, parts
from .waits import LINE

MOST_FETCHED = 2        # tokens: more would hold up what the peers tell
FULL = 1024             # threads of a block for many tokens
MINUS_ONE = 2**64 - 1
BF16_BYTES = 2
FEWEST_PARTS = 7        # of a row, if it has so many batches of loads, so that all warps end at about the same time


def fp8_format(hidden):
    """The blockwise FP8 token format for rows of so many elements; expert-major, values and scales share a row."""
    return blockwise_fp8.make(SimpleNamespace(hidden=hidden, alignment=16))


def _send_slots(shape, block):
    """Device function (params, token, mask, row, ids_at, probs_at, lane): a token's slots, as its ranks see them."""
    top_k, local, has_probs = shape.top_k, shape.n_local_experts, shape.has_probs
    (load_id, clean_id), p_probs = routing.token_ids(shape, block), block.offset("probs")

    @device_fn
    def send_slots(params, token, mask, row, ids_at, probs_at, lane):
        expert = clean_id(load_id(params, token, lane), lane)
        prob = u32(0)
        if has_probs and lane < top_k:
            prob = u32(load_u32(u64(load_u64(params + u64(p_probs))) + u64(4) * (u64(token) * u64(top_k) + u64(lane))))
        left = u32(mask)
        while left != u32(0):
            rank = i32(ffs(left) - 1)
            at = u64(warp_broadcast_i32(row, rank)) * u64(top_k) + u64(lane)
            to_ids, to_probs = u64(warp_broadcast_u64(ids_at, rank)), u64(warp_broadcast_u64(probs_at, rank))
            is_here = expert >= 0 and expert // local == rank
            if lane < top_k:
                value, here = u64(MINUS_ONE), u32(0)
                if is_here:
                    value, here = u64(expert % local), prob
                store_u64(to_ids + u64(8) * at, value)
                if has_probs:
                    store_u32(to_probs + u64(4) * at, here)
            left = u32(left & u32(left - u32(1)))

    return send_slots


def _send_experts(shape, block):
    """Device function (params, token, mask, row, slots_at, probs_at, masks_at, lane): a token's places by expert.

    For each rank of `mask`: a bit for each local expert that the token goes to, and for these experts, ascending, the
    token's place among the expert's rows, and its prob.
    """
    local, n_experts, has_probs = shape.n_local_experts, shape.n_experts, shape.has_probs
    n_masks = expert_masks(local)
    p_slots, p_probs = block.offset("slot_of"), block.offset("probs")

    @device_fn
    def send_experts(params, token, mask, row, slots_at, probs_at, masks_at, lane):
        slots, probs = u64(load_u64(params + u64(p_slots))), u64(load_u64(params + u64(p_probs)))
        left = u32(mask)
        while left != u32(0):
            rank = i32(ffs(left) - 1)
            at = u64(warp_broadcast_i32(row, rank))
            to_slots = u64(warp_broadcast_u64(slots_at, rank)) + u64(4) * at * u64(local)
            to_probs = u64(warp_broadcast_u64(probs_at, rank)) + u64(4) * at * u64(local)
            to_masks, first, sent = u64(warp_broadcast_u64(masks_at, rank)) + u64(4) * at * u64(n_masks), i32(0), i32(0)
            while first < local:
                expert, slot = i32(first + lane), i32(-1)
                src = u64(4) * (u64(token) * u64(n_experts) + u64(rank * local + expert))
                if expert < local:
                    slot = i32(load_i32(slots + src))
                here = u32(ballot(slot >= 0))
                place = u64(4) * u64(sent + popc(u32(here & u32(u32(u32(1) << u32(lane)) - u32(1)))))
                if slot >= 0:
                    store_i32(to_slots + place, slot)
                    if has_probs:
                        store_u32(to_probs + place, load_u32(probs + src))
                if lane == 0:
                    store_u32(to_masks + u64(4) * u64(first // 32), here)
                sent, first = i32(sent + popc(here)), i32(first + 32)
            left = u32(left & u32(left - u32(1)))

    return send_experts


def expert_masks(n_local_experts):
    """u32 words that hold a bit for each local expert."""
    return -(-n_local_experts // 32)


def room(shape):
    """Device function has_room(notes) -> whether every rank has room; if one has none, no rank sends anything.

    All see the same counts and capacities.
    """
    ranks, n_words = shape.n_ranks, control.experts_at(shape.n_ranks)
    _, arriving, _, _, _ = peers.sums(ranks)

    @device_fn
    def has_room(notes):
        lane, rows, capacity = i32(lane_id()), arriving(notes, i32(0)), i32(0)
        if lane < ranks:
            capacity = i32(notes[lane * n_words + control.CAPACITY])
        return all_lanes(rows <= capacity) != 0

    return has_room


def ahead(shape, block):
    """Device functions (bring(params, token, part, n_parts, lane), fetch(params, num_tokens)).

    bring: lets the part of a row that a warp sends next come nearer. fetch: few tokens of the block, while they may not
    yet be sent.
    """
    has_probs, expert_major, n_vectors = shape.has_probs, shape.expert_major, shape.row_bytes // VECTOR
    if shape.encode:
        n_vectors = shape.value_bytes * BF16_BYTES // VECTOR
    src_bytes, slots_bytes, tokens_of_block = n_vectors * VECTOR, 4 * shape.top_k, layout.tokens_of(shape)
    (_, part_span), n_apart = parts(n_vectors), apart(shape)
    p_x, p_probs = block.offset("x"), block.offset("probs")

    @device_fn
    def bring(params, token, part, n_parts, lane):
        a, b = part_span(part, n_parts)
        row, at = u64(load_u64(params + u64(p_x))) + u64(token) * u64(src_bytes), i32(VECTOR * a + LINE * lane)
        while at < VECTOR * b:
            prefetch(row + u64(at))
            at = i32(at + 32 * LINE)
        if has_probs and not expert_major and part == n_parts * n_apart and lane == 0:
            prefetch(u64(load_u64(params + u64(p_probs))) + u64(token) * u64(slots_bytes))

    @device_fn
    def fetch(params, num_tokens):
        first, end = tokens_of_block(num_tokens)
        if end - first <= MOST_FETCHED:
            rows = u64(load_u64(params + u64(p_x))) + u64(first) * u64(src_bytes)
            # the first threads are those that have ids to look at
            i, n_bytes = i32(block_dim() - 1 - thread_idx()), i32((end - first) * src_bytes)
            while LINE * i < n_bytes:
                prefetch(rows + u64(LINE) * u64(i))
                i = i32(i + block_dim())
            if has_probs and not expert_major and thread_idx() == 0 and first < end:
                prefetch(u64(load_u64(params + u64(p_probs))) + u64(first) * u64(slots_bytes))

    return bring, fetch


def apart(shape):
    """1 if what goes with a row is a unit of work of its own, another warp's, behind those of its parts; 0 if not.

    It is not where it has to come with part 0, or where there is nothing.
    """
    return int((shape.has_meta or shape.scale_words > 0) and not shape.expands and not shape.encode)


def fewest_parts(n_vectors):
    """The fewest parts of a row of so many vectors that warps take."""
    return min(FEWEST_PARTS, max(1, -(-n_vectors // BATCH)))


def make(shape, block, flags=None, await_numbers=None):
    """Device functions (prepare, send) for one kernel.

    send(params, epoch, num_tokens, my_rank, notes, is_ready, prepared) -> whether this block's tokens are sent: if
    every rank has room, else nothing is. prepared: what prepare(params, num_tokens, is_ready) has read, before notes
    are here, of what each warp sends first; not where blocks share tokens, or do not know their numbers. Where there
    are more tokens than blocks, the blocks share them: some reach the links sooner than others. flags: of row_flags,
    where rows are expanded while they arrive. await_numbers: of the layout, which is made in the same launch; then a
    warp sends the first half of a token of its own block meanwhile.
    """
    ranks, row_bytes, encodes, scale_words = shape.n_ranks, shape.row_bytes, shape.encode, shape.scale_words
    has_meta, has_probs = shape.has_meta, shape.has_probs
    separate_scales = 0 if shape.expert_major else scale_words
    place, (before_me, _, _, _, _) = peers.place_in(block, ranks), peers.sums(ranks)
    has_room = room(shape)
    n_vectors = row_bytes // VECTOR
    count_parts, part_span = parts(n_vectors)
    if flags is not None:
        count_flags, raise_flags, _, _, _ = flags
    raises, expert_major, tokens_of_block = flags is not None, shape.expert_major, layout.tokens_of(shape)
    sending, n_apart = roles.sending(shape), apart(shape)
    fewest = fewest_parts(n_vectors)
    load_batch, store_batch, copy = copy_to_lanes(read_only=not encodes)
    src_bytes = row_bytes
    if encodes:
        src_bytes = shape.value_bytes * BF16_BYTES
        encode = fp8_format(shape.value_bytes).encode
    (bring, _), take, are_shared = ahead(shape, block), waits.claims(block, control.TAKEN), roles.sharing(shape)
    # It takes registers; where tokens are counted in the same launch, it held the notes up for as long as it saved.
    can_prepare = not raises and not encodes and shape.threads < FULL and await_numbers is None
    is_numbered_now, begins_with_own = await_numbers is not None, roles.beginning(shape)
    if has_meta and expert_major:
        send_experts = _send_experts(shape, block)
    elif has_meta:
        send_slots = _send_slots(shape, block)
    p_x, p_encoded, p_rows, p_scales = (block.offset(n) for n in ("x", "encoded", "row_of", "scales"))

    @device_fn
    def send_scales(params, token, mask, row, scales_at, lane):
        src = u64(load_u64(params + u64(p_scales))) + u64(4) * u64(token) * u64(separate_scales)
        left = u32(mask)
        while left != u32(0):
            rank = i32(ffs(left) - 1)
            to_row = u64(warp_broadcast_i32(row, rank)) * u64(separate_scales)
            to = u64(warp_broadcast_u64(scales_at, rank)) + u64(4) * to_row
            i = i32(lane)
            while i < separate_scales:
                store_u32(to + u64(4) * u64(i), load_u32(src + u64(4) * u64(i)))
                i = i32(i + 32)
            left = u32(left & u32(left - u32(1)))

    @device_fn
    def part_of(unit, first, rest, own, mine):
        """(token, part of its row) of a unit of work: below 0 the first parts of one's own token, then what is left."""
        token, part = own, i32(unit + mine)
        if unit >= 0:
            token, part = i32(first + unit // rest), i32(mine + unit % rest)
        return token, part

    @device_fn
    def parts_of(n_tokens, warps):
        return i32(max(fewest, count_parts(n_tokens, i32(warps - n_apart * n_tokens))))

    @device_fn
    def prepare(params, num_tokens, is_ready):
        (first, end), lane, row, none = tokens_of_block(num_tokens), i32(lane_id()), i32(-1), u32(0)
        batch = (none, none, none, none), (none, none, none, none), (none, none, none, none), (none, none, none, none)
        if can_prepare and is_ready:
            n_parts = parts_of(i32(end - first), i32(n_warps()))
            units = i32(n_parts + n_apart)
            if warp_id() < (end - first) * units:
                token, (a, b) = i32(first + warp_id() // units), part_span(i32(warp_id() % units), n_parts)
                if a < b:
                    batch = load_batch(u64(load_u64(params + u64(p_x))) + u64(token) * u64(src_bytes), a, b, lane)
                if lane < ranks:
                    row = i32(load_i32(u64(load_u64(params + u64(p_rows))) + u64(4) * u64(token * ranks + lane)))
        return row, batch

    @device_fn
    def send(params, epoch, num_tokens, my_rank, notes, is_ready, prepared):
        if not has_room(notes):
            return True
        lane, first_row = i32(lane_id()), before_me(notes, my_rank)
        rows_at, meta_at, probs_at, scales_at = u64(0), u64(0), u64(0), u64(0)
        if lane < ranks:
            rows_at = place(params, notes, i32(0), lane)
            if has_meta:
                meta_at = place(params, notes, i32(1), lane)
            if has_meta and has_probs:
                probs_at = place(params, notes, i32(2), lane)
            if scale_words > 0 or expert_major:
                scales_at = place(params, notes, i32(3), lane)
        x, row_of = u64(load_u64(params + u64(p_x))), u64(load_u64(params + u64(p_rows)))
        start = i32((my_rank + 1) & 31)
        first, end = tokens_of_block(num_tokens)
        warps, shared = i32(n_warps()), are_shared(num_tokens)
        if shared:                              # all tokens, which warps take in turn
            first, end, warps = i32(0), i32(num_tokens), i32(n_warps() * sending())
        n_parts = i32(1)
        if raises:
            n_parts = count_flags(notes)
        elif not encodes:
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
            if can_prepare and is_ready:
                row = prepared[0]
            elif lane < ranks and ok:
                row = i32(load_i32(row_of + u64(4) * u64(token * ranks + lane)))
            mask = u32(ballot(row >= 0))
            row = i32(first_row + row)
            src = x + u64(token) * u64(src_bytes)
            if encodes and mask != u32(0):
                staged = u64(load_u64(params + u64(p_encoded))) + u64(token) * u64(row_bytes)
                encode(src, staged, f32(1), lane)
                syncwarp()                      # the payload by all lanes, before any lane reads it
                src = staged
            if following < n_units:
                next_token, next_part = part_of(following, first, rest, own, mine)
                bring(params, next_token, next_part, n_parts, lane)
            a, b = part_span(part, n_parts)     # none behind the last part
            if can_prepare and is_ready:
                store_batch(prepared[1], rows_at + u64(row) * u64(row_bytes), mask, start, a, b, lane)
                a, is_ready = i32(min(i32(a + BATCH), b)), False
            copy(src, rows_at + u64(row) * u64(row_bytes), mask, start, a, b, lane)
            if part == with_row:
                if has_meta and expert_major:
                    send_experts(params, token, mask, row, meta_at, probs_at, scales_at, lane)
                elif has_meta:
                    send_slots(params, token, mask, row, meta_at, probs_at, lane)
                if separate_scales > 0:
                    send_scales(params, token, mask, row, scales_at, lane)
            if raises:
                raise_flags(params, mask, row, part, epoch, lane)
            unit = i32(following)
        return ok

    return prepare, send
