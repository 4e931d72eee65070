"""Barriers and syncwarp order memory, shuffles and votes do not; chains of atomics; launches; narrow and nc loads."""

import pytest
from litmus import DATA, FLAG, OUT, first_race, line_of, nothing, race_of_blocks, wait_for

from epmoe import device
from epmoe.device import block_idx, kernel, load_i32, store16, store_i32, syncthreads, thread_idx, u64


def neighbours(meet, distance):
    @kernel()
    def exchange(params, num_tokens, my_rank):
        i = thread_idx()
        store_i32(params + u64(DATA + 4 * i), i)
        meet()
        store_i32(params + u64(OUT + 4 * i), load_i32(params + u64(DATA + 4 * (i ^ distance))))

    return exchange


ORDERS_WARP = {
    "syncwarp": device.syncwarp,
    "syncthreads": syncthreads,
    "syncthreads_or": lambda: device.syncthreads_or(1),
    "syncthreads_count": lambda: device.syncthreads_count(1),
}
DOES_NOT = {
    "shfl_xor": lambda: device.shfl_xor(1, 1),
    "ballot": lambda: device.ballot(1),
    "match_any": lambda: device.match_any(1),
    "any_lane": lambda: device.any_lane(1),
    "warp_sum_i32": lambda: device.warp_sum_i32(1),
    "nothing": nothing,
}


@pytest.mark.parametrize("name", ORDERS_WARP)
def test_barriers_order_the_lanes_of_a_warp(name):
    assert first_race(neighbours(ORDERS_WARP[name], 1), block=64) is None


@pytest.mark.parametrize("name", DOES_NOT)
def test_shuffles_and_votes_do_not(name):
    race = first_race(neighbours(DOES_NOT[name], 1), block=64)
    assert "both are in one warp, and nothing orders them: a syncwarp or syncthreads between them would" in race


@pytest.mark.parametrize("name", ORDERS_WARP)
def test_only_block_barriers_order_warps(name):
    race = first_race(neighbours(ORDERS_WARP[name], 32), block=64)
    if name == "syncwarp":
        assert "both are in one block, and nothing orders them: a syncthreads between them would" in race
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
    assert "the second access's thread has acquired nothing from the first one's block" in race


def race_of_last_block(order, before=syncthreads, after=syncthreads):
    """Each block writes, counts itself with an add of this order, and the last one reads what all wrote."""
    add = getattr(device, f"atomic_add_{order}_gpu_i32")

    @kernel()
    def last_one_reads(params, num_tokens, my_rank):
        last = device.shared_array(1, device.int32)
        store_i32(params + u64(DATA + 4 * thread_idx() + 256 * block_idx()), 1)
        before()
        if thread_idx() == 0:
            last[0] = add(params + u64(FLAG), 1)
        after()
        if last[0] == device.grid_dim() - 1:
            for b in range(3):
                load_i32(params + u64(DATA + 4 * thread_idx() + 256 * b))

    return first_race(last_one_reads, grid=3, block=64)


def test_counting_blocks_with_acq_rel_and_barriers_on_both_sides_orders_them():
    assert race_of_last_block("acq_rel") is None
    assert "is missing before its release" in race_of_last_block("acq_rel", before=nothing)
    race = race_of_last_block("acq_rel", after=nothing)
    assert "shared array of test_race_barriers_and_chains.py" in race or "is missing on the second's side" in race


@pytest.mark.parametrize("order", ["relaxed", "acquire", "release"])
def test_counting_blocks_with_less_does_not(order):
    race = race_of_last_block(order)
    assert "data[thread" in race and "did not synchronise" in race and f"atomic_add_{order}_gpu_i32" in race


def tells(flag, data):
    store_i32(data, 42)
    device.st_release_gpu_i32(flag, 1)


def reads_behind_2(flag, data):
    wait_for(device.ld_acquire_gpu_i32, flag, 2)
    load_i32(data)


def test_an_rmw_continues_a_release_sequence():
    def counts_from_0(flag, data):
        store_i32(data, 42)
        device.atomic_add_release_gpu_i32(flag, 1)

    def has_acquired_nothing(flag, data):
        device.atomic_add_relaxed_gpu_i32(flag, 1)  # passes the release on

    assert race_of_blocks(counts_from_0, has_acquired_nothing, reads_behind_2, seeds=range(8)) is None


@pytest.mark.parametrize(
    "fence, store, race",
    [
        (nothing, device.st_relaxed_gpu_i32, True),
        (device.fence_acq_rel_gpu, device.st_relaxed_gpu_i32, False),
        (nothing, device.st_release_gpu_i32, False),
    ],
    ids=["relaxed", "fence and relaxed", "release"],
)
def test_a_relaxed_store_ends_a_release_sequence(fence, store, race):
    def relays(flag, data):
        wait_for(device.ld_acquire_gpu_i32, flag, 1)
        fence()
        store(flag, 2)

    text = race_of_blocks(tells, relays, reads_behind_2, seeds=range(8))
    assert "the write is relaxed" in text if race else text is None


def test_launches_of_a_stream_are_ordered_and_ranks_are_not():
    @kernel()
    def writes(params, num_tokens, my_rank):
        store_i32(params + u64(DATA + 4 * thread_idx()), 1)

    assert first_race(writes, launches=3) is None
    race = first_race(writes, ranks=2)
    assert "rank 0 block 0" in race and "rank 1 block 0" in race and "has acquired nothing" in race


@pytest.mark.parametrize("store, size", [(device.store_u8, 1), (device.store_u16, 2), (store_i32, 4)])
def test_neighbouring_narrow_stores_do_not_race(store, size):
    def stores(threads_of_a_place):
        @kernel()
        def side_by_side(params, num_tokens, my_rank):
            store(params + u64(DATA + size * (thread_idx() // threads_of_a_place)), 1)

        return side_by_side

    assert first_race(stores(1)) is None
    assert "both are in one warp" in first_race(stores(2))


def test_wide_and_narrow_accesses_overlap():
    @kernel()
    def overlap(params, num_tokens, my_rank):
        if thread_idx() == 0:
            store16(params + u64(DATA), 1, 2, 3, 4)
        if thread_idx() == 1:
            device.store_u8(params + u64(DATA + 13), 1)

    race = first_race(overlap)
    assert "data[thread 0, word 3]" in race and "store16" in race and "store_u8" in race


def test_shared_arrays_are_watched():
    @kernel()
    def unordered(params, num_tokens, my_rank):
        a = device.shared_array(64, device.int32)
        a[thread_idx()] = 1
        store_i32(params + u64(OUT + 4 * thread_idx()), a[63 - thread_idx()])

    @kernel()
    def counted(params, num_tokens, my_rank):
        a = device.shared_array(2, device.int32)
        if thread_idx() == 0:
            a[0] = 0
        syncthreads()
        device.shared_add_i32(a, 0, 1)
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
                device.st_release_gpu_i32(params, 1)
        if block_idx() == 1:
            if wait_in_kernel:
                wait_for(device.ld_acquire_gpu_i32, params, 1)
            q = load(params + u64(DATA + 16 * thread_idx()))
            store16(params + u64(OUT + 16 * thread_idx()), q[0], q[1], q[2], q[3])

    return copy


def test_non_coherent_loads_may_read_only_what_was_there_before_the_launch():
    assert first_race(copying(device.load16, True), grid=2) is None
    assert first_race(copying(device.load16_nc, False), grid=2) is None
    race = first_race(copying(device.load16_nc, True), grid=2)
    assert "load16_nc may return what was there when the launch began" in race and "use load16" in race
