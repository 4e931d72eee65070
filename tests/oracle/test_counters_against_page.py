"""EPLocalSyncCounters, one class that both packages export: its page's sizes and offsets, for n_experts 8 to 1024."""

import numpy as np
import pytest


def counters(package):
    if package == "epmoe_ref":
        from epmoe_ref import EPLocalSyncCounters
    else:
        from epmoe import EPLocalSyncCounters
    return EPLocalSyncCounters


@pytest.mark.parametrize("package", ["epmoe_ref", "epmoe"])
def test_sizes_and_offsets_in_int32_elements(package):
    for n in range(8, 1025):
        c = counters(package)(n)
        assert c.dispatch_async_size() == 2 * n + 8
        assert c.dispatch_wait_size() == c.combine_async_size() == 4 * n + 4
        assert c.combine_wait_size() == 2 * n
        assert c.total_size() == (2 * n + 8) + (4 * n + 4) + 2 * n
        assert c.get_dispatch_async_ptr() == 0
        assert c.get_dispatch_wait_ptr() == c.get_combine_async_ptr() == 2 * n + 8
        assert c.get_combine_wait_ptr() == 6 * n + 12


def test_with_a_buffer_the_pointers_are_slices_of_it():
    buffer = np.arange(8 * 16 + 12, dtype=np.int32)
    c = counters("epmoe_ref")(16, buffer)
    for get, start in (
        (c.get_dispatch_async_ptr, 0),
        (c.get_dispatch_wait_ptr, 40),
        (c.get_combine_async_ptr, 40),
        (c.get_combine_wait_ptr, 108),
    ):
        assert get()[0] == start and np.shares_memory(get(), buffer)
