"""What each format's encoder must produce, written from the definition of the numbers: tables, and float32 arithmetic.

NumPy's float32 product and quotient are IEEE: one rounding, subnormals kept. Codes are looked up among the exact
values that a type can hold; the midpoints between them are exact in float64, so a tie is an equality.
"""

import numpy as np

F32 = np.float32
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3_VALUES = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127]
)
GROUP = {"fp8_blockwise": 128, "nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "mxfp4_rows": 32}


def align_up(n, multiple):
    return -(-n // multiple) * multiple


def bf16_values(bits):
    """uint16 patterns -> float32."""
    return (bits.astype(np.uint32) << 16).view(F32)


def in_float64(v):
    with np.errstate(invalid="ignore"):  # NumPy warns about signalling NaN
        return np.asarray(v).astype(np.float64)


def nearest(values, v, sign_bit, nan_code):
    """Index of the value nearest to |v|, of two equally near the even one; with the sign, on zero too."""
    v = in_float64(v)
    a = np.where(np.isnan(v), 0, np.abs(v))
    middles = (values[1:] + values[:-1]) / 2
    i = np.searchsorted(middles, a, side="left")
    tie = (i < middles.size) & (middles[np.minimum(i, middles.size - 1)] == a)
    i = np.where(tie & (i % 2 == 1), i + 1, i)
    return np.where(np.isnan(v), nan_code, i + sign_bit * np.signbit(v)).astype(np.uint8)


def e2m1(v):
    return nearest(E2M1_VALUES, v, 8, 7)


def e4m3(v):
    return nearest(E4M3_VALUES, v, 128, 0x7F)


def e8m0(v):
    """Least b with 2**(b - 127) >= |v|, from 0 to 254; 255 for NaN and Inf."""
    a = np.abs(in_float64(v))
    finite = np.isfinite(a)
    fraction, exponent = np.frexp(np.where(finite & (a > 0), a, 2.0**-200))
    b = np.clip(exponent - (fraction == 0.5) + 127, 0, 254)
    return np.where(finite, b, 255).astype(np.uint8)


def two_to(byte):
    """e8m0 byte -> float32."""
    return np.where(byte == 255, F32(np.nan), np.ldexp(F32(1), np.minimum(byte, 254).astype(int) - 127)).astype(F32)


def pack_nibbles(codes):
    return codes[..., 0::2] | codes[..., 1::2] << 4


def group_parts(token_format, x, absmax, g):
    """(value codes, scales) of groups x [n, groups, V] float32 with absmax [n, groups]."""
    if token_format == "fp8_blockwise":
        scale = np.maximum(absmax, F32(1e-4)) / F32(448)
        return e4m3(np.clip(x / scale[..., None], F32(-448), F32(448))), scale
    if token_format == "mxfp4_rows":
        exponent = (absmax.view(np.uint32).astype(np.int64) + 2**21 >> 23) & 0xFF
        byte = np.clip(exponent - 2, 0, 254).astype(np.uint8)
        return e2m1(x / two_to(byte)[..., None]), byte
    if token_format == "nvfp4":
        byte = e4m3(F32(g) * (absmax * (F32(1) / F32(6))))
        scale = E4M3_VALUES[byte].astype(F32)
        k = F32(1) / (scale * (F32(1) / F32(g)))
    else:
        byte = e8m0(absmax * (F32(1) / F32(6 if token_format == "mxfp4" else 448)))
        scale = two_to(byte)
        k = F32(1) / scale
    k = np.where((absmax == 0) | (scale == 0), F32(0), k)
    return (e4m3 if token_format == "mxfp8" else e2m1)(x * k[..., None]), byte


def payloads(cfg, bits, input_scale=1.0):
    """bf16 patterns [n, hidden] uint16 -> payload bytes [n, token_size] uint8."""
    n, hidden = bits.shape
    if cfg.token_format == "bf16":
        parts = [bits.view(np.uint8)]
    else:
        with np.errstate(all="ignore"):
            x = bf16_values(bits).reshape(n, -1, GROUP[cfg.token_format])
            absmax = np.where(np.isnan(x), F32(0), np.abs(x)).max(-1)
            codes, scales = group_parts(cfg.token_format, x, absmax, F32(input_scale))
        codes = codes.reshape(n, hidden)
        parts = [
            pack_nibbles(codes) if "fp4" in cfg.token_format else codes,
            np.ascontiguousarray(scales).view(np.uint8).reshape(n, -1),
        ]
    padding = [align_up(p.shape[1], cfg.alignment) - p.shape[1] for p in parts]
    return np.concatenate([np.pad(p, ((0, 0), (0, n))) for p, n in zip(parts, padding)], 1)
