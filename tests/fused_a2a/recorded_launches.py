"""Launches that are recorded and started again as GpuMachine does it, on a simulator that stands in for a GPU.

One rank a process; the caller's arrays are seen as device arrays.
"""

import ctypes
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from rows_group import BF16, OneRank, group_of

from epmoe import LaunchConfig
from epmoe.device.captures import CAPTURED, GONE, HELD
from epmoe.fused_a2a import buffers
from epmoe.fused_a2a.buffer import Buffer
from epmoe.host import inputs
from epmoe.host.arrays import view
from epmoe.kernels.written_blocks import words_at

T, EXPERTS, TOP_K, HIDDEN = 5, 4, 2, 16
ROWS = [
    np.zeros((T, HIDDEN), BF16),
    np.zeros((T, TOP_K), np.int64),
    np.zeros((T, TOP_K), np.float32),
    np.zeros((T, HIDDEN), BF16),
]
HYBRID = [
    np.zeros((T, HIDDEN), BF16),
    np.zeros((T, EXPERTS), bool),
    np.zeros((T, EXPERTS), np.float32),
    np.zeros((12, HIDDEN), BF16),
]


class OnDevice:
    """A NumPy array as a library for GPUs would show it."""

    def __init__(self, machine, array):
        self.values, self.dtype = array, array.dtype
        machine.adopt(array, "given", 0)

    @property
    def __cuda_array_interface__(self):
        return dict(self.values.__array_interface__, strides=None)


def are_held(references):
    """Whether objects are referred to more often, or less, than they were; the address of their References, or 0."""
    n = ctypes.c_int64.from_address(references).value if references else 0
    words = (ctypes.c_int64 * (2 * n)).from_address(references + 8)
    return any(
        ctypes.c_int32.from_address(at).value != count for at, count in zip(words[::2], words[1::2])
    )


class Recorded(NamedTuple):
    """A launch."""

    kernel: object
    grid: int
    threads: int
    values: tuple
    how: dict


class Flat(NamedTuple):
    """What GpuMachine.flat gives: words, and whether one is counted from an address."""

    words: np.ndarray
    counted_from: np.ndarray
    reads: list

    ADDRESSES = 1


class Slot:
    """Memory for the parameters of recorded launches, and these with the arguments that the words say."""

    def __init__(self, recorder):
        self.recorder, self.memory, self.owner = recorder, [], None

    def fill(self, flat, addresses):
        words = flat.words + np.array([0, *addresses])[flat.counted_from]
        launches, self.memory = [], []
        for one in flat.reads:
            n, n_words = len(one.values), len(words_at(one.values[0]))
            block = self.recorder.machine.alloc(8 * n_words, "parameters")
            block.write(words[n : n + n_words].astype(np.uint64))
            launches.append(one._replace(values=(block.address, *map(int, words[1:n]))))
            words = words[n + n_words :]
            self.memory.append(block)
        self.start = self.recorder.again(launches)

    def begin(self):
        self.recorder.n_begun += 1
        return self.start(0)


class Recorder:
    """What GpuMachine has for launches that start again, on a simulator's machine."""

    def __init__(self, machine, monkeypatch):
        self.machine, self.recorded, self.n_started, self.launch = machine, None, 0, machine.launch
        self.capturing, self.n_begun = False, 0
        for stream in machine.streams:
            monkeypatch.setattr(stream, "capture", self.capture)
        for name, value in dict(
            n_changes=0,
            changed=self.changed,
            has_captured=False,
            launch=self.record,
            recording=self.recording,
            again=self.again,
            bound=partial,
            flat=self.flat,
            slots=lambda n, flat: self,
        ).items():
            monkeypatch.setattr(machine, name, value, raising=False)

    def changed(self):
        self.machine.n_changes += 1

    def capture(self):
        self.machine.has_captured |= self.capturing
        return self.capturing

    def record(self, kernel, grid, threads, values, **how):
        if self.recorded is not None:
            self.recorded.append(Recorded(kernel, grid, threads, values, how))
        self.launch(kernel, grid, threads, values, **how)

    @contextmanager
    def recording(self):
        self.recorded = launches = []
        yield launches
        self.recorded = None

    def again(self, launches):
        launches = list(launches)  # as they are now

        made_after = self.machine.n_changes

        def start(references):
            if self.machine.n_changes != made_after:
                return GONE
            if are_held(references):
                return HELD
            if not launches:
                return 0
            if self.capturing:
                return CAPTURED
            self.n_started += 1
            for one in launches:
                self.launch(one.kernel, one.grid, one.threads, one.values, **one.how)
            self.machine.synchronize()
            return 0

        return start

    def flat(self, launches, blocks):
        words = [
            word
            for one, block in zip(launches, blocks)
            for word in (0, *one.values[1:], *map(int, block))
        ]
        return Flat(np.array(words), np.zeros(len(words), int), list(launches))

    def serve(self, flat):
        return True

    def take(self):
        return Slot(self)

    def free(self):
        """Slots free their memory with the machine."""


@pytest.fixture
def group(monkeypatch):
    """A world of one rank, seen as one rank a process on a GPU."""
    monkeypatch.setattr(inputs, "_array", lambda machine, given, what: view(given, what))
    world = OneRank(group_of(1))
    world.recorder = Recorder(world.machine, monkeypatch)
    for kind in (buffers._buffer, buffers._hybrid_ep_buffer):
        kind[world] = Buffer(world, launch=LaunchConfig(2, 32))
        kind[world].steady.applies = True
    yield world
    for kind in (buffers._buffer, buffers._hybrid_ep_buffer):
        kind.pop(world).close()
