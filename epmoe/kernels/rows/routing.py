"""Which ranks a token goes to, out of its ids or out of its row of a routing map; a warp looks at a token."""

from types import SimpleNamespace

from epmoe.device import (ballot, block_dim, device_fn, i32, load_i32, load_u8, load_u64, shared_add_i32,
                          shfl_xor, st_relaxed_gpu_u64, store_i32, thread_idx, u32, u64)

from .. import ids
from . import control, waits

LARGEST = 2**31 - 1


def token_ids(shape, block):
    """Device functions (load_id(params, token, lane), clean_id(id, lane)) of slot `lane`; -1 past the last.

    A cleaned id is -1 where the slot has no expert, an id that is no expert's, or one that an earlier slot has.
    """
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
    def load_id(params, token, lane):
        value = i32(-1)
        if lane < top_k:
            at = u64(load_u64(params + u64(p_ids))) + u64(id_bytes) * (u64(token) * u64(top_k) + u64(lane))
            if id_bytes == 8:
                value = narrow(u64(load_u64(at)))
            else:
                value = i32(load_i32(at))
        return value

    @device_fn
    def clean_id(value, lane):
        return clean(value, i32(0), lane)

    return load_id, clean_id


def ranks_of_ids(shape, block):
    """Device functions (look(params, token, lane) -> what is seen of a token, mask_of(params, seen, token, lane)).

    and count(params, seen, token, lane, experts) -> mask. A mask has the token's ranks, and is the same in all lanes.
    count also adds the token's experts to a shared array, and bad ids to the status words.
    """
    load_id, clean_id = token_ids(shape, block)
    record = ids.make(SimpleNamespace(n_experts=shape.n_experts, top_k=shape.top_k)).record
    ranks, local = shape.n_ranks, shape.n_local_experts
    p_words = block.offset("words")

    @device_fn
    def ranks_of(expert):
        rank, mask, r = i32(-1), u32(0), i32(0)
        if expert >= 0:
            rank = i32(expert // local)
        while r < ranks:
            if u32(ballot(rank == r)) != u32(0):
                mask = u32(mask | (u32(1) << u32(r)))
            r = i32(r + 1)
        return mask

    @device_fn
    def mask_of(params, seen, token, lane):
        return ranks_of(clean_id(seen, lane))

    @device_fn
    def count(params, seen, token, lane, experts):
        expert = clean_id(seen, lane)
        if expert >= 0:
            shared_add_i32(experts, expert, i32(1))
        record(seen, expert, token, lane, u64(load_u64(params + u64(p_words))) + u64(control.STATUS))
        return ranks_of(expert)

    return load_id, mask_of, count


def mask_by_thread(shape, block):
    """Device function (params, token) -> the mask of the ranks of a token's ids, by one thread.

    Which of two equal ids counts makes no difference to the ranks.
    """
    top_k, id_bytes, n_experts, local = shape.top_k, shape.id_bytes, shape.n_experts, shape.n_local_experts
    p_ids = block.offset("ids")

    @device_fn
    def mask_of_token(params, token):
        at = u64(load_u64(params + u64(p_ids))) + u64(id_bytes * top_k) * u64(token)
        mask, k = u32(0), i32(0)
        while k < top_k:
            wide = u64(u64(LARGEST))
            if id_bytes == 8:
                wide = u64(load_u64(at + u64(8) * u64(k)))
            else:
                wide = u64(u32(load_i32(at + u64(4) * u64(k))))
            if wide < u64(n_experts):
                mask = u32(mask | u32(u32(1) << u32(i32(wide) // local)))
            k = i32(k + 1)
        return mask

    return mask_of_token


def ranks_of_map(shape, block):
    """The same for tokens of a routing map, whose experts are counted by map_columns."""
    n_experts, local = shape.n_experts, shape.n_local_experts
    p_map = block.offset("ids")

    @device_fn
    def look(params, token, lane):
        return i32(0)

    @device_fn
    def mask_of(params, seen, token, lane):
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

    @device_fn
    def count(params, seen, token, lane, experts):
        return mask_of(params, seen, token, lane)

    return look, mask_of, count


def groups_of_threads(shape):
    """How many threads share an expert's column of the map, each a run of the block's tokens."""
    return max(1, shape.threads // shape.n_experts)


def map_columns(shape, block):
    """Device functions over a block's tokens [first, end) of the routing map, one thread or several an expert.

    by_group: shared int32 array [groups, E]. count(params, first, end, by_group): the tokens of each expert by group.
    tell(columns, epoch, by_group), behind a barrier: tells the block's, and by_group becomes those of the groups
    before. number(params, first, end, by_group, before, at), behind another: writes slot_of[token, expert], the token's
    number among those that this rank sends to the expert, -1 where it is not routed; the block starts from
    before[at + expert].
    """
    n_experts, groups = shape.n_experts, groups_of_threads(shape)
    p_map, p_slots = block.offset("ids"), block.offset("slot_of")

    @device_fn
    def tokens_of_group(first, end, group):
        a_group = i32((end - first + groups - 1) // groups)
        start = i32(min(i32(first + group * a_group), end))
        return start, i32(min(i32(start + a_group), end))

    @device_fn
    def routed(base, token, end, expert):
        """1 if the token is one of the group's and goes to the expert."""
        value = i32(0)
        if token < end:
            value = i32(load_u8(base + u64(token) * u64(n_experts) + u64(expert)))
        if value != 0:
            value = i32(1)
        return value

    @device_fn
    def count(params, first, end, by_group):
        base, i = u64(load_u64(params + u64(p_map))), i32(thread_idx())
        while i < groups * n_experts:
            expert, n = i32(i % n_experts), i32(0)
            token, stop = tokens_of_group(first, end, i32(i // n_experts))
            while token < stop:                 # four loads in flight
                a, b = routed(base, token, stop, expert), routed(base, i32(token + 1), stop, expert)
                c, d = routed(base, i32(token + 2), stop, expert), routed(base, i32(token + 3), stop, expert)
                n = i32(n + a + b + c + d)
                token = i32(token + 4)
            by_group[i] = n
            i = i32(i + block_dim())

    @device_fn
    def tell(columns, epoch, by_group):
        expert = i32(thread_idx())
        while expert < n_experts:
            total, group = i32(0), i32(0)
            while group < groups:
                here = i32(by_group[group * n_experts + expert])
                by_group[group * n_experts + expert] = total
                total, group = i32(total + here), i32(group + 1)
            st_relaxed_gpu_u64(columns + u64(8) * u64(expert), waits.told(epoch, total))
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
    def number(params, first, end, by_group, before, at):
        base, slots = u64(load_u64(params + u64(p_map))), u64(load_u64(params + u64(p_slots)))
        i = i32(thread_idx())
        while i < groups * n_experts:
            expert = i32(i % n_experts)
            n = i32(before[at + expert] + by_group[i])
            token, stop = tokens_of_group(first, end, i32(i // n_experts))
            while token < stop:                 # four loads in flight
                a, b = routed(base, token, stop, expert), routed(base, i32(token + 1), stop, expert)
                c, d = routed(base, i32(token + 2), stop, expert), routed(base, i32(token + 3), stop, expert)
                n = store_slot(slots, token, stop, expert, a, n)
                n = store_slot(slots, i32(token + 1), stop, expert, b, n)
                n = store_slot(slots, i32(token + 2), stop, expert, c, n)
                n = store_slot(slots, i32(token + 3), stop, expert, d, n)
                token = i32(token + 4)
            i = i32(i + block_dim())

    return count, tell, number
