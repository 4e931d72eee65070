"""The history of memory in a recording: every element's values over the steps, and their writers."""

from typing import NamedTuple

import numpy as np

from epmoe import layout
from epmoe.explain.arrays import Arrays, label


class Change(NamedTuple):
    """An element got a value: the step, the value, and the event that wrote it (None: its value at the beginning)."""

    step: int
    value: object
    event: object


class Filled(NamedTuple):
    """A message or a row was written: its first and last step, the last event, and the blocks that took part."""

    begun: int
    done: int
    event: object
    blocks: tuple

    @property
    def who(self):
        """The writers in words: "rank 1, blocks 0 and 2"."""
        names = " and ".join(map(str, self.blocks))
        return f"rank {self.event.rank}, block{'s' if len(self.blocks) > 1 else ''} {names}"


class Message(NamedTuple):
    """A message in recv_buf: how it was written, and its token's number."""

    filled: Filled
    token: int


class History:
    """The values written to each element of a recording's arrays, and the state at any step."""

    def __init__(self, recording):
        self.recording, self.arrays = recording, Arrays(recording)
        self._writes = {}  # (name, rank) -> events that wrote to it
        for event in recording.events:
            if event.wrote is not None:
                touched = self.arrays.find(event)
                if touched is not None:
                    self._writes.setdefault((touched.array.name, touched.array.rank), []).append(event)
        self._cache = {}

    def writes(self, name, rank):
        """Events that wrote to an array."""
        return self._writes.get((name, rank), [])

    def before(self, name, rank):
        """The array's content before the first step; None if it was not recorded."""
        array = self.arrays.get(name, rank)
        for (low, high), raw in self.recording.recorder.runs[0].before.items():
            if low <= array.address and array.address + array.nbytes <= high:
                start = array.address - low
                return np.frombuffer(raw, np.uint8, array.nbytes, start).view(array.dtype).reshape(array.shape)
        return None

    def of(self, name, rank):
        """{index: [Change, ...]} for each element of an array of small numbers; the first Change is the start value."""
        key = name, rank
        if key not in self._cache:
            array = self.arrays.get(name, rank)
            if array is None:
                return {}
            before = self.before(name, rank)
            found = {
                index: [] if before is None else [Change(0, int(before[index]), None)]
                for index in np.ndindex(array.shape)
            }
            for event in self.writes(name, rank):
                for index, value in elements(array, event):
                    changes = found[index]
                    if not changes or changes[-1].value != value:
                        changes.append(Change(event.step, value, event))
            self._cache[key] = found
        return self._cache[key]

    def at(self, name, rank, index, step):
        """The value of an element after `step` operations, or None if it was not written by then."""
        value = None
        for change in self.of(name, rank).get(index, ()):
            if change.step > step:
                break
            value = change.value
        return value

    def bytes_at_end(self, name, rank):
        """uint8 content of an array: its content before the first step, with all recorded writes applied."""
        array = self.arrays.get(name, rank)
        before = self.before(name, rank)
        raw = np.zeros(array.nbytes, np.uint8) if before is None else before.reshape(-1).view(np.uint8).copy()
        for event in self.writes(name, rank):
            start = event.address - array.address
            raw[start : start + event.nbytes] = np.frombuffer(event.wrote, np.uint8)[: len(raw) - start]
        return raw

    def filled(self, name, rank, axes):
        """{index over the first `axes` axes: Filled} of the parts of an array that were written."""
        array = self.arrays.get(name, rank)
        found = {}
        if array is None:
            return found
        part = int(np.prod(array.shape[axes:], dtype=np.int64)) * array.dtype.itemsize
        for event in self.writes(name, rank):
            start = event.address - array.address
            for n in range(start // part, (min(start + event.nbytes, array.nbytes) - 1) // part + 1):
                index = tuple(int(i) for i in np.unravel_index(n, array.shape[:axes]))
                begun, blocks = (found[index].begun, found[index].blocks) if index in found else (event.step, ())
                found[index] = Filled(begun, event.step, event, tuple(sorted({*blocks, event.block})))
        return found

    def messages(self, rank):
        """Messages that arrived at a rank: {(local_expert, src_rank, slot): Message}."""
        sizes = layout.message(self.recording.cfg)
        array = self.arrays.get("dispatch_recv_buf", rank)
        if array is None:
            return {}
        raw = self.bytes_at_end("dispatch_recv_buf", rank).reshape(array.shape)
        found = {}
        for index, filled in self.filled("dispatch_recv_buf", rank, 3).items():
            message = raw[index]
            found[index] = Message(filled, int(message[sizes.src_info_offset :][:4].view(np.int32)[0]))
        return found

    def row_token(self, rank, row):
        """(src_rank, token) of a row of output_tokens."""
        d = self.recording.dispatched[rank]
        group = int(np.searchsorted(d.row_offsets, row, "right")) - 1
        ends = np.cumsum(d.recv_count[group])  # an expert's rows are ordered by src_rank
        return int(np.searchsorted(ends, row - int(d.row_offsets[group]), "right")), int(d.src_info[row][0])

    def label(self, name, rank, index):
        """An element's place as text."""
        array = self.arrays.get(name, rank)
        return label(name, rank, index, array.axes if array else ())


def elements(array, event):
    """The (index, value) pairs that an event wrote."""
    first = event.address - array.address
    size = array.dtype.itemsize
    wrote = event.wrote[: array.nbytes - first]
    if first % size or len(wrote) % size:
        return
    values = np.frombuffer(wrote, array.dtype)
    for n, value in enumerate(values):
        yield tuple(int(i) for i in np.unravel_index(first // size + n, array.shape)), int(value)
