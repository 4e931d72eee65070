"""Scopes, release and acquire patterns, and load16_nc: rules of PTX's model beyond message passing."""

import pytest
from litmus import DATA, FLAG, first_race, nothing

from epmoe import device
from epmoe.device import (
    block_idx,
    fence_acq_rel_gpu,
    kernel,
    ld_acquire_gpu_i32,
    ld_relaxed_gpu_i32,
    load16_nc,
    load_i32,
    nanosleep,
    st_relaxed_gpu_i32,
    st_release_gpu_i32,
    store_i32,
    syncthreads,
    thread_idx,
    u64,
)


def two_on_a_counter(first, second):
    """Block 0 does two things with a counter, then block 1 adds to it; either order."""

    @kernel()
    def counts(params, num_tokens, my_rank):
        if thread_idx() == 0:
            if block_idx() == 0:
                first(params + u64(FLAG))
                second(params + u64(FLAG))
            else:
                device.atomic_add_relaxed_gpu_i32(params + u64(FLAG), 1)

    return counts


NARROW_AND_WIDE = {
    "add, add": (
        lambda at: device.atomic_add_relaxed_cta_i32(at, 1),
        lambda at: device.atomic_add_relaxed_gpu_i32(at, 1),
    ),
    "load, store": (device.ld_acquire_cta_i32, lambda at: device.st_relaxed_gpu_i32(at, 1)),
    "store, load": (lambda at: device.st_relaxed_gpu_i32(at, 1), device.ld_acquire_cta_i32),
    "store, store": (lambda at: device.st_relaxed_cta_i32(at, 1), lambda at: device.st_relaxed_gpu_i32(at, 1)),
    "load, load": (device.ld_relaxed_cta_i32, device.ld_relaxed_gpu_i32),
}


@pytest.mark.parametrize("name", NARROW_AND_WIDE)
@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_too_narrow_a_scope_counts_even_beside_a_wide_one_of_the_same_thread(name, seed):
    race = first_race(two_on_a_counter(*NARROW_AND_WIDE[name]), seeds=(seed,), grid=2)
    assert "the scopes" in race and "do not include each other's thread" in race


def test_too_narrow_a_scope_counts_even_if_an_ordered_thread_uses_a_wide_one():
    @kernel()
    def counts(params, num_tokens, my_rank):
        if block_idx() == 0:
            if thread_idx() == 0:
                device.atomic_add_relaxed_cta_i32(params + u64(FLAG), 1)
            device.syncwarp()
            if thread_idx() == 1:
                device.atomic_add_relaxed_gpu_i32(params + u64(FLAG), 1)
        elif thread_idx() == 0:
            device.atomic_add_relaxed_gpu_i32(params + u64(FLAG), 1)

    for seed in (None, 0, 1, 2, 3):
        assert "the scopes" in first_race(counts, seeds=(seed,), grid=2)


@pytest.mark.parametrize("early_fence", [nothing, fence_acq_rel_gpu])
@pytest.mark.parametrize("after", ["atomic_add", "st", "nothing"])
def test_a_release_counts_behind_an_early_fence_and_before_later_writes(early_fence, after):
    """A relaxed write of the same thread follows the release and belongs to its pattern."""

    def then_writes(flag):
        if after == "atomic_add":
            device.atomic_add_relaxed_gpu_i32(flag, 1)
        elif after == "st":
            device.st_relaxed_gpu_i32(flag, 2)

    @kernel()
    def tells(params, num_tokens, my_rank):
        if thread_idx() == 0:
            if block_idx() == 0:
                early_fence()
                store_i32(params + u64(DATA), 42)
                device.red_add_release_gpu_i32(params + u64(FLAG), 1)
                then_writes(params + u64(FLAG))
            else:
                while ld_acquire_gpu_i32(params + u64(FLAG)) < (1 if after == "nothing" else 2):
                    pass
                load_i32(params + u64(DATA))

    assert first_race(tells, seeds=range(8), grid=2) is None


def test_a_release_counts_even_if_another_thread_writes_before_the_later_write():
    """PTX 8.8: a release of a word, then a strong write of it by the same thread, whatever is between them."""

    @kernel()
    def tells(params, num_tokens, my_rank):
        if thread_idx() == 0:
            if block_idx() == 0:
                store_i32(params + u64(DATA), 42)
                st_release_gpu_i32(params + u64(FLAG), 1)
                while ld_relaxed_gpu_i32(params + u64(FLAG)) != 2:
                    pass
                st_relaxed_gpu_i32(params + u64(FLAG), 3)
            elif block_idx() == 1:
                while ld_relaxed_gpu_i32(params + u64(FLAG)) != 1:
                    pass
                st_relaxed_gpu_i32(params + u64(FLAG), 2)
            else:
                while ld_acquire_gpu_i32(params + u64(FLAG)) != 3:
                    pass
                load_i32(params + u64(DATA))

    assert first_race(tells, seeds=range(8), grid=3) is None


def test_an_acquire_counts_for_what_an_earlier_relaxed_load_of_the_word_saw():
    """PTX 8.8: a strong read of a word, then an acquire of it, even if the acquire sees another thread's write."""

    def reader(last_look):
        @kernel()
        def looks_twice(params, num_tokens, my_rank):
            if thread_idx() == 0:
                if block_idx() == 0:
                    store_i32(params + u64(DATA), 42)
                    st_release_gpu_i32(params + u64(FLAG), 1)
                elif block_idx() == 1:
                    while ld_relaxed_gpu_i32(params + u64(FLAG)) != 1:
                        pass
                    st_relaxed_gpu_i32(params + u64(FLAG + 32), 1)
                    while ld_relaxed_gpu_i32(params + u64(FLAG + 32)) != 2:
                        pass
                    last_look(params + u64(FLAG))
                    load_i32(params + u64(DATA))
                else:
                    while ld_relaxed_gpu_i32(params + u64(FLAG + 32)) != 1:
                        pass
                    st_relaxed_gpu_i32(params + u64(FLAG), 1)
                    st_relaxed_gpu_i32(params + u64(FLAG + 32), 2)

        return looks_twice

    assert first_race(reader(ld_acquire_gpu_i32), grid=3) is None
    assert "data[thread 0, word 0]" in first_race(reader(ld_relaxed_gpu_i32), grid=3)


def test_a_reduction_before_a_fence_acquires_nothing():
    def reader(look):
        @kernel()
        def looks(params, num_tokens, my_rank):
            if thread_idx() == 0:
                if block_idx() == 0:
                    store_i32(params + u64(DATA), 42)
                    st_release_gpu_i32(params + u64(FLAG), 1)
                else:
                    for _ in range(100):
                        nanosleep(100)
                    look(params + u64(FLAG), 1)
                    fence_acq_rel_gpu()
                    if ld_relaxed_gpu_i32(params + u64(FLAG)) == 2:
                        load_i32(params + u64(DATA))

        return looks

    assert first_race(reader(device.atomic_add_relaxed_gpu_i32), seeds=range(8), grid=2) is None
    assert "data[thread 0, word 0]" in first_race(reader(device.red_add_relaxed_gpu_i32), seeds=range(8), grid=2)


def nc_then_write(write):
    """Warp 0 loads through the non-coherent path, then warp 1 writes."""

    @kernel()
    def writes_later(params, num_tokens, my_rank):
        if thread_idx() < 32:
            load16_nc(params + u64(DATA))
        syncthreads()
        if thread_idx() == 40:
            write(params + u64(DATA), 1)

    return writes_later


@pytest.mark.parametrize("write", [store_i32, st_relaxed_gpu_i32, device.red_add_release_gpu_i32])
def test_what_is_read_through_the_non_coherent_path_is_not_written_in_the_same_launch(write):
    race = first_race(nc_then_write(write), block=64)
    assert "load16_nc" in race and "until its launch has ended" in race


def test_own_words_must_not_be_read_through_the_non_coherent_path():
    @kernel()
    def own(params, num_tokens, my_rank):
        store_i32(params + u64(DATA + 16 * thread_idx()), 1)
        load16_nc(params + u64(DATA + 16 * thread_idx()))

    assert "use load16" in first_race(own)


def test_the_next_launch_may_write_what_was_read_through_the_non_coherent_path():
    @kernel()
    def reads_or_writes(params, num_tokens, my_rank):
        if load_i32(params + u64(FLAG)) == 0:
            load16_nc(params + u64(DATA))
            syncthreads()
            if thread_idx() == 0:
                store_i32(params + u64(FLAG), 1)
        elif thread_idx() == 0:
            store_i32(params + u64(DATA), 1)

    assert first_race(reads_or_writes, launches=2) is None


@pytest.mark.parametrize("expected, race", [(1, False), (7, True)])
def test_a_comparison_that_fails_releases_nothing(expected, race):
    """Block 1 writes, then compares and swaps; block 0's release goes on; block 1's writes only if it swapped."""

    @kernel()
    def swaps(params, num_tokens, my_rank):
        if thread_idx() == 0:
            if block_idx() == 0:
                st_release_gpu_i32(params + u64(FLAG), 1)
            elif block_idx() == 1:
                while ld_relaxed_gpu_i32(params + u64(FLAG)) != 1:
                    pass
                store_i32(params + u64(DATA), 42)
                device.atomic_cas_acq_rel_gpu_i32(params + u64(FLAG), expected, 1)
                st_relaxed_gpu_i32(params + u64(FLAG + 32), 1)
            else:
                while ld_relaxed_gpu_i32(params + u64(FLAG + 32)) != 1:
                    pass
                ld_acquire_gpu_i32(params + u64(FLAG))
                load_i32(params + u64(DATA))

    assert bool(first_race(swaps, grid=3)) is race
