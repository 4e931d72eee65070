"""Bits of masks, shares of work (what a number stands for), sums over a block, and loads in flight together."""

from epmoe.device import (block_idx, device_fn, ffs, grid_dim, i32, lane_id, n_warps, shfl_idx, shfl_xor, syncthreads,
                          u32, warp_id, warp_inclusive_sum_i32)


def four(look, n=4):
    """Device function (given, i, step) -> look(given, j) for j = i, i + step, ...: four (or 1), all issued at once."""
    if n == 1:
        return device_fn(lambda given, i, step: (look(given, i32(i)),))
    return device_fn(lambda given, i, step: (look(given, i32(i)), look(given, i32(i + step)),
                                             look(given, i32(i + 2 * step)), look(given, i32(i + 3 * step))))


def adding_four(add, n=4):
    """Device function (total, given, i, step, items) -> total with four items (or 1) in turn; add as of folded()."""
    if n == 1:
        return device_fn(lambda total, given, i, step, items: add(total, given, i32(i), items[0]))

    @device_fn
    def add_four(total, given, i, step, items):
        total = add(total, given, i32(i), items[0])
        total = add(total, given, i32(i + step), items[1])
        total = add(total, given, i32(i + 2 * step), items[2])
        return add(total, given, i32(i + 3 * step), items[3])

    return add_four


def in_fours(look, add):
    """Device function (total, given, i, step, end) -> total with items i, i + step, ... before `end`, as in folded().

    It looks at four together, and adds all four, even past the end.
    """
    look_at_four, add_four = four(look), adding_four(add)

    @device_fn
    def over_all(total, given, i, step, end):
        while i < end:
            total = add_four(total, given, i, step, look_at_four(given, i, step))
            i = i32(i + 4 * step)
        return total

    return over_all


def each_of_four(fn):
    """Device function (items, given) -> fn(item, given) of four items."""
    return device_fn(lambda items, given: (fn(items[0], given), fn(items[1], given),
                                           fn(items[2], given), fn(items[3], given)))


def any_of_four(fn):
    """Device function (items, given) -> whether fn(item, given) for any of four items."""
    return device_fn(lambda items, given: fn(items[0], given) or fn(items[1], given)
                     or fn(items[2], given) or fn(items[3], given))


def folded(n, look, add):
    """Device function (given, total) -> total, with n items added; all are looked at before the first is added.

    look(given, i) -> item i, without waiting for the load. add(total, given, i, item) -> total with it. given: a tuple.
    """
    if n == 0:
        return device_fn(lambda given, total: total)
    last = 1 if n % 4 else 4
    i = n - last
    fold_rest, look_at_last, add_last = folded(i, look, add), four(look, last), adding_four(add, last)

    @device_fn
    def fold(given, total):
        items = look_at_last(given, i32(i), 1)
        return add_last(fold_rest(given, total), given, i32(i), 1, items)

    return fold


@device_fn
def has(mask, i):
    """Whether bit i of the mask is set."""
    return u32(u32(mask) >> u32(i)) & u32(1) != u32(0)


@device_fn
def below(i):
    """The bits before bit i."""
    return u32(u32(u32(1) << u32(i)) - u32(1))


@device_fn
def lowest(mask):
    """The number of a mask's lowest bit, -1 for 0."""
    return i32(ffs(mask) - 1)


@device_fn
def but_lowest(mask):
    """The mask without its lowest bit."""
    return u32(mask & u32(mask - u32(1)))


def over_lanes(combine, n_lanes):
    """Device function (n) -> combine(a, b) over the n of n_lanes adjacent lanes, a power of two, in every lane."""
    @device_fn
    def combined(n):
        distance = n_lanes // 2
        while distance > 0:
            n, distance = combine(n, shfl_xor(n, distance)), distance // 2
        return n

    return combined


@device_fn
def divided(a, b):
    """a // b for int32 a >= 0 and b > 0. It divides unsigned words, as // of int32 would divide 64-bit ones."""
    return i32(u32(a) // u32(b))


@device_fn
def split(unit, n):
    """(unit // n, unit % n), with the same requirements as divided."""
    whole = divided(unit, n)
    return whole, i32(unit - whole * n)


@device_fn
def divided_up(a, b):
    """a // b rounded up, with the same requirements as divided."""
    return divided(i32(a + b - 1), b)


@device_fn
def parts_of_each(n, workers, most):
    """Number of parts of each of n things, from 1 to `most`, so that every worker has at most one part."""
    return i32(max(1, min(most, divided(workers, i32(max(1, n))))))


@device_fn
def share(first, end, size, i):
    """[start, stop) of the i-th run, if [first, end) is divided into runs of `size`; empty past the last run."""
    start = i32(min(i32(first + i * size), end))
    return start, i32(min(i32(start + size), end))


@device_fn
def around(rank, ranks):
    """rank modulo ranks, for 0 <= rank < 2 * ranks."""
    return i32(rank - ranks) if rank >= ranks else i32(rank)


@device_fn
def warps_of_rank():
    """(number of this warp among those of all blocks but the leader block, their number). Blocks take turns."""
    blocks = i32(grid_dim() - 1)
    return i32(warp_id() * blocks + block_idx()), i32(n_warps() * blocks)


@device_fn
def block_sums(value, partial):
    """(sum over the block's lower threads, sum over all) of int32; has barriers. partial: shared int32 [32]."""
    lane, warp = lane_id(), warp_id()
    inclusive = i32(warp_inclusive_sum_i32(value))
    syncthreads()                               # all have read `partial` of the earlier call
    if lane == 31:
        partial[warp] = inclusive
    syncthreads()
    up_to = i32(warp_inclusive_sum_i32(i32(partial[lane]) if lane < n_warps() else i32(0)))
    before, total = i32(shfl_idx(up_to, i32((warp + 31) & 31))), i32(shfl_idx(up_to, i32(31)))
    if warp == 0:
        before = i32(0)
    return i32(before + inclusive - value), total
