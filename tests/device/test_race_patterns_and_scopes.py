"""Scopes, release and acquire patterns, and load16_nc: rules of PTX's model beyond message passing."""

import pytest
from litmus import DATA, FLAG, first_race, nothing, race_of_blocks, wait_for

from epmoe import device
from epmoe.device import block_idx, kernel, load16_nc, load_i32, store_i32, syncthreads, thread_idx, u64

OTHER = u64(32)  # from the flag to another one


def adds(flag, data):
    device.atomic_add_relaxed_gpu_i32(flag, 1)


def tells(flag, data):
    store_i32(data, 42)
    device.st_release_gpu_i32(flag, 1)


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
    race = race_of_blocks(lambda flag, data: [access(flag) for access in NARROW_AND_WIDE[name]], adds, seeds=(seed,))
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


LATER_WRITES = {
    "atomic_add": lambda flag: device.atomic_add_relaxed_gpu_i32(flag, 1),
    "st": lambda flag: device.st_relaxed_gpu_i32(flag, 2),
    "nothing": lambda flag: None,
}


@pytest.mark.parametrize("early_fence", [nothing, device.fence_acq_rel_gpu])
@pytest.mark.parametrize("after", LATER_WRITES)
def test_a_release_counts_behind_an_early_fence_and_before_later_writes(early_fence, after):
    """A relaxed write of the same thread follows the release and belongs to its pattern."""

    def writes(flag, data):
        early_fence()
        store_i32(data, 42)
        device.red_add_release_gpu_i32(flag, 1)
        LATER_WRITES[after](flag)

    def reads(flag, data):
        wait_for(device.ld_acquire_gpu_i32, flag, 1 if after == "nothing" else 2)
        load_i32(data)

    assert race_of_blocks(writes, reads, seeds=range(8)) is None


def test_a_release_counts_even_if_another_thread_writes_before_the_later_write():
    """PTX 8.8: a release of a word, then a strong write of it by the same thread, whatever is between them."""

    def releases(flag, data):
        tells(flag, data)
        wait_for(device.ld_relaxed_gpu_i32, flag, 2)
        device.st_relaxed_gpu_i32(flag, 3)

    def writes_between(flag, data):
        wait_for(device.ld_relaxed_gpu_i32, flag, 1)
        device.st_relaxed_gpu_i32(flag, 2)

    def reads(flag, data):
        wait_for(device.ld_acquire_gpu_i32, flag, 3)
        load_i32(data)

    assert race_of_blocks(releases, writes_between, reads, seeds=range(8)) is None


@pytest.mark.parametrize("last_look, race", [("ld_acquire_gpu_i32", False), ("ld_relaxed_gpu_i32", True)])
def test_an_acquire_counts_for_what_an_earlier_relaxed_load_of_the_word_saw(last_look, race):
    """PTX 8.8: a strong read of a word, then an acquire of it, even if the acquire sees another thread's write."""

    def looks_twice(flag, data):
        wait_for(device.ld_relaxed_gpu_i32, flag, 1)
        device.st_relaxed_gpu_i32(flag + OTHER, 1)
        wait_for(device.ld_relaxed_gpu_i32, flag + OTHER, 2)
        getattr(device, last_look)(flag)
        load_i32(data)

    def writes_between(flag, data):
        wait_for(device.ld_relaxed_gpu_i32, flag + OTHER, 1)
        device.st_relaxed_gpu_i32(flag, 1)
        device.st_relaxed_gpu_i32(flag + OTHER, 2)

    text = race_of_blocks(tells, looks_twice, writes_between)
    assert "data[thread 0, word 0]" in text if race else text is None


@pytest.mark.parametrize("look, race", [("atomic_add_relaxed_gpu_i32", False), ("red_add_relaxed_gpu_i32", True)])
def test_a_reduction_before_a_fence_acquires_nothing(look, race):
    def reads(flag, data):
        for _ in range(100):
            device.nanosleep(100)
        getattr(device, look)(flag, 1)
        device.fence_acq_rel_gpu()
        if device.ld_relaxed_gpu_i32(flag) == 2:
            load_i32(data)

    text = race_of_blocks(tells, reads, seeds=range(8))
    assert "data[thread 0, word 0]" in text if race else text is None


@pytest.mark.parametrize("write", [store_i32, device.st_relaxed_gpu_i32, device.red_add_release_gpu_i32])
def test_what_is_read_through_the_non_coherent_path_is_not_written_in_the_same_launch(write):
    """Warp 0 loads through the non-coherent path, then warp 1 writes."""

    @kernel()
    def writes_later(params, num_tokens, my_rank):
        if thread_idx() < 32:
            load16_nc(params + u64(DATA))
        syncthreads()
        if thread_idx() == 40:
            write(params + u64(DATA), 1)

    race = first_race(writes_later, block=64)
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

    def swaps(flag, data):
        wait_for(device.ld_relaxed_gpu_i32, flag, 1)
        store_i32(data, 42)
        device.atomic_cas_acq_rel_gpu_i32(flag, expected, 1)
        device.st_relaxed_gpu_i32(flag + OTHER, 1)

    def reads(flag, data):
        wait_for(device.ld_relaxed_gpu_i32, flag + OTHER, 1)
        device.ld_acquire_gpu_i32(flag)
        load_i32(data)

    assert bool(race_of_blocks(lambda flag, data: device.st_release_gpu_i32(flag, 1), swaps, reads)) is race
