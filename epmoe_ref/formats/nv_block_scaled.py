"""Block-scaled formats with scales in 5-D tiles: NVFP4, MXFP4 and MXFP8."""

import numpy as np
from ml_dtypes import float8_e4m3fn, float8_e8m0fnu

from ..casts import E2M1_MAX, E4M3_MAX, absmax, e8m0_to_float32, pack_e2m1, to_e2m1, to_e4m3, to_e8m0
from ..errors import EPValueError
from .message import TokenFormat
from .scale_layout import TILE_ROWS, tiles_5d

GROUP_SIZES = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
_ONE = np.float32(1)


class NVBlockScaledTokenFormat(TokenFormat):
    """The values of a token, then one 1-byte scale for every V elements; a value is `code * scale` (NVFP4: over g).

    kind      values                V    scale
    "nvfp4"   e2m1, two a byte      16   e4m3
    "mxfp4"   e2m1, two a byte      32   e8m0
    "mxfp8"   e4m3                  32   e8m0

    output_tokens uint8 [rows, hid_dim / 2] (FP4) or e4m3 [rows, hid_dim]. output_scales [tiles, hid_dim / 4V, 32, 4,
    4]: each group of rows has tiles of 128 rows of its own, and rows past its count have scale byte 0. scales_offset
    uint32 [groups]: group g's first tile is `row_offsets[g] // 128 + scales_offset[g]`, so with m_i rows in group i
    `scales_offset[g] = sum over i < g of ceil(m_i / 128) - row_offsets[g] // 128`. Rows themselves are not padded.
    hid_dim is a multiple of 4V. Errors: EPValueError.
    """

    scale_layout = staticmethod(tiles_5d)

    def __init__(self, hid_dim: int, top_k: int, alignment: int = 16, *, kind: str = "nvfp4"):
        if kind not in GROUP_SIZES:
            raise EPValueError(f"kind={kind!r} must be one of {', '.join(GROUP_SIZES)}")
        self.kind = kind
        self.group_size = GROUP_SIZES[kind]
        self.hidden_multiple = 4 * GROUP_SIZES[kind]
        self.values_dtype = float8_e4m3fn if kind == "mxfp8" else np.dtype(np.uint8)
        self.scales_dtype = float8_e4m3fn if kind == "nvfp4" else float8_e8m0fnu
        super().__init__(hid_dim, top_k, alignment)

    def values_size(self) -> int:
        """Bytes of the values."""
        return self.hid_dim if self.kind == "mxfp8" else self.hid_dim // 2

    def scales_size(self) -> int:
        """Bytes of the scales."""
        return self.n_scales()

    def scales_shape(self, counts, slot_rows: int) -> tuple[int, ...]:
        """Shape of output_scales for groups with `counts` rows."""
        return int(_tiles(counts).sum()), self.n_scales() // 4, 32, 4, 4

    def scales_offset(self, counts) -> np.ndarray:
        """scales_offset uint32 [groups] for groups with `counts` rows. For counts 100, 200, 100 it is 0, 1, 1."""
        tiles_before = np.cumsum(_tiles(counts)) - _tiles(counts)
        return (tiles_before - self.pad_expert_offsets(counts)[:-1].astype(np.int64) // TILE_ROWS).astype(np.uint32)

    def quantise(self, groups: np.ndarray, input_scale):
        """float32 [n, n_scales(), V] to values and scales. absmax is over the group, at least 0, and ignores NaN.

        nvfp4  s8 = e4m3(g * (absmax * (1/6))), k = 1 / (f32(s8) * (1/g)), q = e2m1(x * k), g the input scale
        mxfp4  s8 = e8m0(absmax * (1/6)),       k = 1 / f32(s8),           q = e2m1(x * k)
        mxfp8  s8 = e8m0(absmax * (1/448)),     k = 1 / f32(s8),           q = e4m3(x * k)

        All in float32, one rounding an operation; 1/6, 1/448 and 1/g are float32 reciprocals. k = 0 where absmax or
        the decoded scale f32(s8) is 0: every value of the group encodes as zero with its sign, except NaN. NaN encodes
        as 0x7F (e4m3) and +6 (e2m1). With an Inf in the group, NVFP4 saturates (s8 = 448) and the MX kinds have scale
        0xFF (NaN), so all their values are encoded as NaN.
        """
        largest = absmax(groups)
        if self.kind == "nvfp4":
            g = checked_input_scale(input_scale)
            scales = to_e4m3(g * (largest * (_ONE / E2M1_MAX)))
            decoded = scales.astype(np.float32)
            k = _ONE / (decoded * (_ONE / g))
        else:
            scales = to_e8m0(largest * (_ONE / (E4M3_MAX if self.kind == "mxfp8" else E2M1_MAX)))
            decoded = e8m0_to_float32(scales)
            k = _ONE / decoded
        scaled = groups * np.where((largest == 0) | (decoded == 0), np.float32(0), k)
        return to_e4m3(scaled) if self.kind == "mxfp8" else pack_e2m1(to_e2m1(scaled)), scales


def checked_input_scale(scale, name: str = "input_scale") -> np.float32:
    """The input scale as float32. EPValueError unless it is one number that is positive and finite as a float32 too."""
    try:
        with np.errstate(over="ignore"):  # a value that overflows is refused below
            value = np.asarray(scale, np.float32)
    except (TypeError, ValueError):
        value = np.asarray(np.nan, np.float32)
    if isinstance(scale, bool) or value.size != 1 or not (np.isfinite(value).all() and (value > 0).all()):
        raise EPValueError(f"{name}={scale!r} must be one positive finite number (float32): give 1.0 for no scaling")
    return np.float32(value.item())


def _tiles(counts) -> np.ndarray:
    return -(-np.asarray(counts, np.int64) // TILE_ROWS)


def make(cfg) -> NVBlockScaledTokenFormat:
    """The format of a configuration whose token_format is "nvfp4", "mxfp4" or "mxfp8"."""
    return NVBlockScaledTokenFormat(cfg.hidden, cfg.top_k, cfg.alignment, kind=cfg.token_format)
