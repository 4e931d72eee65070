"""What a kernel tells the host arrives whole: behind the kernels before it, without a race, and for any thread."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from commands_shown import python

from epmoe import device
from epmoe.device import ld_acquire_sys_u64, load_u32, store_u32, thread_idx, u32, u64
from epmoe.device.telling import HEADER, THREADS, Telling, tell_host
from epmoe_ref.errors import EPStateError

ON_BOTH = pytest.mark.parametrize("on", ["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
SIZES = 1, 40, 7  # words of the arrays


@device.kernel(max_threads=32, words=3)
def write_numbers(params, n, first):
    """Numbers from `first` on."""
    to, _, _ = params
    i = u64(thread_idx())
    while i < u64(n):
        store_u32(u64(to + u64(4) * i), u32(u64(first) + i))
        i = u64(i + u64(32))


@device.kernel(max_threads=32, words=3)
def look_as_the_host(params, n, my_rank):
    """One thread waits for the word, and copies what was told."""
    memory, number, to = params
    if thread_idx() == 0:
        while ld_acquire_sys_u64(memory) != number:
            pass
        i = u64(0)
        while i < u64(n):
            store_u32(u64(to + u64(4) * i), load_u32(u64(memory + u64(HEADER) + u64(4) * i)))
            i = u64(i + u64(1))


@ON_BOTH
@pytest.mark.parametrize("n_arrays", [1, 3, 8])
def test_what_was_written_before_is_told(n_arrays, on):
    machine = device.machine(1)
    stream, buffer = machine.stream(0), machine.alloc(8192, "numbers")
    telling, sizes = Telling(machine, 0, stream), (SIZES * 3)[:n_arrays]
    arrays = [(buffer.address + 1024 * i, 4 * n) for i, n in enumerate(sizes)]
    for first in range(5):
        machine.launch(write_numbers, 1, 32, ((buffer.address, 0, 0), 2048, first), stream=stream)
        told = telling.tell(arrays, 30.0)
        want = [list(range(first + 256 * i, first + 256 * i + n)) for i, n in enumerate(sizes)]
        assert [a.view(np.uint32).tolist() for a in told] == want
    telling.free()
    buffer.free()


def test_the_handler_of_a_signal_may_not_ask_while_its_thread_waits(monkeypatch):
    machine = device.machine(1)
    telling, buffer = Telling(machine, 0, machine.stream(0)), machine.alloc(64, "numbers")
    buffer.write(np.arange(16, dtype=np.uint32))
    array, wait, refused = (buffer.address, 16), telling.words.wait, []

    def interrupted(timeout):
        with pytest.raises(EPStateError, match="rank 0: a signal handler called trimmed") as error:
            telling.tell([array], 30.0)
        refused.append(error.value)
        return wait(timeout)

    monkeypatch.setattr(telling.words, "wait", interrupted)
    assert telling.tell([array], 30.0)[0].view(np.uint32).tolist() == [0, 1, 2, 3]
    monkeypatch.undo()
    assert refused and len(telling.tell([array], 30.0)) == 1
    telling.free()
    buffer.free()


@ON_BOTH
def test_any_thread_may_ask(on):
    machine = device.machine(1)
    telling, buffer = Telling(machine, 0, machine.stream(0)), machine.alloc(64, "numbers")
    buffer.write(np.arange(16, dtype=np.uint32))

    def ask(n):
        return [telling.tell([(buffer.address, 4 * n)], 30.0)[0].view(np.uint32).tolist() for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, (16, 5))) == [[list(range(n))] * 3 for n in (16, 5)]
    telling.free()
    buffer.free()


@pytest.mark.parametrize("seed", range(4))
def test_the_host_reads_without_a_race(seed):
    machine = device.machine(2, seed=seed, racecheck=True)
    names = "numbers", "what the host is told", "seen"
    source, memory, seen = buffers = [machine.alloc(4096, name) for name in names]
    source.write(np.arange(1024, dtype=np.uint32))
    memory.fill(0)
    arrays = [n for i, size in enumerate(SIZES) for n in (source.address + 1024 * i, size)]
    launch = machine.prepared(tell_host, 1, THREADS, (), 0, 0, stream=machine.stream(0))
    launch.start(memory.address, 1, memory.address + HEADER, *arrays)
    machine.launch(
        look_as_the_host, 1, 32, ((memory.address, 1, seen.address), sum(SIZES), 1), stream=machine.stream(1)
    )
    machine.synchronize()
    want = [i for at, n in enumerate(SIZES) for i in range(256 * at, 256 * at + n)]
    assert seen.read(np.uint32, (sum(SIZES),)).tolist() == want
    for buffer in buffers:
        buffer.free()


@pytest.mark.gpu
def test_a_broken_kernel_is_named_and_is_no_timeout():
    """In a process of its own, whose context the error spoils."""
    for call in ("rows", "experts", "trimmed"):
        done = python(str(Path(__file__).parent / "broken_kernel_program.py"), call, EPMOE_DEVICE="gpu")
        assert done.stdout.startswith("EPError CUDA: CUDA_ERROR"), (call, done.stdout, done.stderr)
