"""Which ranks a token goes to, out of its ids or out of its row of a routing map; a warp looks at a token."""

from types import SimpleNamespace

from epmoe.device import (ballot, block_dim, device_fn, i32, lane_id, load_i32, load_u8, load_u64, n_warps,
                          shared_add_i32, shfl_xor, st_relaxed_gpu_u64, store_i32, thread_idx, u32, u64, warp_id)

from .. import ids
from . import control, waits

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

    counting: also records bad ids in the status words.
    """
    of_token = token_ids(shape, block)
    record = ids.make(SimpleNamespace(n_experts=shape.n_experts, top_k=shape.top_k)).record
    ranks, local = shape.n_ranks, shape.n_local_experts
    p_words = block.offset("words")

    @device_fn
    def mask_of(params, token, lane, counting):
        value, expert = of_token(params, token, lane)
        rank = i32(-1)
        if expert >= 0:
            rank = i32(expert // local)
        if counting:
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


def count_ids(shape, block):
    """Device function count(params, num_tokens, counts): a block adds all tokens' experts to a shared array.

    A warp takes a token, four at a time, so that their loads are in flight together.
    """
    of_token = token_ids(shape, block)

    @device_fn
    def add(expert, counts):
        if expert >= 0:
            shared_add_i32(counts, expert, i32(1))

    @device_fn
    def count(params, num_tokens, counts):
        lane, token, step = i32(lane_id()), i32(4 * warp_id()), i32(4 * n_warps())
        while token < num_tokens:
            last = i32(num_tokens - 1)
            _, a = of_token(params, token, lane)
            _, b = of_token(params, i32(min(i32(token + 1), last)), lane)
            _, c = of_token(params, i32(min(i32(token + 2), last)), lane)
            _, d = of_token(params, i32(min(i32(token + 3), last)), lane)
            add(a, counts)
            if token + 1 < num_tokens:
                add(b, counts)
            if token + 2 < num_tokens:
                add(c, counts)
            if token + 3 < num_tokens:
                add(d, counts)
            token = i32(token + step)

    return count


def map_columns(shape, block):
    """Device functions over a block's tokens [first, end) of the routing map, a thread an expert.

    count(params, first, end, columns, epoch): tells the tokens of each expert in the words at `columns`.
    number(params, first, end, before, at): writes slot_of[token, expert], the token's number among those that this rank
    sends to the expert, -1 where it is not routed; it starts from before[at + expert].
    """
    n_experts = shape.n_experts
    p_map, p_slots = block.offset("ids"), block.offset("slot_of")

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
    def count(params, first, end, columns, epoch):
        base, expert = u64(load_u64(params + u64(p_map))), i32(thread_idx())
        while expert < n_experts:
            n, token = i32(0), i32(first)
            while token < end:                  # four loads in flight
                a, b = routed(base, token, end, expert), routed(base, i32(token + 1), end, expert)
                c, d = routed(base, i32(token + 2), end, expert), routed(base, i32(token + 3), end, expert)
                n = i32(n + a + b + c + d)
                token = i32(token + 4)
            st_relaxed_gpu_u64(columns + u64(8) * u64(expert), waits.told(epoch, n))
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
    def number(params, first, end, before, at):
        base, slots = u64(load_u64(params + u64(p_map))), u64(load_u64(params + u64(p_slots)))
        expert = i32(thread_idx())
        while expert < n_experts:
            n, token = i32(before[at + expert]), i32(first)
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
