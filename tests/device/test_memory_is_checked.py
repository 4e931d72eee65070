"""Bounds, alignment, freed and read-only memory: each error names the buffer and the index."""

import ctypes
import gc

import numpy as np
import pytest
from litmus import line_of

from epmoe import device
from epmoe.device import (
    int32,
    kernel,
    load16,
    load_i32,
    shared_array,
    store16,
    store_i32,
    store_u64,
    thread_idx,
    u32,
    u64,
)
from epmoe.device.sim.memory import MEMORY, Memory, Span
from epmoe_ref.errors import EPError, EPStateError, EPValueError, OutOfBoundsError


@pytest.fixture
def machine():
    gc.collect()  # machines of other tests give their memory back now, not while a complaint is made
    MEMORY.freed.clear()
    return device.machine(2, seed=0)


def run(machine, made, address, block=1):
    machine.launch(made, 1, block, (address, 0, 0), stream=machine.stream(0))
    machine.synchronize()


@kernel()
def stores_16(params, num_tokens, my_rank):
    store16(params, 1, 2, 3, 4)


@kernel()
def loads_i32(params, num_tokens, my_rank):
    load_i32(params)


@kernel()
def stores_i32(params, num_tokens, my_rank):
    store_i32(params, 1)


def complaint(machine, made, address):
    with pytest.raises(OutOfBoundsError) as caught:
        run(machine, made, address)
    return str(caught.value)


def test_outside_a_buffer(machine):
    a = machine.alloc(256, "send_buf", rank=1)
    text = complaint(machine, stores_16, a.address + 256)
    line = line_of(stores_16, "store16(")
    assert text.startswith(f"store16 (16 bytes) of rank 0 block 0 warp 0 lane 0 of stores_16 #1 at {line}:")
    assert "is outside every buffer: 256 bytes after the start of send_buf of rank 1, which has 256 bytes" in text
    assert "16 bytes before send_buf of rank 1" in complaint(machine, stores_16, a.address - 16)
    assert "outside every buffer" in complaint(machine, loads_i32, 0)
    a.free()


def test_across_the_end_and_unaligned(machine):
    a = machine.alloc(24, "row", regions=[("row_offsets", 8, (4,), "u4", ("expert",))])
    for access, offset, said in (
        (stores_16, 16, "16 bytes after the start of row of rank 0, which has 24 bytes"),
        (loads_i32, 14, "row_offsets[expert 1] byte 2 of rank 0 is not 4-byte aligned"),
        (stores_16, 4, "row + 4 bytes of rank 0 is not 16-byte aligned"),
    ):
        assert said in complaint(machine, access, a.address + offset)
    a.free()


def test_freed_memory(machine):
    a = machine.alloc(64, "scratch")
    address = a.address
    a.free()
    a.free()
    assert "scratch of rank 0 was freed (byte 8 of it)" in complaint(machine, loads_i32, address + 8)


def test_memory_that_is_used_again_is_not_called_freed():
    memory, of = Memory(), bytearray(128)
    address = (ctypes.addressof(ctypes.c_char.from_buffer(of)) + 15) & ~15
    memory.remove(memory.add(Span(address, 64, "scratch", 0)))
    assert memory.complaint(address + 16, 16) == "scratch of rank 0 was freed (byte 16 of it)"
    memory.add(Span(address, 24, "row", 1))
    assert "16 bytes after the start of row of rank 1, which has 24 bytes" in memory.complaint(address + 16, 16)

    memory = Memory()  # beside an array that is too short
    memory.add(Span(address, 8, "row", 1))
    memory.remove(memory.add(Span(address + 16, 48, "scratch", 0)))
    assert memory.complaint(address + 16, 4) == (
        "scratch of rank 0 was freed (byte 0 of it), or 16 bytes after the start of row of rank 1, which has 8 bytes"
    )


def test_regions_tell_the_index(machine):
    a = machine.alloc(
        4096,
        "symmetric",
        rank=1,
        regions=[("recv_count", 256, (4, 2), "u8", ("local_expert", "src_rank")), ("flags", 512, 3, "i4", ("block",))],
    )
    describe = MEMORY.describe
    assert describe(a.address + 256 + 8 * 5) == "recv_count[local_expert 2, src_rank 1] of rank 1"
    assert describe(a.address + 256 + 8 * 5 + 3) == "recv_count[local_expert 2, src_rank 1] byte 3 of rank 1"
    assert describe(a.address + 512 + 8) == "flags[block 2] of rank 1"
    assert describe(a.address + 512 + 12) == "symmetric + 524 bytes of rank 1"
    assert describe(a.address) == "symmetric + 0 bytes of rank 1"
    a.free()


def test_arrays_of_the_caller_are_used_in_place(machine):
    x = np.zeros(8, np.int32)
    address = machine.adopt(x, "tokens", rank=1)
    assert machine.adopt(x, "tokens", rank=0) == address
    run(machine, stores_i32, address + 4)
    assert x.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    machine.release(address)
    run(machine, stores_i32, address + 8)
    machine.release(address)
    assert "tokens of rank 1 was freed" in complaint(machine, stores_i32, address)
    machine.release(address)


def test_read_only_strided_and_empty_arrays(machine):
    x = np.arange(8, dtype=np.int32)
    x.setflags(write=False)
    address = machine.adopt(x, "topk_ids")
    run(machine, loads_i32, address)
    assert "topk_ids + 4 bytes of rank 0 is read-only" in complaint(machine, stores_i32, address + 4)
    machine.release(address)
    with pytest.raises(EPValueError, match="grid_y is not C-contiguous"):
        machine.adopt(np.zeros((4, 4))[:, ::2], "grid_y")
    empty = machine.adopt(np.zeros((0, 5), np.float32), "empty")
    machine.release(empty)


def test_views_of_one_array_may_overlap(machine):
    x = np.zeros(16, np.int32)
    whole, part = machine.adopt(x, "whole"), machine.adopt(x[4:8], "part")
    run(machine, stores_i32, whole + 4 * 12)
    run(machine, stores_i32, part)
    assert x[12] == 1 and x[4] == 1
    machine.release(part)
    machine.release(whole)


def test_buffers_hold_what_is_written(machine):
    a = machine.alloc(1000, "a")
    assert a.address % 256 == 0 and (a.read(np.uint8, 1000) == 0xA5).all()
    a.write(np.arange(6, dtype=np.float32).reshape(2, 3), offset=100)
    assert a.read(np.float32, (2, 3), 100).tolist() == [[0, 1, 2], [3, 4, 5]]
    a.array(np.float32, (2, 3), 100)[1, 1] = 9
    copy = a.read(np.float32, 6, 100)
    a.fill(0)
    assert copy[4] == 9 and not a.read(np.uint8, 1000).any()
    a.fill(7, offset=990, nbytes=5)
    assert a.read(np.uint8, 10, 990).tolist() == [7] * 5 + [0] * 5
    for bad in (
        lambda: a.write(np.zeros(2), 990),
        lambda: a.read(np.int32, 251),
        lambda: a.fill(0, 999, 2),
        lambda: a.array(np.int8, 1, -1),
    ):
        with pytest.raises(EPValueError, match="which has 1000 bytes"):
            bad()
    a.free()
    with pytest.raises(EPStateError, match="was freed"):
        a.read(np.uint8, 1)
    with pytest.raises(EPValueError, match="of rank 99: ranks are 0 to"):
        machine.alloc(8, "b", 99)


@pytest.mark.parametrize("index", [-1, 64, 1000])
def test_shared_arrays_are_bounded(machine, index):
    @kernel()
    def reads_beside(params, num_tokens, my_rank):
        a = shared_array(64, int32)
        a[0] = a[index]

    @kernel()
    def adds_beside(params, num_tokens, my_rank):
        device.shared_add_i32(shared_array(64, int32), index, 1)

    text = complaint(machine, reads_beside, 0)
    assert "index %d of rank 0 block 0" % index in text and "has shape (64,)" in text
    assert "has 64 elements" in complaint(machine, adds_beside, 0)


def test_addresses_wrap_as_registers_do(machine):
    """The sum of two u64 is taken modulo 2**64, of two u32 modulo 2**32: a negative offset is one."""
    a = machine.alloc(64, "row")
    a.fill(0)

    @kernel()
    def steps_back(params, num_tokens, my_rank):
        at = params + u64(32) + u64(-16)
        store_i32(at, load_i32(at) + 1)
        device.red_add_relaxed_sys_i32(at, device.ld_relaxed_sys_i32(at))
        store16(at + u64(16), *load16(at))
        device.prefetch(at)
        stage = device.dynamic_shared() + u32(32) + u32(-16)
        device.shared_store_i32(stage, 3)
        device.fence_proxy_async()
        device.bulk_store(at, stage, 16)
        device.bulk_commit()
        device.bulk_wait()

    machine.launch(steps_back, 1, 1, (a.address, 0, 0), stream=machine.stream(), shared_bytes=64)
    assert a.read(np.int32, 16)[[4, 8]].tolist() == [3, 2]
    below = kernel()(lambda params, num_tokens, my_rank: store_i32(params + u64(-4), 1))
    assert "4 bytes before row of rank 0" in complaint(machine, below, a.address)
    a.free()


def test_shared_memory_is_bounded(machine):
    def told(offset, shared_bytes=64):
        @kernel()
        def stores(params, num_tokens, my_rank):
            device.shared_store_i32(device.dynamic_shared() + u32(offset), 1)

        with pytest.raises(OutOfBoundsError) as caught:
            machine.launch(stores, 1, 1, (0, 0, 0), stream=machine.stream(), shared_bytes=shared_bytes)
            machine.synchronize()
        return str(caught.value)

    assert "lies in no piece, or the bytes pass its end (1040 to 1104: dynamic shared memory of block 0)" in told(64)
    assert "shared address 1042 is not 4-byte aligned (1040 to 1104:" in told(2)
    assert told(0, shared_bytes=0).endswith("(launch with shared_bytes=... to have some)")


def test_shared_arrays_of_two_axes_and_their_poison(machine):
    a = machine.alloc(64, "out")

    @kernel()
    def corners(params, num_tokens, my_rank):
        s = shared_array((4, 8), int32)
        store_i32(params, s[3, 7])
        s[3, 7] = 2**31 + 5
        store_i32(params + u64(4), s[3, 7])

    @kernel()
    def beyond(params, num_tokens, my_rank):
        shared_array((4, 8), int32)[3, 8] = 1

    run(machine, corners, a.address)
    assert a.read(np.uint32, 2).tolist() == [0xA5A5A5A5, 2**31 + 5]
    assert "index (3, 8)" in complaint(machine, beyond, 0)
    a.free()


def test_stores_wrap_as_registers_do(machine):
    a = machine.alloc(64, "out")

    @kernel()
    def wide(params, num_tokens, my_rank):
        store_i32(params, 2**31 + 1)
        device.store_u8(params + u64(4), 0x1FE)
        store_u64(params + u64(8), -1)
        device.atomic_add_relaxed_gpu_i32(params, 2**31 - 1)

    run(machine, wide, a.address)
    assert a.read(np.uint32, 1)[0] == 0 and a.read(np.uint8, 1, 4)[0] == 0xFE
    assert a.read(np.uint64, 1, 8)[0] == 2**64 - 1
    a.free()


def test_an_exception_of_a_kernel_says_which_thread(machine):
    @kernel()
    def fails(params, num_tokens, my_rank):
        if thread_idx() == 33:
            raise KeyError("broken")

    with pytest.raises(KeyError) as caught:
        run(machine, fails, 0, block=64)
    notes = getattr(caught.value, "__notes__", ["in rank 0 block 0 warp 1 lane 1 of fails #1"])
    assert "in rank 0 block 0 warp 1 lane 1 of fails #1" in notes
    assert not isinstance(caught.value, EPError) and load16.__doc__
