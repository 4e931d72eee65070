"""SwiGLU between the two matrix products of an expert, on rows as dispatch grouped them.

Kernels agree with these functions within one bf16 ulp (FP8: one code), because exp differs from machine to machine.
So these functions are not bit-exact, unlike the rest of this package.
"""

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

from .casts import to_float32, to_output_type
from .errors import EPValueError
from .formats.blockwise_fp8 import quantise_blockwise

FP8_GROUP = 128
_BLOCK_ELEMENTS = 1 << 18

_ONE = np.float32(1)


def fused_silu(
    gate_up: np.ndarray, row_offsets: np.ndarray, *, limit: float | None = None, alpha: float = 1.702
) -> np.ndarray:
    """silu(gate) * up of every row, in float32 with one rounding at the end: bf16 [rows, 2 * width] to [rows, width].

    gate_up: bf16 [row_offsets[-1] or more, 2 * width], the gate in the first half of a row and up in the second.
    row_offsets: of dispatch's result. The result has exactly row_offsets[-1] rows. Padding rows are computed like other
    rows (unspecified on the device).

    limit None: `gate * sigmoid(gate) * up`, from left to right. limit L > 0, the clamped variant, with
    g = min(gate, L) and u = clamp(up, -L, L): `(u + 1) * (g * sigmoid(alpha * g))`. sigmoid(z) = 1 / (1 + exp(-z)).
    min and clamp propagate NaN. alpha is used only with a limit.

    Errors: EPValueError for a wrong dtype, shape or limit. Source: the SwiGLU of GLU Variants Improve Transformer;
    the clamped one as in gpt-oss (L = 7, alpha = 1.702).
    """
    n_rows, width = _check(gate_up, row_offsets, limit, alpha)
    out = np.empty((n_rows, width), bfloat16)
    for block, value in _blocks(gate_up, n_rows, width, limit, alpha):
        out[block] = to_output_type(value, bfloat16)
    return out


def fused_silu_fp8(
    gate_up: np.ndarray, row_offsets: np.ndarray, *, limit: float | None = None, alpha: float = 1.702
) -> tuple[np.ndarray, np.ndarray]:
    """fused_silu with blockwise FP8 output: (e4m3 [rows, width], float32 scales [width / 128, rows], transposed).

    The float32 results are quantised directly, as in BlockwiseFP8TokenFormat, without an intermediate rounding to bf16.
    width must be a multiple of 128. Arguments and errors as fused_silu.
    """
    n_rows, width = _check(gate_up, row_offsets, limit, alpha)
    if width % FP8_GROUP:
        raise EPValueError(
            f"width={width} (half a row of gate_up) must be a multiple of {FP8_GROUP} for FP8 output: "
            "pad the expert's width or use fused_silu"
        )
    tokens = np.empty((n_rows, width), np.uint8)
    scales = np.empty((width // FP8_GROUP, n_rows), np.float32)
    for block, value in _blocks(gate_up, n_rows, width, limit, alpha):
        values, block_scales = quantise_blockwise(value.reshape(len(value), -1, FP8_GROUP))
        tokens[block] = values.reshape(value.shape).view(np.uint8)
        scales[:, block] = block_scales[..., 0].T
    return tokens.view(float8_e4m3fn), scales


def _blocks(gate_up, n_rows: int, width: int, limit, alpha):
    step = max(1, _BLOCK_ELEMENTS // width)
    for start in range(0, n_rows, step):
        block = slice(start, min(start + step, n_rows))
        gate, up = to_float32(gate_up[block, :width]), to_float32(gate_up[block, width:])
        with np.errstate(all="ignore"):
            yield block, _swiglu(gate, up, limit, np.float32(alpha))


def _swiglu(gate, up, limit, alpha):
    if limit is None:
        return gate * _sigmoid(gate) * up
    limit = np.float32(limit)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + _ONE) * (gate * _sigmoid(alpha * gate))


def _sigmoid(z):
    return _ONE / (_ONE + np.exp(-z))


def _check(gate_up, row_offsets, limit, alpha) -> tuple[int, int]:
    n_rows = int(row_offsets[-1])
    if not isinstance(gate_up, np.ndarray) or gate_up.dtype != bfloat16:
        what = gate_up.dtype if isinstance(gate_up, np.ndarray) else f"type {type(gate_up).__name__}"
        raise EPValueError(f"gate_up has {what} and must be a bfloat16 array: convert it")
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or gate_up.shape[1] == 0 or len(gate_up) < n_rows:
        raise EPValueError(
            f"gate_up has shape {list(gate_up.shape)} and must be [{n_rows} or more rows, 2 * width]: "
            "the gate and up halves side by side, one row for each row of output_tokens"
        )
    if limit is not None and not (np.isfinite(limit) and limit > 0):
        raise EPValueError(f"limit={limit} must be positive and finite, or None for the plain variant")
    if not np.isfinite(alpha):
        raise EPValueError(f"alpha={alpha} must be finite")
    return n_rows, gate_up.shape[1] // 2
