"""Barriers and syncwarp order memory, shuffles and votes do not; chains of atomics; launches; narrow and nc loads."""

import pytest
from litmus import DATA, FLAG, OUT, first_race, line_of, nothing

from epmoe import device
from epmoe.device import (
    any_lane,
    atomic_add_acq_rel_gpu_i32,
    atomic_add_relaxed_gpu_i32,
    atomic_add_release_gpu_i32,
    ballot,
    block_idx,
    grid_dim,
    int32,
    kernel,
    ld_acquire_gpu_i32,
    load16,
    load16_nc,
    load_i32,
    match_any,
    shared_add_i32,
    shared_array,
    shfl_xor,
    st_release_gpu_i32,
    store16,
    store_i32,
    store_u8,
    store_u16,
    syncthreads,
    syncthreads_count,
    syncthreads_or,
    syncwarp,
    thread_idx,
    u64,
    warp_sum_i32,
)


def neighbours(meet, distance):
    @kernel()
    def exchange(params, num_tokens, my_rank):
        i = thread_idx()
        store_i32(params + u64(DATA + 4 * i), i)
        meet()
        store_i32(params + u64(OUT + 4 * i), load_i32(params + u64(DATA + 4 * (i ^ distance))))

    return exchange


ORDERS_WARP = {
    "syncwarp": syncwarp,
    "syncthreads": syncthreads,
    "syncthreads_or": lambda: syncthreads_or(1),
    "syncthreads_count": lambda: syncthreads_count(1),
}
DOES_NOT = {
    "shfl_xor": lambda: shfl_xor(1, 1),
    "ballot": lambda: ballot(1),
    "match_any": lambda: match_any(1),
    "any_lane": lambda: any_lane(1),
    "warp_sum_i32": lambda: warp_sum_i32(1),
    "nothing": nothing,
}


@pytest.mark.parametrize("name", ORDERS_WARP)
def test_barriers_order_the_lanes_of_a_warp(name):
    assert first_race(neighbours(ORDERS_WARP[name], 1), block=64) is None


@pytest.mark.parametrize("name", DOES_NOT)
def test_shuffles_and_votes_do_not(name):
    race = first_race(neighbours(DOES_NOT[name], 1), block=64)
    assert "both are in one warp: a syncwarp is missing between the two" in race


@pytest.mark.parametrize("name", ORDERS_WARP)
def test_only_block_barriers_order_warps(name):
    race = first_race(neighbours(ORDERS_WARP[name], 32), block=64)
    if name == "syncwarp":
        assert "both are in one block: a syncthreads is missing between the two" in race
    else:
        assert race is None


def test_block_barriers_do_not_order_blocks():
    @kernel()
    def two_blocks(params, num_tokens, my_rank):
        if block_idx() == 0:
            store_i32(params + u64(DATA + 4 * thread_idx()), 1)
        syncthreads()
        if block_idx() == 1:
            load_i32(params + u64(DATA + 4 * thread_idx()))

    race = first_race(two_blocks, grid=2)
    assert "data[thread" in race
    assert "the second access's thread has acquired nothing from the first one's launch" in race


def last_block(add, barrier_before=syncthreads, barrier_after=syncthreads):
    """Each block writes, counts itself, and the last one reads what all wrote."""

    @kernel()
    def last_one_reads(params, num_tokens, my_rank):
        last = shared_array(1, int32)
        store_i32(params + u64(DATA + 4 * thread_idx() + 256 * block_idx()), 1)
        barrier_before()
        if thread_idx() == 0:
            last[0] = add(params + u64(FLAG), 1)
        barrier_after()
        if last[0] == grid_dim() - 1:
            for b in range(3):
                load_i32(params + u64(DATA + 4 * thread_idx() + 256 * b))

    return last_one_reads


def test_counting_blocks_with_acq_rel_orders_them():
    assert first_race(last_block(atomic_add_acq_rel_gpu_i32), grid=3, block=64) is None


@pytest.mark.parametrize("order", ["relaxed", "acquire", "release"])
def test_counting_blocks_with_less_does_not(order):
    add = getattr(device, "atomic_add_%s_gpu_i32" % order)
    race = first_race(last_block(add), grid=3, block=64)
    assert "data[thread" in race and "did not synchronise" in race and "atomic_add_%s_gpu_i32" % order in race


def test_counting_blocks_needs_the_barrier_before():
    race = first_race(last_block(atomic_add_acq_rel_gpu_i32, barrier_before=nothing), grid=3, block=64)
    assert "is missing before its release" in race


def test_counting_blocks_needs_the_barrier_after():
    race = first_race(last_block(atomic_add_acq_rel_gpu_i32, barrier_after=nothing), grid=3, block=64)
    assert "shared array of test_race_barriers_and_chains.py" in race or "is missing on the second's side" in race


def chain(middle):
    """Block 0 releases, block 1 changes the word with an RMW, block 2 acquires block 1's value."""

    @kernel()
    def relay(params, num_tokens, my_rank):
        if thread_idx() == 0:
            if block_idx() == 0:
                store_i32(params + u64(DATA), 42)
                st_release_gpu_i32(params, 1)
            elif block_idx() == 1:
                while ld_acquire_gpu_i32(params) != 1:
                    pass
                middle(params)
            else:
                while ld_acquire_gpu_i32(params) != 2:
                    pass
                load_i32(params + u64(DATA))

    return relay


def test_an_rmw_continues_a_release_sequence():
    @kernel()
    def three(params, num_tokens, my_rank):
        if thread_idx() == 0:
            if block_idx() == 0:
                store_i32(params + u64(DATA), 42)
                atomic_add_release_gpu_i32(params, 1)
            elif block_idx() == 1:
                # has acquired nothing, and passes the release on
                atomic_add_relaxed_gpu_i32(params, 1)
            else:
                while ld_acquire_gpu_i32(params) != 2:
                    pass
                load_i32(params + u64(DATA))

    assert first_race(three, grid=3, seeds=range(8)) is None


def test_a_relaxed_store_ends_a_release_sequence():
    def overwrite(flag):
        device.st_relaxed_gpu_i32(flag, 2)

    def fenced(flag):
        device.fence_acq_rel_gpu()
        device.st_relaxed_gpu_i32(flag, 2)

    race = first_race(chain(overwrite), grid=3, seeds=range(8))
    assert "the write is relaxed" in race
    assert first_race(chain(fenced), grid=3, seeds=range(8)) is None
    assert first_race(chain(lambda flag: st_release_gpu_i32(flag, 2)), grid=3, seeds=range(8)) is None


def test_launches_of_a_stream_are_ordered_and_ranks_are_not():
    @kernel()
    def writes(params, num_tokens, my_rank):
        store_i32(params + u64(DATA + 4 * thread_idx()), 1)

    assert first_race(writes, launches=3) is None
    race = first_race(writes, ranks=2)
    assert "rank 0 block 0" in race and "rank 1 block 0" in race and "has acquired nothing" in race


@pytest.mark.parametrize("store, size", [(store_u8, 1), (store_u16, 2), (store_i32, 4)])
def test_neighbouring_narrow_stores_do_not_race(store, size):
    @kernel()
    def side_by_side(params, num_tokens, my_rank):
        store(params + u64(DATA + size * thread_idx()), 1)

    @kernel()
    def on_each_other(params, num_tokens, my_rank):
        store(params + u64(DATA + size * (thread_idx() // 2)), 1)

    assert first_race(side_by_side) is None
    assert "both are in one warp" in first_race(on_each_other)


def test_wide_and_narrow_accesses_overlap():
    @kernel()
    def overlap(params, num_tokens, my_rank):
        if thread_idx() == 0:
            store16(params + u64(DATA), 1, 2, 3, 4)
        if thread_idx() == 1:
            store_u8(params + u64(DATA + 13), 1)

    race = first_race(overlap)
    assert "data[thread 0, word 3]" in race and "store16" in race and "store_u8" in race


def test_shared_arrays_are_watched():
    @kernel()
    def unordered(params, num_tokens, my_rank):
        a = shared_array(64, int32)
        a[thread_idx()] = 1
        store_i32(params + u64(OUT + 4 * thread_idx()), a[63 - thread_idx()])

    @kernel()
    def counted(params, num_tokens, my_rank):
        a = shared_array(2, int32)
        if thread_idx() == 0:
            a[0] = 0
        syncthreads()
        shared_add_i32(a, 0, 1)
        syncthreads()
        store_i32(params + u64(OUT + 4 * thread_idx()), a[0])

    race = first_race(unordered, block=64)
    assert "shared array of %s[" % line_of(unordered, "shared_array(64") in race and "block 0" in race
    assert first_race(counted, block=64) is None


def copying(load, wait_in_kernel):
    @kernel()
    def copy(params, num_tokens, my_rank):
        if wait_in_kernel and block_idx() == 0:
            store16(params + u64(DATA + 16 * thread_idx()), 1, 2, 3, 4)
            syncthreads()
            if thread_idx() == 0:
                st_release_gpu_i32(params, 1)
        if block_idx() == 1:
            if wait_in_kernel:
                while ld_acquire_gpu_i32(params) != 1:
                    pass
            q = load(params + u64(DATA + 16 * thread_idx()))
            store16(params + u64(OUT + 16 * thread_idx()), q[0], q[1], q[2], q[3])

    return copy


def test_non_coherent_loads_may_read_only_what_was_there_before_the_launch():
    assert first_race(copying(load16, True), grid=2) is None
    assert first_race(copying(load16_nc, False), grid=2) is None
    race = first_race(copying(load16_nc, True), grid=2)
    assert "load16_nc may return what was there when the launch began" in race and "use load16" in race
