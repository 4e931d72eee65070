"""What lane r of a warp knows of rank r: where its arrays lie, and which of their rows are this rank's.

A book is the counts of rows [source, target] that all ranks know: in the notes of a call, or in a handle. A function
takes its address and the bytes from one source to the next.
"""

from epmoe.device import device_fn, i32, lane_id, load_i32, load_u64, u64, warp_inclusive_sum_i32

from . import control


def place_in(block):
    """Device function (params, note, index, rank): address of array `index` that the rank announced in its note."""
    p_pools = block.offset("pool_ptrs")

    @device_fn
    def place(params, note, index, rank):
        return u64(u64(load_u64(params + u64(p_pools) + u64(8) * u64(rank)))
                   + u64(load_u64(note + u64(control.PLACES) + u64(8) * u64(index))))

    return place


@device_fn
def count(book, stride, source, target):
    """Rows from source to target."""
    return i32(load_i32(book + u64(stride) * u64(source) + u64(4) * u64(target)))


def sums(n_ranks):
    """Device functions (book, stride, my_rank) -> number for lane r, 0 for lanes past the ranks:

    before_me: rows for rank r from the ranks before this one. arriving: rows for rank r from all ranks.
    mine_before: rows from this rank for the ranks before r. received: rows for this rank from the ranks up to r.
    returned_before_me: rows from rank r for the ranks before this one.
    """

    @device_fn
    def before_me(book, stride, my_rank):
        total, source, lane = i32(0), i32(0), i32(lane_id())
        while lane < n_ranks and source < my_rank:
            total, source = i32(total + count(book, stride, source, lane)), i32(source + 1)
        return total

    @device_fn
    def arriving(book, stride, my_rank):
        return before_me(book, stride, i32(n_ranks))

    @device_fn
    def mine_before(book, stride, my_rank):
        lane, here = i32(lane_id()), i32(0)
        if lane < n_ranks:
            here = count(book, stride, my_rank, lane)
        return i32(warp_inclusive_sum_i32(here) - here)

    @device_fn
    def received(book, stride, my_rank):
        lane, here = i32(lane_id()), i32(0)
        if lane < n_ranks:
            here = count(book, stride, lane, my_rank)
        return i32(warp_inclusive_sum_i32(here))

    @device_fn
    def returned_before_me(book, stride, my_rank):
        total, target, lane = i32(0), i32(0), i32(lane_id())
        while lane < n_ranks and target < my_rank:
            total, target = i32(total + count(book, stride, lane, target)), i32(target + 1)
        return total

    return before_me, arriving, mine_before, received, returned_before_me
