"""Blockwise FP8: e4m3 values with one float32 scale for every 128 elements. The receiver stores scales transposed."""

import numpy as np
from ml_dtypes import float8_e4m3fn

from ..casts import E4M3_MAX, absmax, to_e4m3
from .message import TokenFormat
from .scale_layout import transposed

MIN_ABSMAX = np.float32(1e-4)  # keeps the scale of a group of zeros away from 0


def quantise_blockwise(groups: np.ndarray):
    """float32 [..., 128] to (e4m3 [..., 128], float32 scales [..., 1]).

    s = max(absmax, 1e-4) / 448 and q = e4m3(clamp(x / s, -448, 448)), both IEEE divisions (a product with a reciprocal
    may differ by one ulp, and then is not equal). absmax ignores NaN; NaN gives 0x7F. With an Inf in
    the group s is Inf. Then finite values give zero with their sign, and Inf itself gives NaN.
    """
    with np.errstate(all="ignore"):
        scales = np.maximum(absmax(groups), MIN_ABSMAX) / E4M3_MAX
        return to_e4m3(groups / scales), scales


class BlockwiseFP8TokenFormat(TokenFormat):
    """hid_dim e4m3 bytes, then hid_dim / 128 float32 scales; a value is `e4m3 * scale`.

    output_tokens e4m3 [rows, hid_dim]; output_scales float32 [hid_dim / 128, rows], transposed. The rows of each group
    are rounded up to 4 (16 bytes of scales): row_offsets holds the padded offsets, a group's data starts at its offset
    and the padding rows come last. Their values and scales are unspecified on the device and zero here.
    """

    hidden_multiple = 128
    group_size = 128
    pad_rows = 4
    values_dtype = float8_e4m3fn
    scales_dtype = np.dtype(np.float32)
    scale_layout = staticmethod(transposed)

    def values_size(self) -> int:
        """Bytes of the values."""
        return self.hid_dim

    def scales_size(self) -> int:
        """Bytes of the scales."""
        return 4 * self.n_scales()

    def scales_shape(self, counts, slot_rows: int) -> tuple[int, ...]:
        """Shape of output_scales for groups with `counts` rows."""
        return self.n_scales(), int(self.pad_expert_offsets(counts)[-1])

    def quantise(self, groups: np.ndarray, input_scale):
        """float32 [n, hid_dim / 128, 128] to e4m3 values and float32 scales; see quantise_blockwise."""
        return quantise_blockwise(groups)


def make(cfg) -> BlockwiseFP8TokenFormat:
    """The format of a configuration whose token_format is "fp8_blockwise"."""
    return BlockwiseFP8TokenFormat(cfg.hidden, cfg.top_k, cfg.alignment)
