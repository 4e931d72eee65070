"""The history of memory in a recording: every element's values over the steps, and their writers."""

import math
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
    """A message, row or result was written: the last event that wrote to it, and its token's number."""

    event: object
    token: int


# array -> how many of its first axes name one message, row or result
FILLED = {"dispatch_recv_buf": 3, "output_tokens": 1, "combine_recv_buf": 2, "combined": 1}


class History:
    """The values written to each element of a recording's arrays, and the events that wrote them."""

    def __init__(self, recording):
        self.recording, self.arrays = recording, Arrays(recording)
        self._writes = {}  # (name, rank) -> events that wrote to it
        for event in recording.events:
            if event.wrote is not None:
                touched = self.arrays.find(event)
                if touched is not None:
                    self._writes.setdefault((touched.array.name, touched.array.rank), []).append(event)

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
        array = self.arrays.get(name, rank)
        if array is None:
            return {}
        before = self.before(name, rank)
        found = {
            index: [] if before is None else [Change(0, int(before[index]), None)] for index in np.ndindex(array.shape)
        }
        for event in self.writes(name, rank):
            for index, value in elements(array, event):
                changes = found[index]
                if not changes or changes[-1].value != value:
                    changes.append(Change(event.step, value, event))
        return found

    def bytes_at_end(self, array):
        """uint8 content of an array: its content before the first step, with all recorded writes applied."""
        raw = self.before(array.name, array.rank).reshape(-1).view(np.uint8).copy()
        for event in self.writes(array.name, array.rank):
            start = event.address - array.address
            raw[start : start + event.nbytes] = np.frombuffer(event.wrote, np.uint8)[: len(raw) - start]
        return raw

    def filled(self, name, rank):
        """{index: Filled} of the messages, rows or results in an array that were written."""
        array = self.arrays.get(name, rank)
        if array is None:
            return {}
        shape, last = array.shape[: FILLED[name]], {}
        part = array.nbytes // math.prod(shape)
        for event in self.writes(name, rank):
            start = event.address - array.address
            for n in range(start // part, (min(start + event.nbytes, array.nbytes) - 1) // part + 1):
                last[tuple(int(i) for i in np.unravel_index(n, shape))] = event
        if name == "dispatch_recv_buf":
            messages = self.bytes_at_end(array).reshape(array.shape)
            at = layout.message(self.recording.cfg).src_info_offset
            tokens = messages[..., at : at + 4].view(np.int32)[..., 0]
        elif name == "output_tokens":
            tokens = self.recording.dispatched[rank].src_info[:, 0]
        else:
            tokens = np.indices(shape)[0]
        return {index: Filled(event, int(tokens[index])) for index, event in last.items()}

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
