"""EPLocalSyncCounters: the sizes and offsets of its page."""

import numpy as np
import pytest

from epmoe_ref import EPLocalSyncCounters, EPValueError


@pytest.mark.parametrize("n", [8, 9, 16, 60, 64, 100, 128, 160, 256, 384, 512, 1000, 1024])
def test_sizes_and_offsets_of_the_page(n):
    counters = EPLocalSyncCounters(n)
    assert counters.dispatch_async_size() == 2 * n + 8
    assert counters.dispatch_wait_size() == counters.combine_async_size() == 4 * n + 4
    assert counters.combine_wait_size() == 2 * n
    assert counters.total_size() == 8 * n + 12
    assert counters.get_dispatch_async_ptr() == 0
    assert counters.get_dispatch_wait_ptr() == counters.get_combine_async_ptr() == 2 * n + 8
    assert counters.get_combine_wait_ptr() == 6 * n + 12


@pytest.mark.parametrize("n", [1, 8, 256])
def test_regions_follow_each_other_without_gap_or_overlap(n):
    regions = EPLocalSyncCounters(n).regions()
    end = 0
    for offset, size in regions.values():
        assert offset == end
        end = offset + size
    assert end == EPLocalSyncCounters(n).total_size()
    base = EPLocalSyncCounters(n).get_dispatch_wait_ptr()
    within = {name: regions[name][0] - base for name in "ABCDEFG"}
    assert within == {"A": 0, "B": 2 * n, "C": 3 * n, "D": 4 * n, "E": 4 * n + 1, "F": 4 * n + 2, "G": 4 * n + 3}


def test_with_a_buffer_the_pointers_are_slices_of_it():
    buffer = np.zeros(EPLocalSyncCounters(8).total_size() + 5, np.int32)
    counters = EPLocalSyncCounters(8, buffer)
    counters.get_combine_async_ptr()[0] = 7
    counters.get_combine_wait_ptr()[0] = 9
    assert np.flatnonzero(buffer).tolist() == [24, 60]


@pytest.mark.parametrize("n, buffer, words", [
    (0, None, "n_experts=0"), (2.0, None, "n_experts=2.0"), (True, None, "n_experts=True"),
    (8, np.zeros(75, np.int32), r"int32\[75\] must be an int32 array \[76\]"), (8, np.zeros(99), "float64"),
    (8, np.zeros((4, 99), np.int32), r"\[4, 99\]"), (8, [0] * 99, "buffer list")])
def test_refusals(n, buffer, words):
    with pytest.raises(EPValueError, match=words):
        EPLocalSyncCounters(n, buffer)
