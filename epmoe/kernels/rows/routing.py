"""Which ranks a token goes to, out of its ids or out of its row of a routing map; a warp looks at a token."""

from types import SimpleNamespace

from epmoe.device import (ballot, block_dim, block_idx, device_fn, grid_dim, i32, load_i32, load_u8, load_u64,
                          red_add_relaxed_gpu_i32, shfl_xor, store_i32, thread_idx, u32, u64)

from .. import ids
from . import control

LARGEST = 2**31 - 1


def token_ids(shape, block):
    """Device function (params, token, lane): (id as it stands there, cleaned id) of slot `lane`; -1 past the last."""
    top_k, id_bytes = shape.top_k, shape.id_bytes
    clean = ids.make(SimpleNamespace(n_experts=shape.n_experts, top_k=top_k)).clean
    p_ids = block.offset("ids")

    @device_fn
    def narrow(wide):
        """int64, as its bits, to int32; what does not fit becomes the nearest that does."""
        value = i32(LARGEST)
        if wide < u64(2**31) or wide >= u64(2**64 - 2**31):
            value = i32(wide)
        elif wide >= u64(2**63):
            value = i32(-LARGEST)
        return value

    @device_fn
    def of_token(params, token, lane):
        value = i32(-1)
        if lane < top_k:
            at = u64(load_u64(params + u64(p_ids))) + u64(id_bytes) * (u64(token) * u64(top_k) + u64(lane))
            if id_bytes == 8:
                value = narrow(u64(load_u64(at)))
            else:
                value = i32(load_i32(at))
        return value, clean(value, i32(0), lane)

    return of_token


def ranks_of_ids(shape, block):
    """Device function (params, token, lane, counting) -> mask of the token's ranks, the same in all lanes.

    counting: also adds the token's experts to `totals`, and records bad ids in the status words.
    """
    of_token = token_ids(shape, block)
    record = ids.make(SimpleNamespace(n_experts=shape.n_experts, top_k=shape.top_k)).record
    ranks, local = shape.n_ranks, shape.n_local_experts
    p_totals, p_words = block.offset("totals"), block.offset("words")

    @device_fn
    def mask_of(params, token, lane, counting):
        value, expert = of_token(params, token, lane)
        rank = i32(-1)
        if expert >= 0:
            rank = i32(expert // local)
        if counting:
            if expert >= 0:
                red_add_relaxed_gpu_i32(u64(load_u64(params + u64(p_totals))) + u64(4) * u64(ranks + expert), i32(1))
            record(value, expert, token, lane, u64(load_u64(params + u64(p_words))) + u64(control.STATUS))
        mask, r = u32(0), i32(0)
        while r < ranks:
            if u32(ballot(rank == r)) != u32(0):
                mask = u32(mask | (u32(1) << u32(r)))
            r = i32(r + 1)
        return mask

    return mask_of


def ranks_of_map(shape, block):
    """Device function (params, token, lane, counting) -> mask of the token's ranks, the same in all lanes."""
    n_experts, local = shape.n_experts, shape.n_local_experts
    p_map = block.offset("ids")

    @device_fn
    def mask_of(params, token, lane, counting):
        row = u64(load_u64(params + u64(p_map))) + u64(token) * u64(n_experts)
        mask, expert = u32(0), i32(lane)
        while expert < n_experts:
            if load_u8(row + u64(expert)) != 0:
                mask = u32(mask | (u32(1) << u32(expert // local)))
            expert = i32(expert + 32)
        mask = u32(mask | u32(shfl_xor(mask, 16)))
        mask = u32(mask | u32(shfl_xor(mask, 8)))
        mask = u32(mask | u32(shfl_xor(mask, 4)))
        mask = u32(mask | u32(shfl_xor(mask, 2)))
        return u32(mask | u32(shfl_xor(mask, 1)))

    return mask_of


def map_columns(shape, block):
    """Device functions over a block's tokens [first, end) of the routing map, a thread an expert.

    count(params, first, end): writes the tokens of each expert to this block's place in `columns`.
    number(params, first, end): writes slot_of[token, expert], the token's number among those that this rank sends to
    the expert, -1 where it is not routed; starts from `before`.
    """
    n_experts, ranks = shape.n_experts, shape.n_ranks
    p_map, p_columns, p_before, p_slots = (block.offset(n) for n in ("ids", "columns", "before", "slot_of"))

    @device_fn
    def routed(base, token, end, expert):
        """1 if the token is one of the block's and goes to the expert."""
        value = i32(0)
        if token < end:
            value = i32(load_u8(base + u64(token) * u64(n_experts) + u64(expert)))
        if value != 0:
            value = i32(1)
        return value

    @device_fn
    def count(params, first, end):
        base, expert = u64(load_u64(params + u64(p_map))), i32(thread_idx())
        columns = u64(load_u64(params + u64(p_columns)))
        while expert < n_experts:
            n, token = i32(0), i32(first)
            while token < end:                  # four loads in flight
                a, b = routed(base, token, end, expert), routed(base, i32(token + 1), end, expert)
                c, d = routed(base, i32(token + 2), end, expert), routed(base, i32(token + 3), end, expert)
                n = i32(n + a + b + c + d)
                token = i32(token + 4)
            store_i32(columns + u64(4) * u64((ranks + expert) * grid_dim() + block_idx()), n)
            expert = i32(expert + block_dim())

    @device_fn
    def store_slot(slots, token, end, expert, is_routed, n):
        """Writes a token's slot, n if it is routed; gives the next token's number."""
        slot = i32(-1)
        if is_routed != 0:
            slot = i32(n)
        if token < end:
            store_i32(slots + u64(4) * (u64(token) * u64(n_experts) + u64(expert)), slot)
        return i32(n + is_routed)

    @device_fn
    def number(params, first, end):
        base, slots = u64(load_u64(params + u64(p_map))), u64(load_u64(params + u64(p_slots)))
        before, expert = u64(load_u64(params + u64(p_before))), i32(thread_idx())
        while expert < n_experts:
            n, token = i32(load_i32(before + u64(4) * u64(block_idx() * n_experts + expert))), i32(first)
            while token < end:                  # four loads in flight
                a, b = routed(base, token, end, expert), routed(base, i32(token + 1), end, expert)
                c, d = routed(base, i32(token + 2), end, expert), routed(base, i32(token + 3), end, expert)
                n = store_slot(slots, token, end, expert, a, n)
                n = store_slot(slots, i32(token + 1), end, expert, b, n)
                n = store_slot(slots, i32(token + 2), end, expert, c, n)
                n = store_slot(slots, i32(token + 3), end, expert, d, n)
                token = i32(token + 4)
            expert = i32(expert + block_dim())

    return count, number
