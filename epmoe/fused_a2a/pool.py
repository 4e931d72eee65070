"""What lies where in the pool of a Buffer, which peers write, and how it grows."""

from typing import NamedTuple

import numpy as np

from epmoe.kernels.rows.copy import flag_bytes_for
from epmoe.kernels.rows.mailbox import MOST_PARTS

ALIGNMENT = 256  # bytes
RESULTS_AT_ONCE = 2  # results in the pool that may be in use while another call needs room


def align(nbytes):
    """nbytes, rounded up so that an array may begin there."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _grown(has, needs):
    """Bytes for a part of the pool: it grows by half at least, so that all earlier pools together are not much."""
    return has if needs <= has else align(max(needs, has + has // 2))


class PoolLayout(NamedTuple):
    """Bytes of each part of the pool, in the order in which they lie; what peers say twice, by parity, lies twice."""

    flag_bytes: int = 0  # flags of rows
    lamport_bytes: int = 0  # Lamport rows, of one parity
    staging_bytes: int = 0  # where rows are received that find no room in the heap
    heap_bytes: int = 0  # where results are lent from

    def grown(self, staging_bytes, result_bytes=0, flag_rows=0, lamport_bytes=0):
        """The layout of a pool with room for this, too; this one if it has.

        result_bytes: of one result; flag_rows: rows that have flags.
        """
        is_larger = result_bytes > min(self.heap_bytes, self.staging_bytes)
        heap = align(result_bytes) * RESULTS_AT_ONCE if is_larger else 0
        return PoolLayout(
            _grown(self.flag_bytes, align(flag_bytes_for(flag_rows))),
            _grown(self.lamport_bytes, lamport_bytes),
            _grown(self.staging_bytes, align(max(staging_bytes, result_bytes))),
            _grown(self.heap_bytes, heap),
        )

    @property
    def lamport_at(self):
        """Where Lamport rows lie."""
        return self.flag_bytes

    @property
    def staging_at(self):
        """Where the staging area lies."""
        return self.lamport_at + 2 * self.lamport_bytes

    @property
    def heap_at(self):
        """Where the heap lies."""
        return self.staging_at + self.staging_bytes

    @property
    def nbytes(self):
        """Bytes of the pool."""
        return self.heap_at + self.heap_bytes

    def regions(self):
        """The parts of the pool, for reports of the simulator."""
        n_flags = self.flag_bytes // flag_bytes_for(1)
        return [
            ("row flags", 0, (n_flags, MOST_PARTS), np.uint32, ("row", "part")),
            (
                "Lamport rows",
                self.lamport_at,
                (2, self.lamport_bytes // 4),
                np.uint32,
                ("parity", "word"),
            ),
            ("rows staging", self.staging_at, (self.staging_bytes,), np.uint8, ("byte",)),
            ("rows results", self.heap_at, (self.heap_bytes,), np.uint8, ("byte",)),
        ]

    def clear(self, buffer):
        """Flags of a rank's pool name no call, and of Lamport rows nothing has come."""
        buffer.fill(0, 0, self.lamport_at)
        buffer.fill(0xFF, self.lamport_at, 2 * self.lamport_bytes)
