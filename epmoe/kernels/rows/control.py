"""The control memory of a rank: words that peers write (symmetric), and the words of its own blocks.

The symmetric part is the same on all ranks: the notes of every src_rank, and counters of its blocks that have sent all
their rows. A word of a note holds a number in its low half and the number of the call (the epoch) in its high half, so
it is its own ready flag. Epochs only grow, and nothing has to be reset. Notes and counters are doubled by the epoch's
parity. A rank begins call e + 1 when every rank has begun it, and no rank begins it before its launch of call e has
ended. So no rank reads the notes of e when those of e + 2 are written, and no rank adds to the counters of e - 1, which
every rank clears in call e, before e + 1. Flags of windows (windows.py) hold the number of their call.
"""

from typing import NamedTuple

from epmoe.device import SIM

from .shape import MAX_PLACES

# Words of a rank's own blocks, bytes from their start
EPOCH = 0               # u64: the last call that ended
BEGUN = 8               # i32: blocks that have begun this call
CLAIMED = 16            # 2 i32: parts of rows (tokens) that warps have taken to expand (reduce), by parity
TAKEN = 32              # 2 i32: parts of rows that warps have taken to send, by parity
NUMBERED = 40           # 2 i32: blocks that have numbered their tokens, by parity
BY_PARITY = (CLAIMED, TAKEN, NUMBERED)      # cleared in the call that has the other parity
RECORDED = 24           # i32: the last call whose places of experts' rows are written down
STATUS = 64             # 16 i32: as in epmoe/kernels/status.py
WORDS_BYTES = 128

# Words of a note
PLACES = 0                          # where in the writer's pool its arrays begin, in units of PLACE_BYTES
CAPACITY = MAX_PLACES               # rows that it has room for
TOKENS = CAPACITY + 1               # its tokens
BLOCKS = CAPACITY + 2               # its blocks that send
COUNTS = CAPACITY + 3               # for each rank: rows that it sends there; behind them the reader's experts
PLACE_BYTES = 256

WINDOW_ROWS = 4 if SIM else 128     # of one src_rank (windows.py)
LAMPORT_ROWS = 4 if SIM else 128    # of one src_rank for one rank, that need no signals (lamport.py)
MOST_PARTS = 8          # flags a row: the most parts of it


class Control(NamedTuple):
    """Byte offsets in the symmetric control memory of a world, and its size."""

    n_ranks: int
    arrived: int
    window_flags: int
    notes: int
    note_bytes: int
    nbytes: int

    def note(self, parity, source):
        """Byte offset of the note of a src_rank."""
        return self.notes + (parity * self.n_ranks + source) * self.note_bytes


def experts_at(n_ranks: int) -> int:
    """The word of a note at which the counts by local expert of the reader begin."""
    return COUNTS + n_ranks


def window_flags_at(n_ranks: int) -> int:
    """Byte offset of the flags of windows [parity, src_rank, row, part], u32."""
    return -(-2 * 4 * n_ranks // 256) * 256


def control(n_ranks: int, n_local_experts: int) -> Control:
    """The control memory for a world of n_ranks with at most n_local_experts experts a rank."""
    note_bytes = 8 * (experts_at(n_ranks) + n_local_experts)
    flags = window_flags_at(n_ranks)
    notes = flags + 2 * 4 * n_ranks * WINDOW_ROWS * MOST_PARTS
    return Control(n_ranks, 0, flags, notes, note_bytes, notes + 2 * n_ranks * note_bytes)
