"""Dispatched: one rank's result of dispatch."""

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np

from epmoe.host.arrays import first, to_numpy
from epmoe_ref.errors import EPError

TILE_ROWS = 128  # rows of one scale tile of the block-scaled formats


@dataclass(eq=False, repr=False)
class Dispatched:
    """One rank's dispatched tokens. Arrays have capacity for the most rows possible; `trimmed()` gives the exact rows.

    output_tokens: (capacity, hidden) in the token format's type (4-bit types: two to a uint8, hidden / 2 columns)
    output_scales: the format's scales, None for bf16; `print(cfg.format.__doc__)` gives their layout
    scales_offset: uint32 (n_groups), where each group's scale tiles begin; None for formats without scale tiles
    row_offsets: uint32 (n_groups + 1); rows of group g are row_offsets[g]:row_offsets[g + 1]
    expert_ids: int32 (n_groups), 0 .. n_groups - 1; a fused shared expert is group 0
    src_info: int32 (capacity, 2), (token, k) at the src_rank; (-1, -1) in shared-expert and padding rows
    recv_count: int32 (n_local_experts, n_ranks), rows that came from each src_rank; under skip_a2a (.., 1)
    topk_ids: int32 (num_tokens, top_k), the rank's own ids, cleaned; combine reads them
    num_tokens: number of tokens that the rank gave to dispatch
    cfg, rank: of the result; check: waits for the kernels and raises the errors that they recorded

    Rows are in order of group, then of src_rank. The order of rows in an (expert, src_rank) segment is free
    (epmoe_ref.canonical sorts it). Padding rows (fp8_blockwise) come last in their group. Their values and scales are
    unspecified, and combine does not read them. The arrays are NumPy in the simulator and DeviceArray on a GPU, where
    nothing has waited for the kernels yet. Do not change src_info, topk_ids and row_offsets: combine relies on them.
    As NumPy arrays they are read-only, and combine refuses a changed copy. A change in GPU memory is not noticed:
    combine then gives wrong numbers or a PeerTimeout.
    combine accepts a copy (copy.copy, copy.deepcopy) like the original. A pickle holds NumPy arrays and belongs to no
    round. Printing shows the exact rows, and waits for the kernels. Source: the dispatch_wait_kernel page
    (docs/pages.md).
    """

    output_tokens: object
    output_scales: object
    scales_offset: object
    row_offsets: object
    expert_ids: object
    src_info: object
    recv_count: object
    topk_ids: object
    num_tokens: int
    # default_factory leaves no attribute on the class, so that __getattr__ is called
    cfg: Any = field(default_factory=type(None), repr=False)
    rank: int | None = field(default_factory=type(None), repr=False)
    check: Any = field(default_factory=type(None), repr=False)
    # its Part, from which the other attributes come on first use; combine checks that it is the open round's
    round: object = field(default=None, repr=False)
    # row_offsets on the host, after the first use of n_rows
    offsets: np.ndarray | None = field(default=None, repr=False)

    def __getattr__(self, name):
        if name not in OF_ROUND or self.round is None:
            raise AttributeError(f"Dispatched has no {name}")
        value = self.round.array(name) if name in ARRAYS else getattr(self.round, name)
        setattr(self, name, value)
        return value

    def __repr__(self):
        try:
            shown = self.trimmed().numpy() if self.row_offsets is not None else self
        except EPError as error:
            return f"Dispatched(rank={self.rank}, num_tokens={self.num_tokens}; no rows: {error})"
        shape = f"rank={self.rank}, num_tokens={self.num_tokens}"
        lines = [shape if shown is self else f"{shape}, n_rows={self.n_rows}"]
        lines += [f"{name}={a!r}" for name in ARRAYS if (a := getattr(shown, name)) is not None]
        return "Dispatched(%s)" % ",\n  ".join(lines)

    def __copy__(self):
        return replace(self)

    def __deepcopy__(self, memo):
        own = self.numpy()  # waits for the kernels
        arrays = {name: getattr(own, name) for name in ARRAYS}
        return replace(own, **{n: np.array(a) for n, a in arrays.items() if a is not None})

    def __reduce__(self):
        return partial(Dispatched, **vars(replace(self.__deepcopy__({}), round=None))), ()

    @property
    def n_rows(self) -> int:
        """Exact number of rows, including padding rows; the first use waits for the kernels."""
        if self.offsets is None:
            offsets = self.row_offsets
            self.offsets = np.asarray(self.check(offsets) if self.check else offsets, np.int64)
        return int(self.offsets[-1])

    def trimmed(self) -> "Dispatched":
        """The same memory cut to the exact rows and tiles; waits for the kernels and raises errors they recorded."""
        n = self.n_rows
        cut = {name: first(getattr(self, name), n) for name in ("output_tokens", "src_info")}
        return replace(self, output_scales=_exact(self.output_scales, n, self.offsets), **cut)

    def numpy(self) -> "Dispatched":
        """The same with NumPy arrays; waits for the kernels and raises errors they recorded (PeerTimeout, bad ids)."""
        if self.check is not None:
            self.check()
        return replace(self, check=None, **{name: to_numpy(getattr(self, name)) for name in ARRAYS})


_FIELDS = [f.name for f in fields(Dispatched)]
ARRAYS = _FIELDS[: _FIELDS.index("num_tokens")]
OF_ROUND = _FIELDS[: _FIELDS.index("round")]  # taken from its round


def kind_of(argument):
    """The type of an argument that is not the Dispatched that is needed, for messages."""
    kind = type(argument)
    return f"reference {kind.__name__}" if kind.__module__.startswith("epmoe_ref") else kind.__name__


def _exact(scales, n_rows, row_offsets):
    """The scales of n_rows rows; the array's shape and dtype tell the layout: tiles, slots, transposed or by row."""
    form = 0 if scales is None else len(scales.shape)
    if form == 5:
        return first(scales, int(np.sum(-(-np.diff(row_offsets) // TILE_ROWS))))
    if form in (0, 4):
        return scales  # None, or a fixed slot for each group
    return first(scales, n_rows, axis=1 if scales.dtype == np.float32 else 0)
