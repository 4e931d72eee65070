"""Names all memory that kernels touch: turns an address into `reserved[rank 1][local_expert 0, ...]`."""

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

from epmoe import layout
from epmoe.host.inputs import COMBINE_DTYPE
from epmoe.host.rank_memory import combine_arrays, dispatch_arrays

# Axes of results and of the caller's arrays; epmoe.layout has those of regions.
AXES = {
    "output_tokens": ("row", "col"),
    "output_scales": ("row", "group"),
    "scales_offset": ("group",),
    "row_offsets": ("group",),
    "expert_ids": ("group",),
    "src_info": ("row", "field"),
    "recv_count": ("local_expert", "src_rank"),
    "clean_topk_ids": ("token", "k"),
    "combined": ("token", "col"),
    "input_tokens": ("token", "col"),
    "topk_ids": ("token", "k"),
    "router_weights": ("token", "k"),
    "expert_outputs": ("row", "col"),
}
COUNTERS = ("reserved", "finished", "rank_completion", "A", "B", "C", "D", "E", "F", "G", "combine_ready")
SIGNALS = ("dispatch_recv_count", "combine_recv_count")
NOT_ARRIVED = layout.MAX_FINITE


def word(name, value):
    """A counter as text; a recv_count that has not arrived is "–"."""
    return "–" if name in SIGNALS and value == NOT_ARRIVED else str(value)


class Array(NamedTuple):
    """One array of one rank, at an address."""

    name: str
    rank: int
    address: int
    shape: tuple
    dtype: np.dtype
    axes: tuple

    @property
    def nbytes(self):
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class Touched(NamedTuple):
    """The place where an access begins: the array, and the index in it."""

    array: Array
    index: tuple


def label(name, rank, index, axes):
    """A place as text: "dispatch_recv_count[rank 1][local_expert 0, src_rank 2]"; names fields of A and src_info."""
    fields = {"A": ("end", "count"), "src_info": ("token", "k")}.get(name)
    words, tail = [], ""
    for n, i in enumerate(index):
        if fields and n == len(index) - 1:
            tail = "." + fields[i]
        else:
            words += [] if axes == ("word",) else [f"{axes[n]} {i}" if n < len(axes) else str(i)]
    return f"{name}[rank {rank}]" + (f"[{', '.join(words)}]" if words else "") + tail


class Arrays:
    """All arrays of a recording, found by address. Unknown spans (parameters, status) have no arrays."""

    def __init__(self, recording):
        cfg = recording.cfg
        self._by_span, self._cfg = {}, cfg
        results, _ = dispatch_arrays(cfg)
        self._loans = {
            "dispatch result": {("clean_topk_ids" if n == "topk_ids" else n): s for n, s in results.items()},
            "combine result": {"combined": combine_arrays(cfg, True)["output_tokens"]},
        }
        # the caller's arrays: columns and type
        self._given = {
            "input_tokens": (cfg.hidden, np.dtype(ml_dtypes.bfloat16)),
            "topk_ids": (cfg.top_k, np.dtype(np.int32)),
            "router_weights": (cfg.top_k, np.dtype(np.float32)),
            "expert_outputs": (cfg.hidden, np.dtype(COMBINE_DTYPE[cfg.combine_dtype])),
        }
        self.all = {}
        for event in recording.events:
            if event.span is not None and id(event.span) not in self._by_span:
                for array in self._of_span(event.span):
                    self.all.setdefault((array.name, array.rank), array)

    def _of_span(self, span):
        arrays = []
        if span.name == "epmoe":
            arrays = [
                Array(name, span.rank, span.low + offset, shape, np.dtype(dtype), axes)
                for name, offset, shape, dtype, axes in layout.named_words(self._cfg)
            ]
        elif span.name in self._loans:
            shapes = self._loans[span.name]
            for (name, (shape, dtype)), region in zip(shapes.items(), span.regions):
                arrays.append(
                    Array(name, span.rank, span.low + region.offset, tuple(shape), np.dtype(dtype), AXES.get(name, ()))
                )
        elif span.name in self._given:
            columns, dtype = self._given[span.name]
            n = (span.high - span.low) // (columns * dtype.itemsize)
            arrays = [Array(span.name, span.rank, span.low, (n, columns), dtype, AXES[span.name])]
        self._by_span[id(span)] = arrays
        return arrays

    def find(self, event):
        """The first element that an event touches, as Touched, or None."""
        if event.span is None:
            return None
        for array in self._by_span[id(event.span)]:
            inside = event.address - array.address
            if 0 <= inside < array.nbytes:
                index = np.unravel_index(inside // array.dtype.itemsize, array.shape)
                return Touched(array, tuple(int(i) for i in index))
        return None

    def get(self, name, rank):
        """The array of that name of a rank, or None if no kernel touched it."""
        return self.all.get((name, rank))

    def place(self, event):
        """The first place that an event touches, as text; for unnamed memory the simulator's description."""
        touched = self.find(event)
        if touched is None:
            return event.span.describe(event.address) if event.span is not None else ""
        return label(touched.array.name, touched.array.rank, touched.index, touched.array.axes)
