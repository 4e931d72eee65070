"""Two strong stores of different values to one word must be ordered; otherwise the final value is undefined."""

import pytest
from litmus import FLAG, first_race

from epmoe.device import (
    atomic_add_acq_rel_gpu_i32,
    atomic_add_acquire_gpu_i32,
    atomic_add_relaxed_gpu_i32,
    block_idx,
    kernel,
    ld_relaxed_gpu_i32,
    st_relaxed_gpu_i32,
    thread_idx,
    u64,
)

WORD, COUNT = FLAG, FLAG + 32


def by_whoever_counts_last(count, second):
    """Each block stores and counts; the last one stores `second` over it."""

    @kernel()
    def last_stores(params, num_tokens, my_rank):
        if thread_idx() == 0:
            if block_idx() == 0:
                st_relaxed_gpu_i32(params + u64(WORD), 1)
            if count(params + u64(COUNT), 1) == 1:
                st_relaxed_gpu_i32(params + u64(WORD), second)

    return last_stores


@pytest.mark.parametrize("count", [atomic_add_relaxed_gpu_i32, atomic_add_acquire_gpu_i32])
def test_a_count_that_releases_nothing_orders_no_stores(count):
    race = first_race(by_whoever_counts_last(count, 2), grid=2)
    assert "data race on flag[slot 0]" in race and "nothing says which of them comes last" in race


def test_a_count_that_releases_and_acquires_does():
    assert first_race(by_whoever_counts_last(atomic_add_acq_rel_gpu_i32, 2), grid=2) is None


def test_the_same_value_twice_needs_no_order():
    assert first_race(by_whoever_counts_last(atomic_add_relaxed_gpu_i32, 1), grid=2) is None


def test_a_value_that_was_seen_is_older():
    @kernel()
    def waits(params, num_tokens, my_rank):
        if thread_idx() == 0:
            if block_idx() == 0:
                st_relaxed_gpu_i32(params + u64(WORD), 1)
            else:
                while ld_relaxed_gpu_i32(params + u64(WORD)) != 1:
                    pass
                st_relaxed_gpu_i32(params + u64(WORD), 2)

    assert first_race(waits, grid=2) is None
