"""The ranks and experts of a token, from its ids or from its row of a routing map [T, E]."""

from epmoe.device import (device_fn, i32, lane_id, load_i32, load_u8, load_u64, n_warps, shared_add_i32, store_i32, u32,
                          u64, warp_id)

from .. import ids as ids_of_tokens
from ..bits import divided_up, folded, in_fours, share, split
from ..params import by_threads, word_in
from ..prefetch import LINE, fetch_lines
from .shape import namespace, p
from .wait import status_of


def experts_of_ids(shape):
    """Device function (params, ids, first, end, experts) -> whether this thread met a bad id.

    All warps add the number of tokens of each expert, among tokens [first, end), to the shared array `experts`, and bad
    ids to the status words. A lane reads one k of a token, a warp several tokens.
    """
    top_k, a_warp = shape.top_k, 32 // max(shape.top_k, 1)
    of_ids = ids_of_tokens.make(shape.num_experts, top_k, shape.id_bytes)
    load, clean, record = of_ids.load, of_ids.clean, of_ids.record

    @device_fn
    def count(params, ids, first, end, experts):
        status, lane = status_of(params), i32(lane_id())
        step, (group, k) = i32(n_warps() * a_warp), split(lane, top_k)
        start, is_bad = i32(first + warp_id() * a_warp), False
        while start < end:
            token = i32(start + group)
            seen = load(ids, token, k) if group < a_warp and token < end else i32(-1)
            expert = clean(seen, group, lane)
            if expert >= 0:
                shared_add_i32(experts, expert, i32(1))
            record(seen, expert, token, k, status)
            start, is_bad = i32(start + step), is_bad or seen != expert and seen != ids_of_tokens.NO_EXPERT
        return is_bad

    return count


def mask_by_thread(shape):
    """Device function (ids, token) -> the mask of the ranks of a token's ids, by one thread. ids: their address.

    If two ids are equal it does not matter which one counts: both have the same rank.
    """
    id_bytes, num_experts, n_local = shape.id_bytes, shape.num_experts, shape.num_local_experts
    token_bytes = id_bytes * shape.top_k

    @device_fn
    def look(given, k):
        at = given[0] + u64(id_bytes) * u64(k)
        return u64(load_u64(at)) if id_bytes == 8 else u64(u32(load_i32(at)))

    @device_fn
    def add(mask, given, k, wide):
        return u32(mask | u32(u32(1) << u32(u32(wide) // u32(n_local)))) if wide < u64(num_experts) else mask

    add_choices = folded(shape.top_k, look, add)

    return device_fn(lambda ids, token: u32(add_choices((u64(u64(ids) + u64(token_bytes) * u64(token)),), u32(0))))


def ranks_of_token(shape):
    """Device function (routing_map, token, lane) -> this lane's part of the mask of a token's ranks, by a warp.

    warp_or_u32 of the parts is the mask. All loads are issued together; only warp_or_u32 waits for them.
    """
    num_experts, n_local = shape.num_experts, shape.num_local_experts

    expert_of = device_fn(lambda lane, window: i32(min(i32(32 * window + lane), num_experts - 1)))
    look_at = device_fn(lambda given, window: load_u8(given[0] + u64(expert_of(given[1], window))))

    @device_fn
    def add(mask, given, window, value):
        rank = u32(expert_of(given[1], window)) // u32(n_local)
        return u32(mask | u32(u32(1) << u32(rank))) if value != 0 else mask

    add_windows = folded(-(-num_experts // 32), look_at, add)

    @device_fn
    def look(routing_map, token, lane):
        row = u64(u64(routing_map) + u64(token) * u64(num_experts))
        return u32(add_windows((row, i32(lane)), u32(0)))

    return look


def bits_of_tokens(n, num_experts):
    """Device function (at, last) -> an expert's bits of n tokens, from address `at` of the map; issues all loads first.

    Bits of tokens after `last` are not cleared.
    """
    look = device_fn(lambda given, token: load_u8(given[0] + u64(num_experts) * u64(min(token, given[1]))))
    add = device_fn(lambda mask, given, token, value: u32(mask | u32(u32(1) << u32(token))) if value != 0 else mask)

    add_tokens = folded(n, look, add)
    return device_fn(lambda at, last: u32(add_tokens((u64(at), i32(last)), u32(0))))


def groups_of_threads(shape):
    """How many threads share an expert's column of the map; each reads a run of the block's tokens."""
    return max(1, shape.threads // shape.num_experts)


def map_columns(shape):
    """Device functions over a block's tokens [first, end) of the routing map, one thread or several an expert.

    experts: shared int32 array of n = groups * E. fetch(params, first, end): prefetches the block's part of the map.
    count(n, params, first, end, experts): counts tokens by group and expert. add_groups(experts, expert), after a
    barrier -> the block's count; `experts` becomes sums over earlier groups. number(n, params, first, end, experts,
    totals, at), after another: writes row_of_expert[token, expert], the token's number among the expert's, -1 for none.
    The block starts from totals[at + expert].
    """
    num_experts, groups = shape.num_experts, groups_of_threads(shape)

    tokens_of_group = device_fn(lambda first, end, group: share(first, end, divided_up(i32(end - first), groups), group))

    @device_fn
    def fetch(params, first, end):
        n_bytes = i32((end - first) * num_experts)
        fetch_lines(divided_up(n_bytes, i32(LINE)), params[p.ids] + u64(first) * u64(num_experts))

    @device_fn
    def routed(given, token):
        """1 if the token is one of the group's and goes to the expert, else 0. given: (params, end, expert)."""
        params, end, expert = given
        value = i32(load_u8(params[p.ids] + u64(token) * u64(num_experts) + u64(expert))) if token < end else i32(0)
        return i32(1) if value != 0 else i32(0)

    count_routed = in_fours(routed, device_fn(lambda n, given, token, is_routed: i32(n + is_routed)))

    @by_threads
    def count_group(i, params, first, end, experts):
        group, expert = split(i, num_experts)
        token, stop = tokens_of_group(first, end, group)
        experts[i] = count_routed(i32(0), (params, stop, expert), token, 1, stop)

    @device_fn
    def add_groups(experts, expert):
        total, group = i32(0), i32(0)
        while group < groups:
            n = i32(experts[group * num_experts + expert])
            experts[group * num_experts + expert] = total
            total, group = i32(total + n), i32(group + 1)
        return total

    @device_fn
    def store_number(n, given, token, is_routed):
        """Writes a token's number: n if it is routed, else -1. Returns the next token's number."""
        params, end, expert = given
        if token < end:
            store_i32(word_in(params[p.row_of_expert], token, num_experts, expert), i32(n) if is_routed != 0 else i32(-1))
        return i32(n + is_routed)

    store_numbers = in_fours(routed, store_number)

    @by_threads
    def number_group(i, params, first, end, experts, totals, at):
        group, expert = split(i, num_experts)
        token, stop = tokens_of_group(first, end, group)
        store_numbers(i32(totals[at + expert] + experts[i]), (params, stop, expert), token, 1, stop)

    return namespace("columns", n=groups * num_experts, fetch=fetch, count=count_group, add_groups=add_groups,
                     number=number_group)
