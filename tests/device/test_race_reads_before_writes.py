"""Reads of memory that no thread has written yet race with later writes by any intrinsic."""

import numpy as np
import pytest
from litmus import DATA, first_race, line_of

from epmoe import device
from epmoe.device import block_idx, kernel, load_i32, store16, store_i32, syncthreads, thread_idx, u64
from epmoe.device.sim import accesses
from epmoe_ref.errors import RaceError

WRITES = {
    "store_i32": lambda at: store_i32(at, 1),
    "store16": lambda at: store16(at, 1, 1, 1, 1),
    "st_relaxed": lambda at: device.st_relaxed_gpu_i32(at, 1),
    "atomic_add": lambda at: device.atomic_add_relaxed_gpu_i32(at, 1),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("listed", [accesses.LISTED, 5])
def test_a_later_write_races_with_them(name, listed, monkeypatch):
    monkeypatch.setattr(accesses, "LISTED", listed)

    @kernel()
    def late_write(params, num_tokens, my_rank):
        if block_idx() == 0:
            load_i32(params + u64(DATA))  # the read
        elif thread_idx() == 0:
            device.nanosleep(100)
            for _ in range(200):  # some time later
                load_i32(params + u64(DATA + 64))
            WRITES[name](params + u64(DATA))

    race = first_race(late_write, grid=2)
    assert "data[thread 0, word 0]" in race and line_of(late_write, "# the read") in race


def test_reads_ordered_before_the_write_do_not():
    @kernel()
    def ordered(params, num_tokens, my_rank):
        load_i32(params + u64(DATA))
        syncthreads()
        if thread_idx() == 40:
            store_i32(params + u64(DATA), 1)

    assert first_race(ordered, block=64) is None


def test_a_write_through_another_view_of_the_same_array():
    machine = device.machine(1, racecheck=True, seed=1)
    words = np.zeros(64, np.int32)
    whole, part = machine.adopt(words, "whole"), machine.adopt(words[4:], "part")

    @kernel()
    def through_views(params, num_tokens, my_rank):
        if block_idx() == 0:
            load_i32(u64(whole + 12))  # of the one view only
            load_i32(u64(part))
        else:
            store_i32(u64(part), 1)

    machine.launch(through_views, 2, 32, (whole, 0, 0), stream=machine.stream(0))
    with pytest.raises(RaceError, match="data race on"):
        machine.synchronize()
    machine.release(whole)
    machine.release(part)
