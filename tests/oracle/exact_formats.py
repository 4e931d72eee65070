"""The six token formats, written independently from their formulas, one value at a time, in exact arithmetic.

`encode_token(format, row, g)` takes a token as bf16 bit patterns and gives its code bytes and its scale bytes; the
payload is both, each padded with zeros. `scale_places` says where the scales of a row go.
"""

from dataclasses import dataclass

import exact_codes as codes
import exact_float32 as f32

ONE_SIXTH = f32.from_fraction(1, 6)
ONE_448TH = f32.from_fraction(1, 448)
SMALLEST_ABSMAX = f32.from_fraction(1, 10_000)
SCALE_448 = f32.from_fraction(448)


@dataclass(frozen=True)
class FormatFacts:
    """The table of formats.md."""

    group: int  # values that share a scale, 0: no scales
    code_bits: int
    scale_bytes: int
    hidden_unit: int  # hidden must be a multiple of it
    tiles: bool  # 5-D scale tiles
    pad_rows: int


FACTS = {
    "bf16": FormatFacts(0, 16, 0, 8, False, 1),
    "fp8_blockwise": FormatFacts(128, 8, 4, 128, False, 4),
    "nvfp4": FormatFacts(16, 4, 1, 64, True, 1),
    "mxfp4": FormatFacts(32, 4, 1, 128, True, 1),
    "mxfp8": FormatFacts(32, 8, 1, 128, True, 1),
    "mxfp4_rows": FormatFacts(32, 4, 1, 32, False, 1),
}


def absmax(values):
    """Largest magnitude; starts from 0 and ignores NaN."""
    return max([0] + [f32.magnitude(x) for x in values if not f32.is_nan(x)])


# An encoder takes the numbers of a group (each once) and g, and returns the scale bytes and a function number -> code.


def _blockwise_fp8(values, g):
    s = f32.div(max(absmax(values), SMALLEST_ABSMAX), SCALE_448)
    return f32.to_bits(s).to_bytes(4, "little"), lambda x: codes.to_e4m3(_clamp_448(f32.div(x, s)))


def _clamp_448(x):
    if f32.is_nan(x):
        return x
    return max(min(x, SCALE_448), -SCALE_448) if f32.magnitude(x) > SCALE_448 else x


def _zero(x):
    """k = 0: a zero with the sign of the value; NaN keeps its code."""
    if f32.is_nan(x):
        return x
    return f32.NEG_ZERO if f32.is_negative(x) else 0


def _nvfp4(values, g):
    top = absmax(values)
    scale = codes.to_e4m3(f32.mul(g, f32.mul(top, ONE_SIXTH)))
    decoded = codes.from_e4m3(scale)
    if top == 0 or decoded == 0:
        return bytes([scale]), lambda x: codes.to_e2m1(_zero(x))
    k = f32.div(f32.ONE, f32.mul(decoded, f32.div(f32.ONE, g)))
    return bytes([scale]), lambda x: codes.to_e2m1(f32.mul(x, k))


def _nv_mx(values, reciprocal, cast):
    top = absmax(values)
    scale = codes.to_e8m0(f32.mul(top, reciprocal))
    if top == 0:
        return bytes([scale]), lambda x: cast(_zero(x))
    k = f32.div(f32.ONE, codes.from_e8m0(scale))
    return bytes([scale]), lambda x: cast(f32.mul(x, k))


def _mxfp4_rows(values, g):
    biased = ((f32.to_bits(absmax(values)) + 2**21) >> 23) & 0xFF
    byte = min(max(biased - 2, 0), 254)
    power = codes.from_e8m0(byte)
    return bytes([byte]), lambda x: codes.to_e2m1(f32.div(x, power))


_ENCODERS = {
    "fp8_blockwise": _blockwise_fp8,
    "nvfp4": _nvfp4,
    "mxfp4": lambda values, g: _nv_mx(values, ONE_SIXTH, codes.to_e2m1),
    "mxfp8": lambda values, g: _nv_mx(values, ONE_448TH, codes.to_e4m3),
    "mxfp4_rows": _mxfp4_rows,
}


def encode_group(token_format, group_bits, g):
    """(codes of one group in order, its scale bytes); group_bits are bf16 bit patterns."""
    numbers = {bits: codes.BF16_BITS.from_bits(bits) for bits in group_bits}
    scale, code_of = _ENCODERS[token_format](list(numbers.values()), g)
    coded = {bits: code_of(x) for bits, x in numbers.items()}
    return [coded[bits] for bits in group_bits], scale


def encode_token(token_format, row, g=f32.ONE):
    """(code bytes, scale bytes) of one token, without padding."""
    facts = FACTS[token_format]
    if facts.group == 0:
        return b"".join(b.to_bytes(2, "little") for b in row), b""
    all_codes, scales = [], b""
    for start in range(0, len(row), facts.group):
        group_codes, scale = encode_group(token_format, row[start : start + facts.group], g)
        all_codes += group_codes
        scales += scale
    if facts.code_bits == 4:  # the even element in the low nibble
        return bytes(low | high << 4 for low, high in zip(all_codes[::2], all_codes[1::2])), scales
    return bytes(all_codes), scales


def align_up(n, alignment):
    return -(-n // alignment) * alignment


def payload(token_format, row, g=f32.ONE, alignment=16):
    """The message's first part: code bytes, then scale bytes, each padded with zeros."""
    return b"".join(
        part + bytes(align_up(len(part), alignment) - len(part)) for part in encode_token(token_format, row, g)
    )


def message_sizes(token_format, hidden, top_k, alignment=16):
    """token_size, src_info_size, topk_info_size of the format."""
    facts = FACTS[token_format]
    scales = hidden // facts.group * facts.scale_bytes if facts.group else 0
    token = align_up(hidden * facts.code_bits // 8, alignment) + align_up(scales, alignment)
    return token, align_up(4, alignment), align_up(2 * top_k, alignment)


def slot_byte(slot, row, column, hidden, row_capacity):
    """Byte of a scale in the slot layout of fuse_a_scale_preshuffle."""
    ks, mpad = hidden // 32, align_up(row_capacity, 32)
    return (
        slot * mpad * ks
        + (row // 16) % 2
        + 2 * ((column // 4) % 2)
        + 4 * (row % 16)
        + 64 * (column % 4)
        + 256 * (column // 8)
        + 32 * ks * (row // 32)
    )


def tile_byte(first_tile, row, column, hidden, group):
    """Byte of scale column `column` of an expert's row `row` in the 5-D tiles [tile, hidden/(4V), 32, 4, 4]."""
    tile_columns = hidden // (4 * group)
    place = first_tile + row // 128
    for index, extent in ((column // 4, tile_columns), (row % 32, 32), (row % 128 // 32, 4), (column % 4, 4)):
        place = place * extent + index
    return place
