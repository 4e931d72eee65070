"""Conversions between float32 and the small number formats, with the rounding that this project defines.

Every function takes an array of any shape and gives a new one of the same shape, except the two that pack and unpack
4-bit codes. float32 subnormals are kept everywhere. Where ml_dtypes rounds differently, the docstring says how.
"""

import numpy as np
from ml_dtypes import float8_e4m3fn, float8_e8m0fnu

E4M3_MAX = np.float32(448)
E4M3_NAN = 0x7F
E2M1_MAX = np.float32(6)
E2M1_NAN = 0x7  # the format has no NaN: +6 represents it
# of the codes 0..7; 8..15 are their negatives
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def to_float32(x: np.ndarray) -> np.ndarray:
    """bf16, fp16 or float32 [...] to float32 [...], exactly."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32)


def to_output_type(x: np.ndarray, dtype) -> np.ndarray:
    """float32 [...] to bf16, fp16 or float32 [...]: round to nearest even, overflow to Inf."""
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """float32 [...] to float8_e4m3fn [...]: round to nearest even, saturating to +-448, NaN to 0x7F.

    Subnormals (multiples of 2^-9) are kept, and so is the sign of zero. Inf saturates as well. ml_dtypes gives NaN
    above 464 and keeps the sign of a NaN; the hardware's cvt.rn.satfinite does what this function does.
    """
    x = np.asarray(x, np.float32)
    with np.errstate(invalid="ignore"):
        codes = np.asarray(np.clip(x, -E4M3_MAX, E4M3_MAX).astype(float8_e4m3fn)).view(np.uint8)
    codes[np.isnan(x)] = E4M3_NAN
    return codes.view(float8_e4m3fn)


def to_e8m0(x: np.ndarray) -> np.ndarray:
    """float32 [...] to float8_e8m0fnu [...]: rounds up to a power of two and ignores the sign.

    NaN and Inf give 0xFF. Otherwise, with e the exponent field and m the mantissa field, e + 1 if m > 0, e != 0xFE and
    not (e == 0 and m <= 0x400000), else e. So values above 2^127 give 0xFE. Values up to 2^-127, including zero, give
    0. ml_dtypes rounds to nearest instead.
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    rounds_up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    code = np.where(exponent == 0xFF, 0xFF, exponent + rounds_up)
    return code.astype(np.uint8).view(float8_e8m0fnu).reshape(np.shape(x))


def e8m0_to_float32(code: np.ndarray) -> np.ndarray:
    """float8_e8m0fnu or uint8 [...] to float32 [...]: 0xFF is NaN, every other byte, including 0, is 2^(byte - 127)."""
    byte = np.ascontiguousarray(code).view(np.uint8)
    bits = np.where(byte == 0, 0x00400000, byte.astype(np.uint32) << 23)
    bits = np.where(byte == 0xFF, 0x7FC00000, bits)
    return bits.astype(np.uint32).view(np.float32).reshape(np.shape(code))


def to_e2m1(x: np.ndarray) -> np.ndarray:
    """float32 [...] to 4-bit codes, uint8 [...] in 0..15: round to nearest, ties to the even code, saturating at +-6.

    Magnitudes: <= .25 -> 0, < .75 -> .5, <= 1.25 -> 1, < 1.75 -> 1.5, <= 2.5 -> 2, < 3.5 -> 3, <= 5 -> 4, else 6. The
    sign is kept, on zero too. NaN gives +6 (code 7), as the hardware conversion does.
    """
    shape, x = np.shape(x), np.atleast_1d(np.asarray(x, np.float32))
    magnitude = np.abs(x)
    code = (magnitude > 0.25).view(np.uint8)
    for above in (
        magnitude >= 0.75,
        magnitude > 1.25,
        magnitude >= 1.75,
        magnitude > 2.5,
        magnitude >= 3.5,
        magnitude > 5,
    ):
        code += above.view(np.uint8)
    code |= np.signbit(x).view(np.uint8) << 3
    code[np.isnan(x)] = E2M1_NAN
    return code.reshape(shape)


def e2m1_to_float32(code: np.ndarray) -> np.ndarray:
    """4-bit codes, uint8 [...] in 0..15, to float32 [...]."""
    return np.concatenate([E2M1_VALUES, -E2M1_VALUES])[code]


def pack_e2m1(code: np.ndarray) -> np.ndarray:
    """4-bit codes, uint8 [..., 2n], to bytes, uint8 [..., n]: the even element in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_e2m1(packed: np.ndarray) -> np.ndarray:
    """Bytes, uint8 [..., n], to 4-bit codes, uint8 [..., 2n]: the low nibble first."""
    return np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def absmax(groups: np.ndarray) -> np.ndarray:
    """The largest magnitude of each group: float32 [..., group] to float32 [..., 1], from 0 upwards, NaN ignored."""
    return np.fmax.reduce(np.abs(groups), axis=-1, keepdims=True, initial=np.float32(0))
