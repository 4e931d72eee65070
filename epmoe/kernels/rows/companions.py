"""A row's metadata: the token's ids (or places of local experts), probs and scales, as the row's rank sees them."""

from epmoe.device import (ballot, device_fn, ffs, i32, load_i32, load_u32, popc, store_i32, store_u32,
                          store_u64, u32, u64, warp_broadcast_i32, warp_broadcast_u64)

from . import peers, routing

MINUS_ONE = 2**64 - 1


def _slots(shape, block):
    """Device functions (look(params, token, lane) -> (expert, prob) of slot `lane`, send(...)).

    send(expert, prob, mask, row, ids_at, probs_at, lane): a token's slots, as its ranks see them.
    """
    top_k, local, has_probs = shape.top_k, shape.n_local_experts, shape.has_probs
    (load_id, clean_id), p_probs = routing.token_ids(shape, block), block.index("probs")

    @device_fn
    def look(params, token, lane):
        seen, prob = load_id(params, token, lane), u32(0)
        if has_probs and lane < top_k:
            prob = u32(load_u32(params[p_probs] + u64(4) * (u64(token) * u64(top_k) + u64(lane))))
        return clean_id(seen, lane), prob

    @device_fn
    def send(expert, prob, mask, row, ids_at, probs_at, lane):
        owner, local_expert, left = i32(-1), u64(MINUS_ONE), u32(mask)
        if expert >= 0:
            owner, local_expert = i32(u32(expert) // u32(local)), u64(u32(expert) % u32(local))
        while left != u32(0):
            rank = i32(ffs(left) - 1)
            at = u64(warp_broadcast_i32(row, rank)) * u64(top_k) + u64(lane)
            to_ids, to_probs = u64(warp_broadcast_u64(ids_at, rank)), u64(warp_broadcast_u64(probs_at, rank))
            if lane < top_k:
                value, here = u64(MINUS_ONE), u32(0)
                if owner == rank:
                    value, here = u64(local_expert), prob
                store_u64(to_ids + u64(8) * at, value)
                if has_probs:
                    store_u32(to_probs + u64(4) * at, here)
            left = u32(left & u32(left - u32(1)))

    return look, send


def _send_experts(shape, block):
    """Device function (params, token, mask, row, slots_at, probs_at, masks_at, lane): a token's places by expert.

    For each rank of `mask`: a bit for each local expert that the token goes to, and for these experts, ascending, the
    token's place among the expert's rows, and its prob.
    """
    ranks, local, n_experts, has_probs = shape.n_ranks, shape.n_local_experts, shape.n_experts, shape.has_probs
    n_masks = expert_masks(local)
    p_slots, p_probs = block.index("slot_of"), block.index("probs")

    @device_fn
    def load_window(slots, probs, token, window, lane):
        """(place, prob) of an expert of a window of 32 of a rank; -1 for none."""
        rank = i32(u32(window) // u32(n_masks))
        expert, slot, prob = i32(32 * (window - rank * n_masks) + lane), i32(-1), u32(0)
        if expert < local and rank < ranks:
            src = u64(4) * (u64(token) * u64(n_experts) + u64(rank * local + expert))
            slot = i32(load_i32(slots + src))
            if has_probs:
                prob = u32(load_u32(probs + src))
        return slot, prob

    @device_fn
    def send_experts(params, token, mask, row, slots_at, probs_at, masks_at, lane):
        slots, probs = params[p_slots], params[p_probs]
        start, sent = i32(0), i32(0)
        while start < ranks * n_masks:          # four windows in flight
            a, b = load_window(slots, probs, token, start, lane), load_window(slots, probs, token, i32(start + 1), lane)
            c = load_window(slots, probs, token, i32(start + 2), lane)
            d = load_window(slots, probs, token, i32(start + 3), lane)
            n = i32(0)
            while n < 4 and start + n < ranks * n_masks:
                slot, prob = a
                if n == 1:
                    slot, prob = b
                if n == 2:
                    slot, prob = c
                if n == 3:
                    slot, prob = d
                rank = i32(u32(i32(start + n)) // u32(n_masks))
                number = i32(start + n - rank * n_masks)
                if number == 0:
                    sent = i32(0)
                at, here = u64(warp_broadcast_i32(row, rank)), u32(ballot(slot >= 0))
                to_slots = u64(warp_broadcast_u64(slots_at, rank)) + u64(4) * at * u64(local)
                to_probs = u64(warp_broadcast_u64(probs_at, rank)) + u64(4) * at * u64(local)
                to_masks = u64(warp_broadcast_u64(masks_at, rank)) + u64(4) * (at * u64(n_masks) + u64(number))
                place = u64(4) * u64(sent + popc(u32(here & u32(u32(u32(1) << u32(lane)) - u32(1)))))
                if slot >= 0:
                    store_i32(to_slots + place, slot)
                    if has_probs:
                        store_u32(to_probs + place, prob)
                if lane == 0 and u32(u32(mask >> u32(rank)) & u32(1)) != u32(0):
                    store_u32(to_masks, here)
                sent, n = i32(sent + popc(here)), i32(n + 1)
            start = i32(start + 4)

    return send_experts


def expert_masks(n_local_experts):
    """u32 words that hold a bit for each local expert."""
    return -(-n_local_experts // 32)


def exist(shape):
    """Whether a row has metadata."""
    return shape.has_meta or shape.scale_words > 0 and not shape.expert_major


def apart(shape):
    """1 if what goes with a row is a unit of work of its own, another warp's, behind those of its parts; 0 if not.

    It is not where it has to come with part 0, or where there is nothing.
    """
    return int((shape.has_meta or shape.scale_words > 0) and not shape.expands and not shape.encode)


def places(shape, block):
    """Device function (params, notes, lane) -> addresses of ids, probs, scales (masks) at rank `lane`; 0 for none."""
    place, ranks = peers.place_in(block, shape.n_ranks), shape.n_ranks
    has_ids, has_probs = shape.has_meta, shape.has_meta and shape.has_probs
    has_more = shape.scale_words > 0 or shape.expert_major

    @device_fn
    def at(params, notes, lane):
        ids_at, probs_at, scales_at = u64(0), u64(0), u64(0)
        if lane < ranks:
            if has_ids:
                ids_at = place(params, notes, i32(1), lane)
            if has_probs:
                probs_at = place(params, notes, i32(2), lane)
            if has_more:
                scales_at = place(params, notes, i32(3), lane)
        return ids_at, probs_at, scales_at

    return at


def make(shape, block):
    """Device functions (look, send) for one kernel, by a warp.

    look(params, token, lane) -> what can be seen of a token before the rows' places are known. send(params, token,
    seen, mask, row, at, lane): to the ranks of `mask`, where lane r has the row at rank r; at: of places().
    """
    has_meta, expert_major = shape.has_meta, shape.expert_major
    n_scales, p_scales = 0 if expert_major else shape.scale_words, block.index("scales")
    if has_meta and expert_major:
        send_experts = _send_experts(shape, block)
    elif has_meta:
        look_at_slots, send_slots = _slots(shape, block)

    @device_fn
    def send_scales(params, token, mask, row, scales_at, lane):
        src = params[p_scales] + u64(4) * u64(token) * u64(n_scales)
        left = u32(mask)
        while left != u32(0):
            rank = i32(ffs(left) - 1)
            to_row = u64(warp_broadcast_i32(row, rank)) * u64(n_scales)
            to = u64(warp_broadcast_u64(scales_at, rank)) + u64(4) * to_row
            i = i32(lane)
            while i < n_scales:
                store_u32(to + u64(4) * u64(i), load_u32(src + u64(4) * u64(i)))
                i = i32(i + 32)
            left = u32(left & u32(left - u32(1)))

    @device_fn
    def look(params, token, lane):
        seen = i32(-1), u32(0)
        if has_meta and not expert_major:
            seen = look_at_slots(params, token, lane)
        return seen

    @device_fn
    def send(params, token, seen, mask, row, at, lane):
        if has_meta and expert_major:
            send_experts(params, token, mask, row, at[0], at[1], at[2], lane)
        elif has_meta:
            send_slots(seen[0], seen[1], mask, row, at[0], at[1], lane)
        if n_scales > 0:
            send_scales(params, token, mask, row, at[2], lane)

    return look, send
