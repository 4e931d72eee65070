"""NVFP4, MXFP4 and MXFP8 tokens: low-precision values, and scale bytes in 5-D tiles.

A tile has 128 rows, by 4 scales to an atom of 512 bytes. Shape [tiles, n_words, 32, 4, 4] with n_words =
hidden / (4 V): the four scale bytes of (row r, columns 4 V j ...) are the word at [r // 128, j, r % 32, (r % 128) //
32]. Rows count from the group's start, and every group starts a tile.
"""

import ml_dtypes
import numpy as np

from epmoe.device import device_fn, div_rn, e4m3_lo, f32, i32, mul_rn, output, store16, store_i32, store_u32, u32, u64

from . import KernelFormat
from .number_codes import e4m3_byte, scaled_e4m3x4, e8m0_reciprocal, e8m0_round_up
from .row_copy import spread
from .row_encoder import store_e2m1, values_then_scales, with_scales

SIXTH = float(np.float32(1) / np.float32(6))
PER_448 = float(np.float32(1) / np.float32(448))
GROUP = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
VALUES_PER_BYTE = {"nvfp4": 2, "mxfp4": 2, "mxfp8": 1}
TILE_ROWS = 128
ATOM_BYTES = 512
output_scales, scales_offset = output(1), output(2)


@device_fn
def nvfp4_scale(absmax, input_scale):
    """(e4m3 byte of input_scale * (absmax * (1/6)), saturating; factor of the values).

    The factor is 1 / (scale * (1 / input_scale)); 0 where the scale is 0, which makes a zero of every number.
    """
    byte = e4m3_byte(mul_rn(input_scale, mul_rn(absmax, f32(SIXTH))))
    scale = e4m3_lo(byte)
    k = div_rn(f32(1.0), mul_rn(scale, div_rn(f32(1.0), input_scale)))
    if scale == f32(0.0):
        k = f32(0.0)
    return byte, k


def e8m0_scale(per_largest):
    """Device function (absmax, input_scale) -> (e8m0 byte of absmax * per_largest, rounded up; 1 / scale).

    A group of zeros needs no special factor, since its scale 2**-127 gives zeros, too.
    """
    @device_fn
    def scale_of(absmax, input_scale):
        byte = e8m0_round_up(mul_rn(absmax, f32(per_largest)))
        return byte, e8m0_reciprocal(byte)

    return scale_of


@device_fn
def store_e4m3(dst_payload, chunk, ab, k):
    """store_values for MXFP8: 16 bytes a lane."""
    a, b = ab
    store16(dst_payload + u64(16 * chunk), scaled_e4m3x4(a[0], a[1], k), scaled_e4m3x4(a[2], a[3], k),
            scaled_e4m3x4(b[0], b[1], k), scaled_e4m3x4(b[2], b[3], k))


ENCODERS = {"nvfp4": (nvfp4_scale, store_e2m1), "mxfp4": (e8m0_scale(SIXTH), store_e2m1),
            "mxfp8": (e8m0_scale(PER_448), store_e4m3)}


def row_scales(n_words: int):
    """store_scales: stores one row's n_words words of scales in the tiles. src is 4-byte aligned."""
    spread_words = spread(4, n_words)

    @device_fn
    def store(out, place, src, lane):
        r = u32(place.row_in_group)
        tile = u64(place.tiles_before) + u64(r >> u32(7))
        dst = output_scales(out) + tile * u64(n_words * ATOM_BYTES) + u64(16 * (r & u32(31)) + 4 * (u32(r >> u32(5)) & u32(3)))
        spread_words(dst, u64(ATOM_BYTES), src, lane)

    return store


def clear_unused_rows(n_words: int):
    """finish_group of a KernelFormat: zeros for the rows past n_rows in a group's last tile.

    A lane owns rows lane, lane + 32, lane + 64, lane + 96 of the tile: 16 adjacent bytes of each atom.
    """

    @device_fn
    def clear(out, n_rows, tiles_before, lane):
        n_used = i32(u32(n_rows) & u32(TILE_ROWS - 1))
        if n_used > 0:
            tile = u64(tiles_before) + u64(u32(n_rows) >> u32(7))
            dst = output_scales(out) + tile * u64(n_words * ATOM_BYTES) + u64(16 * lane)
            j = 0
            while j < n_words:
                if lane >= n_used:
                    store16(dst, 0, 0, 0, 0)
                else:
                    if lane + 32 >= n_used:
                        store_u32(dst + u64(4), 0)
                    if lane + 64 >= n_used:
                        store_u32(dst + u64(8), 0)
                    if lane + 96 >= n_used:
                        store_u32(dst + u64(12), 0)
                dst = u64(dst + u64(ATOM_BYTES))
                j += 1

    return clear


def make(cfg) -> KernelFormat:
    """Payload: hidden values (two to a byte in FP4), then hidden / V scale bytes; V = 16 (NVFP4) or 32 (MX).

    NVFP4: e4m3 scale of input_scale * absmax / 6; MXFP4, MXFP8: e8m0 scale of absmax / 6, absmax / 448, rounded up.
    Outputs: output_tokens [capacity, hidden / 2] packed uint8, or [capacity, hidden] e4m3; output_scales
    [tiles, hidden / (4 V), 32, 4, 4]; scales_offset [groups] uint32: a group's first tile is
    group_start // 128 + scales_offset[group]. Zero scale bytes for the rows past a group's count in its last tile.
    """
    kind, group_size = cfg.token_format, GROUP[cfg.token_format]
    value_bytes, n_scales = cfg.hidden // VALUES_PER_BYTE[kind], cfg.hidden // group_size
    n_words = n_scales // 4

    def outputs(cfg, capacity):
        value_type = ml_dtypes.float8_e4m3fn if kind == "mxfp8" else np.uint8
        scale_type = ml_dtypes.float8_e4m3fn if kind == "nvfp4" else ml_dtypes.float8_e8m0fnu
        n_tiles = (capacity + (TILE_ROWS - 1) * cfg.n_groups) // TILE_ROWS     # a group can leave 127 rows unused
        return {"output_tokens": ((capacity, value_bytes), np.dtype(value_type)),
                "output_scales": ((n_tiles, n_words, 32, 4, 4), np.dtype(scale_type)),
                "scales_offset": ((cfg.n_groups,), np.dtype(np.uint32))}

    return values_then_scales(cfg, value_bytes, n_scales, group_size, with_scales(group_size, *ENCODERS[kind]),
                              row_scales(n_words), outputs, begin_group=begin_group,
                              finish_group=clear_unused_rows(n_words))


@device_fn
def begin_group(out, group, group_start, tiles_before):
    """begin_group of a KernelFormat."""
    store_i32(scales_offset(out) + u64(4 * group), i32(tiles_before - group_start // TILE_ROWS))
