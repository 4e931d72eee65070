"""The control memory of a rank: what peers write into it (symmetric), and the words of its own blocks.

Symmetric, the same on all ranks: two runs of flags, one word a source rank, which hold the number of the last call (the
epoch) in which that rank announced itself or arrived; and its notes. Epochs only grow, so nothing has to be reset
between calls. Notes are doubled by the epoch's parity: a rank writes those of epoch e + 2 after it has seen everybody
arrive in e + 1, and who arrives in e + 1 has done with the notes of e.
"""

from typing import NamedTuple

from .shape import MAX_PLACES

# Words of a rank's own blocks, bytes from their start
EPOCH = 0               # u64: the last call that ended
BARRIER_COUNT = 8       # i32: blocks that have come to the barrier
BARRIER_TURN = 12       # i32: barriers passed
FINISHED = 16           # i32: blocks that have done their part of this call
STATUS = 64             # 16 i32: as in epmoe/kernels/status.py
WORDS_BYTES = 128

# A note, bytes from its start
PLACES = 0                          # u64 each: offsets in the writer's pool at which its arrays begin
CAPACITY = 8 * MAX_PLACES           # i32: rows that it has room for
TOKENS = CAPACITY + 4               # i32: its tokens
COUNTS = CAPACITY + 8               # i32 a rank: tokens that it sends there


class Control(NamedTuple):
    """Byte offsets in the symmetric control memory of a world, and its size."""

    announced: int
    arrived: int
    notes: int
    note_bytes: int
    nbytes: int

    def note(self, parity, source):
        """Byte offset of the note of a source rank."""
        return self.notes + (parity * self.n_ranks + source) * self.note_bytes

    @property
    def n_ranks(self):
        """Ranks of the world."""
        return (self.arrived - self.announced) // 8


def experts_at(n_ranks: int) -> int:
    """Where in a note the counts by local expert of the reader begin."""
    return COUNTS + 4 * n_ranks


def control(n_ranks: int, n_local_experts: int) -> Control:
    """The control memory for a world of n_ranks with at most n_local_experts experts a rank."""
    note_bytes = -(-(experts_at(n_ranks) + 4 * n_local_experts) // 16) * 16
    arrived = 8 * n_ranks
    notes = -(-2 * arrived // 256) * 256
    return Control(0, arrived, notes, note_bytes, notes + 2 * n_ranks * note_bytes)
