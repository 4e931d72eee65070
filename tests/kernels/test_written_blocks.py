"""Parameter blocks: found again, never more than a few hundred, and kept for CUDA graphs that read them at replays."""

from types import SimpleNamespace

import numpy as np
import pytest

from epmoe.kernels import written_blocks
from epmoe.kernels.written_blocks import WrittenBlocks


class Machine:
    """Hands out buffers that know whether they were freed; `capture` is the capture that its stream is in."""

    def __init__(self):
        self.has_captured, self.capture, self.n_waits, self.made = False, 0, 0, []
        self.streams = [SimpleNamespace(capture=lambda: self.capture)]

    def alloc(self, nbytes, name, rank):
        """A buffer."""
        buffer = SimpleNamespace(
            is_free=False, write=lambda words: None, address=256 * len(self.made)
        )
        buffer.free = lambda: setattr(buffer, "is_free", True)
        self.made.append(buffer)
        return buffer

    def synchronize(self):
        """Not allowed while the stream is captured."""
        assert not self.capture
        self.n_waits += 1


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(written_blocks, "MAX_BLOCKS", 3)
    return Machine()


def write(blocks, machine, key):
    return blocks.find(key) or blocks.write(machine, 0, key, np.zeros(4, np.uint64))


def test_what_was_written_is_found_until_there_are_too_many(machine):
    blocks = WrittenBlocks()
    first = write(blocks, machine, 1)
    assert write(blocks, machine, 1) is first and len(blocks) == 1
    for key in 2, 3:
        write(blocks, machine, key)
    assert machine.n_waits == 0
    write(blocks, machine, 4)
    assert (
        machine.n_waits == 1
        and len(blocks) == 1
        and [b.is_free for b in machine.made] == [True, True, True, False]
    )


def test_blocks_of_captured_calls_live_on_and_those_of_other_calls_do_not(machine):
    blocks = WrittenBlocks()
    known = write(blocks, machine, 1)
    machine.has_captured, machine.capture = True, 7
    kept = [known] + [write(blocks, machine, key) for key in (1, 2, 3, 4, 5)][1:]
    machine.capture = 0
    for key in range(6, 20):
        write(blocks, machine, key)
    assert not any(b.is_free for b in kept), "a graph reads these at its next replay"
    assert sum(not b.is_free for b in machine.made) <= len(kept) + 3, (
        "blocks that no graph reads pile up"
    )
    blocks.close()
    assert all(b.is_free for b in machine.made)
