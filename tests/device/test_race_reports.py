"""The exact text of a report, and machines with several reports."""

import re

import numpy as np
import pytest
from litmus import DATA, OUT, REGIONS, execute, line_of

from epmoe import device
from epmoe.device import block_idx, kernel, load_i32, store_i32, syncthreads, thread_idx, u64
from epmoe_ref.errors import RaceError


@device.device_fn
def await_flag(word):
    while device.ld_acquire_gpu_i32(word) == 0:
        pass


@kernel()
def relaxed_signal(params, num_tokens, my_rank):
    i = thread_idx()
    if block_idx() == 0:
        if i == 5:
            store_i32(params + u64(DATA + 16 * i), 1)
        syncthreads()
        if i == 0:
            device.st_relaxed_gpu_i32(params, 1)
    else:
        if i == 0:
            await_flag(params)
        syncthreads()
        if i == 40:
            store_i32(params + u64(OUT), load_i32(params + u64(DATA + 16 * 5)))


def test_a_report_word_for_word():
    with pytest.raises(RaceError) as caught:
        execute(relaxed_signal, grid=2, block=64, seed=0)
    words = "load_i32", "store_i32(params + u64(DATA", "st_relaxed", "await_flag"
    read, write, signal, call = (line_of(relaxed_signal, word) for word in words)
    wait = f"{call.partition(':')[0]}:{await_flag.__code__.co_firstlineno + 2}"
    assert str(caught.value) == (
        f"data race on data[thread 5, word 0] of rank 0: the read at {read} is not ordered after the write at {write}\n"
        f"  1. write {write} store_i32\n"
        "     by rank 0 block 0 warp 0 lane 5 of relaxed_signal #1\n"
        f"  2. read  {read} load_i32\n"
        "     by rank 0 block 1 warp 1 lane 8 of relaxed_signal #1\n"
        "  the second access's thread has acquired nothing from the first one's block\n"
        f"  did not synchronise: {signal} st_relaxed_gpu_i32 -> {wait} ld_acquire_gpu_i32 (called from {call}): "
        "the write is relaxed"
    )


def test_a_store_that_synchronised_at_one_scope_is_not_blamed_for_the_fence_of_another():
    @kernel()
    def signals(params, num_tokens, my_rank):
        if block_idx() == 0:
            device.fence_acq_rel_cta()
            device.st_release_gpu_i32(params, 1)
            store_i32(params + u64(DATA), 1)  # too late
        else:
            await_flag(params)
            store_i32(params + u64(OUT), load_i32(params + u64(DATA)))

    with pytest.raises(RaceError) as caught:
        execute(signals, grid=2, block=1, seed=0)
    assert "not after this one: the release comes before it" in str(caught.value)
    assert "did not synchronise" not in str(caught.value)


def test_a_machine_can_collect_one_race_for_each_pair_of_lines():
    @kernel()
    def two_races(params, num_tokens, my_rank):
        store_i32(params + u64(DATA), thread_idx())
        store_i32(params + u64(OUT), thread_idx())

    machine = device.machine(1, seed=0, racecheck=True, stop_at_first_race=False)
    buffer = machine.alloc(4096, "words", regions=REGIONS)
    machine.launch(two_races, 1, 32, (buffer.address, 0, 0), stream=machine.stream())
    machine.synchronize()
    assert len(machine.races) == 2
    assert "data[thread 0, word 0]" in machine.races[0] and "out[i 0]" in machine.races[1]
    buffer.free()


def test_the_host_has_to_synchronise():
    @kernel()
    def reads_and_writes(params, num_tokens, my_rank):
        store_i32(params + u64(4 * thread_idx()), load_i32(params + u64(256 + 4 * thread_idx())))

    machine = device.machine(1, seed=0, racecheck=True)
    buffer, stream = machine.alloc(4096, "words"), machine.stream()
    buffer.fill(0)
    with pytest.raises(RaceError) as caught, machine.hold():
        machine.launch(reads_and_writes, 1, 32, (buffer.address, 0, 0), stream=stream)
        buffer.write(np.ones(32, np.int32), 256)
    assert "words + " in str(caught.value)
    name, place = caught.value.args[0].splitlines()[-2:]
    assert re.match(r"  2. write test_race_reports.py:\d+$", name)
    assert place.endswith(
        "by the host while the launch was in flight: move it before the launch, or call synchronize() first"
    )
    with machine.hold():
        buffer.write(np.ones(32, np.int32), 256)  # before the launch: ordered
        machine.launch(reads_and_writes, 1, 32, (buffer.address, 0, 0), stream=stream)
        buffer.write(np.ones(32, np.int32), 1024)  # elsewhere
    assert (buffer.read(np.int32, 32) == 1).all()
    buffer.free()
