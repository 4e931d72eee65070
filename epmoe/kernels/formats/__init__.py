"""Token formats inside the kernels: one module per family, with the same stem as its twin in the reference.

The table `TOKEN_FORMATS` of the configuration lists the formats: name -> stem of the module. A new format is a module
here with `make(cfg) -> KernelFormat`, its twin in the reference, and a line in that table.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import NamedTuple

import numpy as np

from epmoe.device import device_fn
from epmoe_ref.config import TOKEN_FORMATS, EPConfig

nothing = device_fn(lambda out, *of_group: None)    # begin_group and finish_group of a format without tiles of scales


class RowPlace(NamedTuple):
    """Where a message's row goes: the output row, its group, its number there, and the 128-row tiles before the group.

    Tiles before a group: the sum of ceil(n_rows / 128) over the earlier groups.
    """

    row: int
    group: int
    row_in_group: int
    tiles_before: int


class KernelFormat(NamedTuple):
    """One token format, made by `make(cfg)` of its module; `formats.of(cfg)` finds the module by the format's name.

    Every device function is called by all 32 lanes of one warp with the same arguments (besides `lane`) and contains no
    barrier other than warp shuffles. Rows, groups and offsets are int32, addresses uint64. A group is one expert's
    rows: the shared expert, where it is fused, is group 0. `out` holds one uint64 address per name of `output_fields`,
    in that order, then the capacity in rows as uint64: a tuple, or the address of such words; output(i) reads entry i.

    token_size: bytes of a message's payload, each of its parts padded to cfg.alignment.
    direct: the payload is the input row as it is, byte for byte, so a copy replaces `encode_part`.
    outputs(cfg, capacity): {name: (shape, dtype)} of the handler's arrays for `capacity` rows, all groups with padding.
    output_fields: their names.
    encode_part(src_row, dst_payload, input_scale, part, n_parts, lane): makes the payload at dst_payload of the bf16
        row [hidden] at src_row, padding bytes 0: part 0..n_parts-1 of it, by a warp each; encode_parts: the most parts
        that have work. Both are global addresses, 16-byte aligned. Nobody may write the row while the kernel runs.
    decode(payload, out, place, part, n_parts, lane): a warp decodes part 0..n_parts-1 of one payload to the same part
        of the output row at `place` (RowPlace). decode_parts: the most parts that have work. Reads the payload by
        ordinary loads, so a peer's bytes are seen once its signal is acquired.
    pad_rows: a group's row count is rounded up to a multiple of it.
    begin_group(out, group, group_start, tiles_before): writes scales_offset[group], by any thread, once.
    finish_group(out, n_rows, tiles_before, lane): zero scale bytes for the rows past a group's n_rows in its last tile.
        Touches no byte that `decode` writes: any warp, any time before the kernel ends, in no order with `decode`.
        n_rows does not count padding rows.
    """

    token_size: int
    direct: bool
    outputs: Callable[[EPConfig, int], dict[str, tuple[tuple[int, ...], np.dtype]]]
    output_fields: tuple[str, ...]
    encode_part: Callable
    encode_parts: int
    decode: Callable
    decode_parts: int
    pad_rows: int = 1
    begin_group: Callable = nothing
    finish_group: Callable = nothing


def align_up(n: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least n."""
    return (n + multiple - 1) // multiple * multiple


@cache
def of(cfg: EPConfig) -> KernelFormat:
    """The kernel side of cfg.token_format; equal configurations share one object, hence its compiled functions."""
    stem = TOKEN_FORMATS[cfg.token_format].stem
    return import_module(f".{stem}", __name__).make(cfg)
