"""Two strong stores of different values to one word must be ordered; otherwise the final value is undefined."""

import pytest
from litmus import race_of_blocks, wait_for

from epmoe import device
from epmoe.device import st_relaxed_gpu_i32, u64


def race_of_who_counts_last(count, second):
    """Each block counts, the first one behind a store; the last one stores `second` over it."""

    def counts(flag, data):
        if count(flag + u64(32), 1) == 1:
            st_relaxed_gpu_i32(flag, second)

    def stores_and_counts(flag, data):
        st_relaxed_gpu_i32(flag, 1)
        counts(flag, data)

    return race_of_blocks(stores_and_counts, counts)


@pytest.mark.parametrize("count", [device.atomic_add_relaxed_gpu_i32, device.atomic_add_acquire_gpu_i32])
def test_a_count_that_releases_nothing_orders_no_stores(count):
    race = race_of_who_counts_last(count, 2)
    assert "data race on flag[slot 0]" in race and "nothing says which of them comes last" in race


@pytest.mark.parametrize(
    "count, second",
    [(device.atomic_add_acq_rel_gpu_i32, 2), (device.atomic_add_relaxed_gpu_i32, 1)],
    ids=["releases and acquires", "the same value twice"],
)
def test_what_is_ordered_or_the_same_is_no_race(count, second):
    assert race_of_who_counts_last(count, second) is None


def test_a_value_that_was_seen_is_older():
    def waits(flag, data):
        wait_for(device.ld_relaxed_gpu_i32, flag, 1)
        st_relaxed_gpu_i32(flag, 2)

    assert race_of_blocks(lambda flag, data: st_relaxed_gpu_i32(flag, 1), waits) is None
