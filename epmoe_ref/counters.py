"""The int32 counters with which the thread blocks of one device synchronise, and the layout of their regions."""

from typing import Any

import numpy as np

from .config import MAX_GPUS_PER_NODE
from .errors import EPValueError


class EPLocalSyncCounters:
    """The counters of one device: sizes and offsets of the regions of the four kernels, in int32 elements.

    The number of experts (of all ranks together, >= 1) is a parameter of the type, as in the specification:

        EPLocalSyncCounters[n_experts].total_size()     sizes need no memory
        EPLocalSyncCounters[n_experts](buffer)          over memory; counters.ptr is its address
        EPLocalSyncCounters[n_experts](ptr)             the same from an address
        EPLocalSyncCounters(n_experts, buffer=None)     either in one call

    buffer: a NumPy array int32 [at least total_size()]; or device memory, an object with `__cuda_array_interface__`
    (int32, contiguous) or with `address` and `nbytes`; or the address itself, an int.
    The `get_*_ptr` methods return the start of a region. Without a buffer it is the offset in elements, with a NumPy
    array the slice from there on, and with device memory or an address the address in bytes.
    Fields: n_experts, buffer (as given), ptr (the address of the first counter, an int; None without a buffer).

    Layout, n = n_experts and i = local_expert * n_ranks + rank:

    dispatch_async (2n + 8)                   reserved [n]: next free slot of each (local expert, dst_rank), by
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

    Errors: EPValueError for n_experts missing or < 1, and for a buffer that is not int32, not contiguous, not
    one-dimensional, too short or not aligned to 4 bytes. Source: the EPLocalSyncCounters page (docs/pages.md).
    """

    def __init__(self, n_experts: int, buffer=None, *, ptr: int | None = None):
        if isinstance(n_experts, bool) or not isinstance(n_experts, (int, np.integer)) or n_experts < 1:
            raise EPValueError(f"n_experts={n_experts!r} must be a whole number of at least 1")
        if buffer is not None and ptr is not None:
            raise EPValueError("buffer and ptr are two names for the same memory: give one of them")
        self.n_experts = int(n_experts)
        self.buffer = buffer if ptr is None else ptr
        self.ptr: Any = None if self.buffer is None else _address(self.buffer, self.n_experts, self.total_size())

    def __class_getitem__(cls, n_experts: int) -> "EPLocalSyncCounters":
        """A type for n experts, without memory. Ask it for sizes and offsets, or call it with memory."""
        return cls(n_experts)

    def __call__(self, buffer=None, *, ptr: int | None = None) -> "EPLocalSyncCounters":
        """Counters for the same number of experts, over a buffer or the address of one."""
        return EPLocalSyncCounters(self.n_experts, buffer, ptr=ptr)

    def __repr__(self) -> str:
        memory = "" if self.ptr is None else f"(ptr={self.ptr:#x})"
        return f"EPLocalSyncCounters[{self.n_experts}]{memory}"

    @staticmethod
    def get_type_name() -> str:
        """The name of the type."""
        return "EPLocalSyncCounters"

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
        """Elements of all regions together. The region that dispatch_wait and combine_async share counts once."""
        return self.dispatch_async_size() + self.dispatch_wait_size() + self.combine_wait_size()

    def get_dispatch_async_ptr(self):
        """Where the counters of dispatch_async start."""
        return self._at(0)

    def get_dispatch_wait_ptr(self):
        """Where the counters of dispatch_wait start."""
        return self._at(self.dispatch_async_size())

    def get_combine_async_ptr(self):
        """Where the counters of combine_async start: the same place as dispatch_wait's."""
        return self.get_dispatch_wait_ptr()

    def get_combine_wait_ptr(self):
        """Where the counters of combine_wait start."""
        return self._at(self.dispatch_async_size() + self.dispatch_wait_size())

    def regions(self) -> dict[str, tuple[int, int]]:
        """Every region by name, in memory order: (offset from the base of all counters, size), in elements."""
        n = self.n_experts
        sizes = {
            "reserved": n,
            "finished": n,
            "rank_completion": MAX_GPUS_PER_NODE,
            "A": 2 * n,
            "B": n,
            "C": n,
            "D": 1,
            "E": 1,
            "F": 1,
            "G": 1,
            "combine_wait": 2 * n,
        }
        offsets = np.concatenate([[0], np.cumsum(list(sizes.values()))]).tolist()
        return {name: (offset, size) for (name, size), offset in zip(sizes.items(), offsets)}

    def _at(self, offset: int):
        if self.buffer is None:
            return offset
        return self.buffer[offset:] if isinstance(self.buffer, np.ndarray) else self.ptr + 4 * offset


def _address(buffer, n_experts: int, size: int) -> int:
    """The address of the first counter of a buffer, after checking that it holds `size` valid counters."""
    if isinstance(buffer, bool) or (isinstance(buffer, (int, np.integer)) and (buffer <= 0 or buffer % 4)):
        raise EPValueError(f"ptr={buffer!r} must be the address of int32 counters: above 0 and a multiple of 4")
    if isinstance(buffer, (int, np.integer)):
        return int(buffer)
    interface = "__array_interface__" if isinstance(buffer, np.ndarray) else "__cuda_array_interface__"
    array = getattr(buffer, interface, None)
    if array is not None:
        shape, dtype = tuple(array["shape"]), np.dtype(array["typestr"])
        address = int(array["data"][0])
        what = f"{dtype}{list(shape)}"
        fits = dtype == np.int32 and len(shape) == 1 and shape[0] >= size and array.get("strides") in (None, (4,))
    elif hasattr(buffer, "address") and hasattr(buffer, "nbytes"):
        what, address = f"of {buffer.nbytes} bytes", int(buffer.address)
        fits = buffer.nbytes >= 4 * size
    else:
        what, fits, address = type(buffer).__name__, False, 0
    if not fits or address % 4:
        raise EPValueError(
            f"buffer {what} must be an int32 array [{size}] or longer for n_experts={n_experts}: "
            "allocate total_size() elements, contiguous, in host or device memory, or give its address"
        )
    return address
