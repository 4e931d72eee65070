"""Lane r's knowledge of rank r: the addresses of its arrays, and which of their rows are this rank's.

All of it comes from the notes of a call, a shared array: the row counts [src_rank, dst_rank] in them are known to all
ranks.
"""

from epmoe.device import all_lanes, device_fn, i32, lane_id, shfl_up, u32, u64, warp_inclusive_sum_i32

from ..params import in_context
from . import control


@device_fn
def of_lane_before(n):
    """The value of the previous lane, 0 in lane 0."""
    before = i32(shfl_up(n, 1))
    if lane_id() == 0:
        before = i32(0)
    return before


def place_in(block, n_ranks):
    """Device function (params, notes, index, rank): address of array `index` that the rank announced in its note."""
    pool_of, n_words = in_context(block, "pool_ptrs"), control.experts_at(n_ranks)

    @device_fn
    def place(params, notes, index, rank):
        offset = u64(control.PLACE_BYTES) * u64(u32(notes[rank * n_words + control.PLACES + index]))
        return u64(pool_of(params, rank) + offset)

    return place


def room(n_ranks):
    """Device function has_room(notes) -> whether every rank has room; if one has none, no rank sends anything.

    All see the same counts and capacities.
    """
    n_words = control.experts_at(n_ranks)
    _, arriving, _, _, _ = sums(n_ranks)

    @device_fn
    def has_room(notes):
        lane, rows, capacity = i32(lane_id()), arriving(notes, i32(0)), i32(0)
        if lane < n_ranks:
            capacity = i32(notes[lane * n_words + control.CAPACITY])
        return all_lanes(rows <= capacity) != 0

    return has_room


def most_tokens(n_ranks):
    """Device function (notes) -> tokens of the rank that has most, as all have told."""
    n_words = control.experts_at(n_ranks)

    @device_fn
    def most(notes):
        n, rank = i32(0), i32(0)
        while rank < n_ranks:
            n, rank = i32(max(n, i32(notes[rank * n_words + control.TOKENS]))), i32(rank + 1)
        return n

    return most


def sums(n_ranks):
    """Device functions (notes, my_rank) -> number for lane r, 0 for lanes past the ranks:

    before_me: rows for rank r from the ranks before this one. arriving: rows for rank r from all ranks.
    mine_before: rows from this rank for the ranks before r. received: rows for this rank from the ranks up to r.
    returned_before_me: rows from rank r for the ranks before this one.
    """
    n_words = control.experts_at(n_ranks)

    @device_fn
    def count(notes, source, target):
        return i32(notes[source * n_words + control.COUNTS + target])

    @device_fn
    def before_me(notes, my_rank):
        total, source, lane = i32(0), i32(0), i32(lane_id())
        while lane < n_ranks and source < my_rank:
            total, source = i32(total + count(notes, source, lane)), i32(source + 1)
        return total

    @device_fn
    def arriving(notes, my_rank):
        return before_me(notes, i32(n_ranks))

    @device_fn
    def mine_before(notes, my_rank):
        lane, here = i32(lane_id()), i32(0)
        if lane < n_ranks:
            here = count(notes, my_rank, lane)
        return i32(warp_inclusive_sum_i32(here) - here)

    @device_fn
    def received(notes, my_rank):
        lane, here = i32(lane_id()), i32(0)
        if lane < n_ranks:
            here = count(notes, lane, my_rank)
        return i32(warp_inclusive_sum_i32(here))

    @device_fn
    def returned_before_me(notes, my_rank):
        total, target, lane = i32(0), i32(0), i32(lane_id())
        while lane < n_ranks and target < my_rank:
            total, target = i32(total + count(notes, lane, target)), i32(target + 1)
        return total

    return before_me, arriving, mine_before, received, returned_before_me


def all_few(shape, few, *, told):
    """Device function (notes) -> whether no rank has more than `few` tokens: shape.few, or shape.lamport.

    As they have told in this call, or as the call's handle knows them. All ranks see the same, and every rank that has
    so few has a kernel for it.
    """
    n_ranks = shape.n_ranks
    n_words = control.experts_at(n_ranks)
    first, step = (control.TOKENS, n_words) if told else (n_ranks * n_words, 1)

    @device_fn
    def all_have_few(notes):
        lane, n = i32(lane_id()), i32(0)
        if lane < n_ranks:
            n = i32(notes[first + lane * step])
        return all_lanes(n <= few) != 0

    return all_have_few
