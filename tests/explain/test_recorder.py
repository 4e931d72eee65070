"""The simulator's recorder: every operation on global memory, with values, and which release an acquire saw."""

import ctypes

import numpy as np
import pytest

from epmoe.device import (
    block_idx,
    fence_acq_rel_gpu,
    i32,
    int32,
    kernel,
    ld_acquire_gpu_i32,
    ld_relaxed_gpu_i32,
    load_i32,
    machine,
    red_add_release_gpu_i32,
    shared_array,
    st_release_gpu_i32,
    store_i32,
    syncthreads,
    thread_idx,
    u64,
)
from epmoe.device.sim.recorder import Recorder

THREADS = 32


@kernel
def passes_a_message(params, num_tokens, my_rank):
    data, flag, out = u64(params), u64(params + 64), u64(params + 128)
    scratch = shared_array(THREADS, int32)
    scratch[thread_idx()] = i32(thread_idx())
    if block_idx() == 0:
        if thread_idx() == 0:
            store_i32(data, i32(42))
            st_release_gpu_i32(flag, i32(1))
    else:
        if thread_idx() == 0:
            while ld_acquire_gpu_i32(flag) != 1:
                pass
        syncthreads()
        store_i32(out + u64(4) * u64(thread_idx()), i32(load_i32(data) + scratch[thread_idx()]))


@kernel
def polls_then_fences(params, num_tokens, my_rank):
    data, flag, out = u64(params), u64(params + 64), u64(params + 128)
    if thread_idx() == 0:
        if block_idx() < 2:
            store_i32(data + u64(4) * u64(block_idx()), i32(20 + block_idx()))
            red_add_release_gpu_i32(flag, i32(1))
        else:
            while ld_relaxed_gpu_i32(flag) != 2:
                pass
            fence_acq_rel_gpu()
            store_i32(out, i32(load_i32(data) + load_i32(data + u64(4))))


def record(k, grid, seed):
    recorder = Recorder()
    m = machine(1, seed=seed, recorder=recorder)
    buffer = m.alloc(
        256,
        "words",
        regions=[
            ("data", 0, (16,), np.int32, ("i",)),
            ("flag", 64, (16,), np.int32, ("i",)),
            ("out", 128, (32,), np.int32, ("i",)),
        ],
    )
    buffer.fill(0)
    m.launch(k, grid, THREADS, (buffer.address, 0, 0), stream=m.stream())
    return recorder, buffer, buffer.read(np.int32, (64,))


def on(recorder, region):
    return [e for e in recorder.events if e.span is not None and e.span.describe(e.address).startswith(region)]


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_an_acquire_names_the_release_that_it_saw(seed):
    recorder, _, words = record(passes_a_message, 2, seed)
    assert words[32:64].tolist() == [42 + i for i in range(32)]
    (signal,) = [e for e in on(recorder, "flag") if e.kind == "store"]
    assert (signal.order, signal.scope, signal.block, signal.wrote) == ("release", "gpu", 0, b"\1\0\0\0")
    (saw,) = [e for e in on(recorder, "flag") if e.kind == "load" and e.sources]
    assert (saw.order, saw.block, saw.saw, saw.sources) == ("acquire", 1, b"\1\0\0\0", (signal.number,))
    assert saw.line.startswith("test_recorder.py:") and saw.line != signal.line
    (barrier,) = [e for e in recorder.events if e.kind == "barrier"]
    assert (barrier.block, barrier.thread, barrier.step > saw.step) == (1, -1, True)
    assert not [e for e in recorder.events if e.word.startswith("shared array")]


@pytest.mark.parametrize("seed", range(4))
def test_a_fence_after_relaxed_polls_acquires_all_releases_of_an_atomic_word(seed):
    recorder, _, words = record(polls_then_fences, 3, seed)
    assert words[32] == 41
    added = [e.number for e in on(recorder, "flag") if e.kind == "atomic"]
    (fence,) = [e for e in recorder.events if e.kind == "fence"]
    assert len(added) == 2 and fence.sources == tuple(added)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_what_was_written_makes_the_final_memory(seed):
    recorder, buffer, _ = record(passes_a_message, 2, seed)
    memory = bytearray(recorder.runs[0].before[buffer.address, buffer.address + buffer.nbytes])
    for e in recorder.events:
        if e.wrote is not None:
            memory[e.address - buffer.address : e.address - buffer.address + e.nbytes] = e.wrote
        if e.saw is not None and e.kind == "load":
            assert bytes(memory[e.address - buffer.address : e.address - buffer.address + e.nbytes]) == e.saw
    assert bytes(memory) == ctypes.string_at(buffer.address, buffer.nbytes)


def test_blocks_begin_and_end_and_steps_never_fall():
    recorder, _, _ = record(passes_a_message, 2, 0)
    assert sorted((e.kind, e.block) for e in recorder.events if e.kind in ("begin", "end")) == [
        ("begin", 0),
        ("begin", 1),
        ("end", 0),
        ("end", 1),
    ]
    steps = [e.step for e in recorder.events]
    assert steps == sorted(steps)
    assert [e.number for e in recorder.events] == list(range(len(steps)))


def test_without_a_recorder_nobody_looks():
    m = machine(1, seed=0, racecheck=False)
    assert m.new_detector([]) is None
