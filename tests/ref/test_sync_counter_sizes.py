"""EPLocalSyncCounters: the sizes and offsets of its page."""

import copy

import numpy as np
import pytest

import epmoe
from epmoe_ref import EPLocalSyncCounters, EPValueError


def test_sizes_and_offsets_of_the_page():
    for n in range(8, 1025):
        counters = EPLocalSyncCounters(n)
        assert counters.dispatch_async_size() == 2 * n + 8
        assert counters.dispatch_wait_size() == counters.combine_async_size() == 4 * n + 4
        assert counters.combine_wait_size() == 2 * n
        assert counters.total_size() == 8 * n + 12
        assert counters.get_dispatch_async_ptr() == 0
        assert counters.get_dispatch_wait_ptr() == counters.get_combine_async_ptr() == 2 * n + 8
        assert counters.get_combine_wait_ptr() == 6 * n + 12
    assert epmoe.EPLocalSyncCounters is EPLocalSyncCounters


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
    buffer = np.arange(EPLocalSyncCounters(8).total_size() + 5, dtype=np.int32)
    counters = EPLocalSyncCounters(8, buffer)
    for kernel, start in dict(dispatch_async=0, dispatch_wait=24, combine_async=24, combine_wait=60).items():
        pointer = getattr(counters, f"get_{kernel}_ptr")()
        assert pointer[0] == start and np.shares_memory(pointer, buffer)


class DeviceMemory:
    """An array on a GPU as CuPy, Numba and torch present it."""

    def __init__(self, address, shape, typestr="<i4", strides=None):
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
            "strides": strides,
        }


class Allocation:
    """Untyped memory, like epmoe's buffers."""

    def __init__(self, address, nbytes):
        self.address, self.nbytes = address, nbytes


def test_sizes_need_no_memory_and_the_names_are_those_of_the_page():
    of_8 = EPLocalSyncCounters[8]
    assert (of_8.dispatch_async_size(), of_8.dispatch_wait_size(), of_8.combine_async_size()) == (24, 36, 36)
    assert (of_8.combine_wait_size(), of_8.total_size(), of_8.n_experts, of_8.ptr) == (16, 76, 8, None)
    assert EPLocalSyncCounters.get_type_name() == of_8.get_type_name() == "EPLocalSyncCounters"
    assert isinstance(of_8(4096), EPLocalSyncCounters) and repr(of_8(4096)) == "EPLocalSyncCounters[8](ptr=0x1000)"


@pytest.mark.parametrize(
    "memory",
    [4096, np.int64(4096), DeviceMemory(4096, (76,)), Allocation(4096, 304), DeviceMemory(4096, (99,), strides=(4,))],
    ids=lambda memory: type(memory).__name__,
)
def test_over_device_memory_the_pointers_are_addresses_in_bytes(memory):
    of_8 = EPLocalSyncCounters[8]
    for counters in (of_8(memory), of_8(buffer=memory), EPLocalSyncCounters(8, memory)):
        assert counters.ptr == counters.get_dispatch_async_ptr() == 4096 and counters.buffer is memory
        assert counters.get_dispatch_wait_ptr() == counters.get_combine_async_ptr() == 4096 + 4 * 24
        assert counters.get_combine_wait_ptr() == 4096 + 4 * 60
    assert EPLocalSyncCounters[8](ptr=4096).ptr == EPLocalSyncCounters(8, ptr=4096).ptr == 4096


def test_over_an_array_ptr_is_its_address_and_a_copy_is_over_the_same_memory():
    buffer = np.zeros(80, np.int32)
    counters = copy.copy(EPLocalSyncCounters[8](buffer[4:]))
    assert counters.ptr == buffer.ctypes.data + 16
    counters.get_dispatch_wait_ptr()[0] = 5
    assert np.flatnonzero(buffer).tolist() == [28]


@pytest.mark.parametrize(
    "n, buffer, words",
    [
        (0, None, "n_experts=0"),
        (2.0, None, "n_experts=2.0"),
        (True, None, "n_experts=True"),
        (8, np.zeros(75, np.int32), r"int32\[75\] must be an int32 array \[76\]"),
        (8, np.zeros(99), "float64"),
        (8, np.zeros((4, 99), np.int32), r"\[4, 99\]"),
        (8, np.zeros(200, np.int32)[::2], "contiguous"),
        (8, [0] * 99, "list"),
        (8, DeviceMemory(4096, (75,)), r"int32\[75\]"),
        (8, Allocation(4096, 303), "303 bytes"),
        (8, DeviceMemory(4096, (99,), "<i8"), "int64"),
        (8, DeviceMemory(4096, (99,), strides=(8,)), "contiguous"),
        (8, 0, "ptr=0"),
        (8, 4098, "ptr=4098"),
        (8, -4, "ptr=-4"),
        (8, True, "ptr=True"),
    ],
)
def test_refusals(n, buffer, words):
    with pytest.raises(EPValueError, match=words):
        EPLocalSyncCounters(n, buffer)
    with pytest.raises(EPValueError, match=words):
        EPLocalSyncCounters[n](buffer)


def test_one_memory_has_one_name():
    with pytest.raises(EPValueError, match="give one of them"):
        EPLocalSyncCounters(8, np.zeros(76, np.int32), ptr=4096)
