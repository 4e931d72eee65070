"""The numbers of the rows that a rank with few tokens sends: among those for a rank, in the order of tokens."""

from epmoe.device import (block_dim, device_fn, i32, lane_id, load_i32, n_warps, popc, store_i32, thread_idx, u32, u64,
                          warp_id)

from ..bits import below, has, lanes_for
from ..shape import p


def numbering(shape, mask_of_token):
    """Device functions of a block over numbers [token, rank], a shared array: of a token's row for a rank, -1 for none.

    mask_of_token(known, token): of the ranks of a token. number(call, known, numbers, totals): of all tokens, a warp a
    rank; totals[rank]: how many rows there are. record(call, numbers, tokens): of tokens [first, end) for the handle.
    """
    ranks = shape.n_ranks

    @device_fn
    def mask_at(call, known, token):
        mask = u32(mask_of_token(known, i32(min(token, i32(call.num_tokens - 1)))))
        if token >= call.num_tokens:
            mask = u32(0)
        return mask

    @device_fn
    def number_lanes(call, numbers, rank, token, mask, total):
        """A token a lane; total: rows of the tokens before. The total with these."""
        goes, row = lanes_for(mask, rank), i32(-1)
        if has(mask, rank):
            row = i32(total + popc(u32(goes & below(i32(lane_id())))))
        if token < call.num_tokens:
            numbers[token * ranks + rank] = row
        return i32(total + popc(goes))

    @device_fn
    def number(call, known, numbers, totals):
        token, rank = i32(lane_id()), i32(warp_id())
        while rank < ranks:
            total = i32(0)
            if call.num_tokens > 0:             # four tokens of a lane in flight: these are all
                a, b = mask_at(call, known, token), mask_at(call, known, i32(token + 32))
                c, d = mask_at(call, known, i32(token + 64)), mask_at(call, known, i32(token + 96))
                total = number_lanes(call, numbers, rank, token, a, total)
                total = number_lanes(call, numbers, rank, i32(token + 32), b, total)
                total = number_lanes(call, numbers, rank, i32(token + 64), c, total)
                total = number_lanes(call, numbers, rank, i32(token + 96), d, total)
            if token == 0:
                totals[rank] = total
            rank = i32(rank + n_warps())

    @device_fn
    def record(call, numbers, tokens):
        i = i32(tokens[0] * ranks + thread_idx())
        while i < tokens[1] * ranks:
            store_i32(call.params[p.row_of] + u64(4) * u64(i), i32(numbers[i]))
            i = i32(i + block_dim())

    return number, record


def in_array(ranks):
    """Device function (numbers, token, lane) -> number of the token's row among those for rank `lane`, -1 for none."""
    @device_fn
    def number(numbers, token, lane):
        row = i32(-1)
        if lane < ranks:
            row = i32(numbers[token * ranks + lane])
        return row

    return number


def in_handle(ranks):
    """The same of row_of, the address of a handle's array."""
    @device_fn
    def number(row_of, token, lane):
        row = i32(-1)
        if lane < ranks:
            row = i32(load_i32(u64(row_of) + u64(4) * u64(token * ranks + lane)))
        return row

    return number
