"""The int32 counters by which the thread blocks of one device synchronise: how many, and where each region starts."""

import numpy as np

from .config import MAX_GPUS_PER_NODE
from .errors import EPValueError


class EPLocalSyncCounters:
    """Offsets and sizes, in int32 elements, of the counter regions of the four kernels.

    n_experts: experts of all ranks together, >= 1. buffer: None, or the int32 array [at least total_size()] that holds
    the counters; then the `get_*_ptr` methods give the slice of it that starts at the region, else the offset alone.

    Layout, n = n_experts and i = local_expert * n_ranks + rank:

    dispatch_async (2n + 8)                   reserved [n]: next free slot per (local expert, destination rank), by
                                              fetch-add; finished [n]: messages completely written; rank completion
                                              [8]: signals already written to each peer of the p2p world
    dispatch_wait = combine_async (4n + 4)    A [2n]: [2i] = READY + end row, [2i+1] = count of rows; B [n]: inclusive
                                              sums over ranks within an expert; C [n]: tile claims, per local expert;
                                              D: clean-up references; E: ready flag, 0 or READY; F: send_buf_ready;
                                              G: shared_expert_started
    combine_wait (2n)                         one ready flag per reducing block, so at most 2n blocks

    dispatch_wait and combine_async share their region because combine_async reads A, which dispatch_wait writes. All
    counters start at zero. After dispatch_wait the reserved, finished and rank completion counters and D to G are zero
    again; after combine_wait also A and the combine_wait flags; B and C are scratch, written before they are read.

    Errors: EPValueError for a size < 1 and for a buffer that is not int32, not one-dimensional or too short.
    Source: the EPLocalSyncCounters page.
    """

    def __init__(self, n_experts: int, buffer=None):
        if isinstance(n_experts, bool) or not isinstance(n_experts, (int, np.integer)) or n_experts < 1:
            raise EPValueError(f"n_experts={n_experts!r} must be a whole number of at least 1")
        self.n_experts = int(n_experts)
        self.buffer = buffer
        if buffer is None:
            return
        if not isinstance(buffer, np.ndarray) or buffer.dtype != np.int32 or buffer.ndim != 1 \
                or len(buffer) < self.total_size():
            what = f"{buffer.dtype}{list(buffer.shape)}" if isinstance(buffer, np.ndarray) else type(buffer).__name__
            raise EPValueError(f"buffer {what} must be an int32 array [{self.total_size()}] or longer for n_experts="
                               f"{self.n_experts}: allocate total_size() elements")

    def dispatch_async_size(self) -> int:
        """Elements that dispatch_async needs: reserved, finished, rank completion."""
        return 2 * self.n_experts + MAX_GPUS_PER_NODE

    def dispatch_wait_size(self) -> int:
        """Elements that dispatch_wait needs: regions A to G."""
        return 4 * self.n_experts + 4

    def combine_async_size(self) -> int:
        """Elements that combine_async needs: the region of dispatch_wait, which it reuses."""
        return self.dispatch_wait_size()

    def combine_wait_size(self) -> int:
        """Elements that combine_wait needs: one flag per reducing block."""
        return 2 * self.n_experts

    def total_size(self) -> int:
        """Elements of all regions together."""
        return self.dispatch_async_size() + self.dispatch_wait_size() + self.combine_wait_size()

    def get_dispatch_async_ptr(self):
        """Where the counters of dispatch_async start."""
        return self._at(0)

    def get_dispatch_wait_ptr(self):
        """Where the counters of dispatch_wait start."""
        return self._at(self.dispatch_async_size())

    def get_combine_async_ptr(self):
        """Where the counters of combine_async start: the same place as those of dispatch_wait."""
        return self.get_dispatch_wait_ptr()

    def get_combine_wait_ptr(self):
        """Where the counters of combine_wait start."""
        return self._at(self.dispatch_async_size() + self.dispatch_wait_size())

    def regions(self) -> dict[str, tuple[int, int]]:
        """Every region by name: (offset from the base of all counters, size), in elements, in the order of memory."""
        n = self.n_experts
        sizes = {"reserved": n, "finished": n, "rank_completion": MAX_GPUS_PER_NODE,
                 "A": 2 * n, "B": n, "C": n, "D": 1, "E": 1, "F": 1, "G": 1, "combine_wait": 2 * n}
        offsets = np.concatenate([[0], np.cumsum(list(sizes.values()))]).tolist()
        return {name: (offset, size) for (name, size), offset in zip(sizes.items(), offsets)}

    def _at(self, offset: int):
        return offset if self.buffer is None else self.buffer[offset:]
