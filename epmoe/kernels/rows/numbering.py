"""Numbers a block's tokens among those that its rank sends to a rank: counts by warp, then assigns numbers in order.

A warp has a run of the block's tokens. by_thread: tokens with ids, one thread for each; by_warp: tokens of a routing
map, one warp for each.
"""

from epmoe.device import (ballot, device_fn, i32, lane_id, n_warps, popc, shfl_idx, store_i32, u32, u64,
                          warp_id)

from . import routing


def _runs(unit):
    """Device function (first, end) -> [start, stop) of the tokens of this warp, whole units of them where it can be."""
    @device_fn
    def tokens_of_warp(first, end):
        units = u32(u32(i32(end - first + unit - 1)) // u32(unit))
        a_warp = i32(u32(i32(i32(units) + n_warps() - 1)) // u32(n_warps())) * unit
        start = i32(min(i32(first + warp_id() * a_warp), end))
        return start, i32(min(i32(start + a_warp), end))

    return tokens_of_warp


def _of_warps(ranks):
    """Device functions over by_warp [warp, rank]: keep(by_warp, seen), begin(by_warp, before) -> first number.

    A warp's, in lane r of the tokens for rank r.
    """
    @device_fn
    def keep(by_warp, seen):
        if lane_id() < ranks:
            by_warp[warp_id() * ranks + lane_id()] = seen

    @device_fn
    def begin(by_warp, before):
        number = i32(0)
        if lane_id() < ranks:
            number = i32(before[lane_id()] + by_warp[warp_id() * ranks + lane_id()])
        return number

    return keep, begin


@device_fn
def go_to(mask, rank):
    """The lanes whose tokens go to the rank; mask: of the ranks of the lane's token."""
    return u32(ballot(u32(u32(mask >> u32(rank)) & u32(1)) != u32(0)))


def by_thread(shape, block):
    """Device functions (count, number) over a block's tokens [first, end).

    count(ids, first, end, by_warp): by_warp [warp, rank], the warp's tokens for a rank; ids: their address.
    number(params, ids, first, end, by_warp, before): writes row_of; by_warp holds those of the warps before,
    before[rank] those of the blocks before.
    """
    ranks, mask_of_token, tokens_of_warp = shape.n_ranks, routing.mask_by_thread(shape), _runs(32)
    (keep, begin), p_rows = _of_warps(ranks), block.index("row_of")

    @device_fn
    def mask_before(ids, token, stop):
        mask = u32(0)
        if token < stop:
            mask = u32(mask_of_token(ids, token))
        return mask

    @device_fn
    def count(ids, first, end, by_warp):
        lane, seen = i32(lane_id()), i32(0)
        token, stop = tokens_of_warp(first, end)
        while token < stop:
            mask, rank = mask_before(ids, i32(token + lane), stop), i32(0)
            while rank < ranks:
                n = i32(popc(go_to(mask, rank)))
                if lane == rank:
                    seen = i32(seen + n)
                rank = i32(rank + 1)
            token = i32(token + 32)
        keep(by_warp, seen)

    @device_fn
    def number(params, ids, first, end, by_warp, before):
        lane, next_row, rows = i32(lane_id()), begin(by_warp, before), params[p_rows]
        token, stop = tokens_of_warp(first, end)
        while token < stop:
            mask, rank = mask_before(ids, i32(token + lane), stop), i32(0)
            while rank < ranks:
                go, row = go_to(mask, rank), i32(-1)
                start = i32(shfl_idx(next_row, rank))
                if u32(go >> u32(lane)) & u32(1) != u32(0):
                    row = i32(start + popc(u32(go & u32(u32(u32(1) << u32(lane)) - u32(1)))))
                if token + lane < stop:
                    store_i32(rows + u64(4) * u64(i32(token + lane) * ranks + rank), row)
                if lane == rank:
                    next_row = i32(next_row + popc(go))
                rank = i32(rank + 1)
            token = i32(token + 32)

    return count, number


def totals(shape):
    """Device function (ids, num_tokens) -> in lane r the tokens for rank r of all tokens, few of them, by one warp."""
    if shape.expert_major:
        return _nothing
    ranks, mask_of_token = shape.n_ranks, routing.mask_by_thread(shape)

    @device_fn
    def mask_at(ids, token, num_tokens):
        mask = u32(mask_of_token(ids, i32(max(0, min(token, i32(num_tokens - 1))))))
        if token >= num_tokens:
            mask = u32(0)
        return mask

    @device_fn
    def of_rank(mask, rank):
        return i32(popc(go_to(mask, rank)))

    @device_fn
    def total(ids, num_tokens):
        lane, mine, first = i32(lane_id()), i32(0), i32(0)
        while first < num_tokens:               # four tokens of a lane in flight
            a, b = mask_at(ids, i32(first + lane), num_tokens), mask_at(ids, i32(first + 32 + lane), num_tokens)
            c, d = mask_at(ids, i32(first + 64 + lane), num_tokens), mask_at(ids, i32(first + 96 + lane), num_tokens)
            rank = i32(0)
            while rank < ranks:
                n = i32(of_rank(a, rank) + of_rank(b, rank) + of_rank(c, rank) + of_rank(d, rank))
                if lane == rank:
                    mine = i32(mine + n)
                rank = i32(rank + 1)
            first = i32(first + 128)
        return mine

    return total


@device_fn
def _nothing(ids, num_tokens):
    return i32(0)


def by_warp(shape, block):
    """The same for tokens of a routing map."""
    ranks, mask_of, tokens_of_warp = shape.n_ranks, routing.mask_of_map(shape), _runs(1)
    (keep, begin), p_rows = _of_warps(ranks), block.index("row_of")

    @device_fn
    def count(ids, first, end, by_warp):
        lane, seen = i32(lane_id()), i32(0)
        token, stop = tokens_of_warp(first, end)
        while token < stop:
            seen = i32(seen + i32(u32(u32(mask_of(ids, token, lane)) >> u32(lane)) & u32(1)))
            token = i32(token + 1)
        keep(by_warp, seen)

    @device_fn
    def number(params, ids, first, end, by_warp, before):
        lane, next_row, rows = i32(lane_id()), begin(by_warp, before), params[p_rows]
        token, stop = tokens_of_warp(first, end)
        while token < stop:
            mask, row = u32(mask_of(ids, token, lane)), i32(-1)
            if lane < ranks:
                if u32(mask >> u32(lane)) & u32(1) != u32(0):
                    row, next_row = next_row, i32(next_row + 1)
                store_i32(rows + u64(4) * u64(token * ranks + lane), row)
            token = i32(token + 1)

    return count, number
