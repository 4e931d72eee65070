"""Stamps: when each block of a kernel reached each named mark, by the device's clock.

LaunchConfig(trace=True) compiles them in; without it a kernel holds no instruction of them. Thread 0 of a block writes
the time into its row of the rank's trace buffer, [blocks, marks] uint64: nanoseconds on a GPU, whose clock is the same
for all blocks of a launch but not the same on all GPUs, and steps of the scheduler in the simulator. A mark comes after
what it names in the program order of thread 0, and says nothing of other threads unless a barrier lies before it.
"""

from typing import NamedTuple

import numpy as np

from epmoe.device import block_idx, device_fn, globaltimer, store_u64, thread_idx, u64

MARKS = {
    "start": "the block has begun",
    "claimed": "dispatch: the block's messages have their places",
    "encoded": "dispatch: and their payloads are encoded",
    "announced": "dispatch: the messages are counted, and the counts are announced next (rows: are announced)",
    "sent": "all messages (rows) of the block's first warp are written (dispatch of pairs: and released)",
    "counted": "dispatch: the counts of all peers have come (combine: the block knows its rows)",
    "placed": "dispatch: the block knows every row's place (rows: the leader block has recorded them)",
    "arrived": "the first warp has acquired a row of its own (combine: all rows of its first token)",
    "copied": "dispatch: all rows of the block are copied",
    "reduced": "combine: all tokens of the block's first warp are reduced",
    "left": "dispatch: the block's first warp has nothing more to do (combine: its part in the call is over)",
}
N_MARKS = len(MARKS)
START, CLAIMED, ENCODED, ANNOUNCED, SENT, COUNTED, PLACED, ARRIVED, COPIED, REDUCED, LEFT = range(N_MARKS)


class Stamps(NamedTuple):
    """The stamps of a kernel's last launch: kernel's name, rank, and times [blocks, marks] uint64, 0 for none."""

    kernel: str
    rank: int
    times: np.ndarray

    @property
    def marks(self):
        """The names of the columns."""
        return tuple(MARKS)


def make(trace, block=None, *, by_caller=False):
    """Device function mark(call, which): thread 0, or with by_caller the caller, writes the time; no-op unless `trace`.

    call: the record of a call; if a parameter block is given, the words of a kernel.
    """
    if not trace:
        return device_fn(lambda call, which: None)
    p_trace = block.index("trace") if block else None
    buffer_of = device_fn((lambda call: call.trace) if block is None else lambda params: params[p_trace])

    @device_fn
    def mark(call, which):
        if by_caller or thread_idx() == 0:
            store_u64(buffer_of(call) + u64(8 * N_MARKS) * u64(block_idx()) + u64(8) * u64(which), u64(globaltimer()))

    return mark


class TraceBuffers:
    """The trace buffers of one kernel, one for each rank of this process, allocated at the first launch."""

    def __init__(self):
        self._buffers, self._used = {}, {}

    def address(self, machine, rank, most):
        """Address of the rank's buffer, which has room for `most` blocks."""
        if rank not in self._buffers:
            buffer = machine.alloc(8 * most * N_MARKS, "trace", rank=rank)
            buffer.fill(0)
            self._buffers[rank], self._used[rank] = buffer, most
        return self._buffers[rank].address

    def note(self, rank, grid):
        """Notes the number of blocks of the rank's next launch."""
        self._used[rank] = grid

    def read(self, kernel):
        """[Stamps] of the ranks that launched, by rank; waits for the kernels."""
        out = []
        for rank, buffer in sorted(self._buffers.items()):
            times = buffer.read(np.uint64, (self._used[rank], N_MARKS))
            old = times < times[:, START:START + 1]     # of an earlier launch, by a way that this one did not take
            out.append(Stamps(kernel, rank, np.where(old, np.uint64(0), times)))
        return out

    def close(self):
        """Free the buffers; the launches that use them must have ended."""
        while self._buffers:
            self._buffers.popitem()[1].free()
