"""Every encoder of epmoe_ref against the same formula in whole numbers: each bf16 bit pattern, and the edges.

EPMOE_ALL_PATTERNS=1 runs all 65536 patterns in every test; CI runs every 23rd, and one full pass over values.
"""

import os

import exact_float32 as f32
import exact_formats
import ml_dtypes
import numpy as np
import pytest
from differences import SCALE_DTYPES, TOKEN_DTYPES
from exact_formats import FACTS
from random_worlds import bits_of

import epmoe_ref

ALL = os.environ.get("EPMOE_ALL_PATTERNS") == "1"
STRIDE = 1 if ALL else 23
SCALED = [name for name in FACTS if name != "bf16"]
ABSMAX_PATTERNS = [
    0x0000,
    0x0001,
    0x007F,
    0x0080,
    0x0100,
    0x3F80,
    0x3FCD,
    0x40C0,
    0x40E0,
    0x43E0,
    0x7E80,
    0x7F00,
    0x7F7F,
    0x7F80,
    0x7FC0,
]


def reference_format(token_format, hidden, top_k=1, alignment=16):
    if token_format == "bf16":
        return epmoe_ref.BF16TokenFormat(hidden, top_k, alignment)
    if token_format == "fp8_blockwise":
        return epmoe_ref.BlockwiseFP8TokenFormat(hidden, top_k, alignment)
    if token_format == "mxfp4_rows":
        return epmoe_ref.MXFP4TokenFormat(hidden, top_k, alignment)
    return epmoe_ref.NVBlockScaledTokenFormat(hidden, top_k, alignment, kind=token_format)


def check_rows(token_format, rows, scale_bits=0x3F800000, alignment=16):
    """rows: uint16 (n, hidden)."""
    rows = np.ascontiguousarray(rows, np.uint16)
    fmt = reference_format(token_format, rows.shape[1], alignment=alignment)
    scale = np.array([scale_bits], np.uint32).view(np.float32)[0]
    actual = fmt.encode(rows.view(ml_dtypes.bfloat16), scale)
    assert actual.dtype == np.uint8 and actual.shape == (len(rows), fmt.token_size())
    g = f32.from_bits(scale_bits)
    for i, row in enumerate(rows.tolist()):
        expected = exact_formats.payload(token_format, row, g, alignment)
        if actual[i].tobytes() != expected:
            raise AssertionError(explain(token_format, row, g, scale_bits, actual[i].tobytes(), expected))
    return fmt, actual


def explain(token_format, row, g, scale_bits, actual, expected):
    facts = FACTS[token_format]
    at = next(i for i, (a, b) in enumerate(zip(actual, expected)) if a != b)
    codes = len(row) * facts.code_bits // 8
    if at < codes:
        group = at * 8 // facts.code_bits // facts.group if facts.group else 0
        what = f"code byte {at}"
    else:
        group = (at - exact_formats.align_up(codes, 16)) // facts.scale_bytes
        what = f"scale byte of group {group}"
    values = row[group * facts.group : (group + 1) * facts.group]
    return (
        f"{token_format}, input_scale 0x{scale_bits:08x}: {what} is 0x{actual[at]:02x}, expected "
        f"0x{expected[at]:02x}; the group's bf16 bits are {' '.join(f'{v:04x}' for v in values)}"
    )


@pytest.mark.parametrize("token_format", FACTS)
@pytest.mark.parametrize("alignment", [4, 16, 64])
def test_sizes_of_the_message(token_format, alignment):
    unit = FACTS[token_format].hidden_unit
    for hidden in (unit, 2 * unit, 3 * unit, 7168):
        for top_k in (1, 2, 7, 8, 9, 32):
            fmt = reference_format(token_format, hidden, top_k, alignment)
            token, src_info, topk_info = exact_formats.message_sizes(token_format, hidden, top_k, alignment)
            assert (fmt.token_size(), fmt.src_info_size(), fmt.topk_info_size()) == (token, src_info, topk_info)
            assert fmt.src_info_offset() == token and fmt.topk_info_offset() == token + src_info
            assert fmt.msg_size() == token + src_info + topk_info


@pytest.mark.parametrize("token_format", FACTS)
def test_every_bf16_pattern_among_others(token_format):
    """All 65536 patterns, or some of them, in random groups."""
    width = max(FACTS[token_format].hidden_unit, 128)
    for seed in range(3 if ALL else 1):
        order = np.random.default_rng(seed).permutation(1 << 16)[: 1 << (16 if ALL else 13)]
        check_rows(token_format, order.reshape(-1, width))


@pytest.mark.parametrize("token_format", FACTS)
def test_every_finite_pattern_among_numbers_of_its_size(token_format):
    """Patterns sorted by magnitude: each group has values that its scale resolves."""
    magnitudes = np.arange(0x7F80).repeat(2)
    magnitudes[1::2] |= 0x8000
    width = max(FACTS[token_format].hidden_unit, 128)
    whole = len(magnitudes) // width * width
    check_rows(token_format, magnitudes[:whole].reshape(-1, width))


@pytest.mark.parametrize("token_format", SCALED)
def test_every_pattern_alone_in_its_group(token_format):
    """It is the absmax; the group's other values are zeros of either sign."""
    facts = FACTS[token_format]
    patterns = np.arange(0, 1 << 16, STRIDE)
    groups_a_row = facts.hidden_unit // facts.group
    patterns = patterns[: len(patterns) // groups_a_row * groups_a_row]
    groups = np.zeros((len(patterns), facts.group), np.uint16)
    groups[:, 1::3] = 0x8000
    groups[np.arange(len(patterns)), np.arange(len(patterns)) % facts.group] = patterns
    check_rows(token_format, groups.reshape(-1, facts.hidden_unit))


@pytest.mark.parametrize("token_format", SCALED)
@pytest.mark.parametrize("absmax", ABSMAX_PATTERNS)
def test_every_pattern_under_a_given_absmax(token_format, absmax):
    facts = FACTS[token_format]
    patterns = np.arange(0, 1 << 16, STRIDE)
    patterns = patterns[(patterns & 0x7FFF) <= max(absmax, 0x3F80)]
    per_row = facts.hidden_unit // facts.group * (facts.group - 1)
    patterns = patterns[: len(patterns) // per_row * per_row]
    groups = np.full((len(patterns) // (facts.group - 1), facts.group), absmax, np.uint16)
    groups[:, 1:] = patterns.reshape(len(groups), -1)
    check_rows(token_format, groups.reshape(-1, facts.hidden_unit))


@pytest.mark.parametrize("token_format", SCALED)
def test_values_between_two_codes(token_format):
    """With absmax on a code's top value the scale is a power of two, and halves of steps are exact ties."""
    facts = FACTS[token_format]
    top = {4: 6.0, 8: 448.0}[facts.code_bits]
    for power in (-20, -1, 0, 3):
        steps = np.linspace(-top, top, facts.hidden_unit * 4)
        near = np.concatenate([np.round(steps * 8) / 8, np.round(steps * 4) / 4, steps])
        near = near[: len(near) // facts.group * facts.group].reshape(-1, facts.group) * 2.0**power
        near[:, 0] = top * 2.0**power
        rows = near.reshape(-1, facts.hidden_unit).astype(ml_dtypes.bfloat16).view(np.uint16)
        check_rows(token_format, rows)


@pytest.mark.parametrize("token_format", FACTS)
@pytest.mark.parametrize("kind", ["ordinary", "anything", "tiny", "huge", "coarse", "salted"])
def test_random_rows(token_format, kind):
    unit = FACTS[token_format].hidden_unit
    for seed, hidden in enumerate((unit, 3 * unit, 5 * unit)):
        rows = bits_of(np.random.default_rng(seed), kind, (20 if ALL else 4, hidden), 8, 7)
        check_rows(token_format, rows, alignment=(4, 16, 128)[seed] if token_format == "bf16" else 16)


INPUT_SCALES = [
    0x3F800000,
    0x3F000000,
    0x40490FDB,
    0x00000001,
    0x00400000,
    0x00800000,
    0x7F7FFFFF,
    0x7E800000,
    0x358637BD,
    0x49742400,
    0x1E3CE508,
    0x60AD78EC,
]


@pytest.mark.parametrize("scale_bits", INPUT_SCALES, ids=lambda b: f"0x{b:08x}")
def test_nvfp4_under_an_input_scale(scale_bits):
    rng = np.random.default_rng(scale_bits)
    for kind in ("ordinary", "anything", "tiny", "huge", "salted"):
        check_rows("nvfp4", bits_of(rng, kind, (10, 128), 8, 7), scale_bits)


@pytest.mark.parametrize("token_format", [name for name in FACTS if name != "nvfp4"])
def test_other_formats_ignore_the_input_scale(token_format):
    rows = bits_of(np.random.default_rng(8), "salted", (3, FACTS[token_format].hidden_unit), 8, 7)
    fmt, actual = check_rows(token_format, rows)
    assert np.array_equal(fmt.encode(rows.astype(np.uint16).view(ml_dtypes.bfloat16), 0.37), actual)


@pytest.mark.parametrize("token_format", FACTS)
def test_decode_gives_back_what_encode_put_there(token_format):
    facts = FACTS[token_format]
    hidden = 3 * facts.hidden_unit
    rows = bits_of(np.random.default_rng(9), "salted", (5, hidden), 8, 7).astype(np.uint16)
    fmt = reference_format(token_format, hidden)
    values, scales = fmt.decode(fmt.encode(rows.view(ml_dtypes.bfloat16)))
    assert values.dtype == TOKEN_DTYPES[token_format]
    expected = [exact_formats.encode_token(token_format, row) for row in rows.tolist()]
    assert values.tobytes() == b"".join(codes for codes, _ in expected)
    if facts.group == 0:
        assert scales is None
    else:
        assert scales.dtype == SCALE_DTYPES[token_format]
        assert scales.shape == (5, hidden // facts.group)
        assert scales.tobytes() == b"".join(scale for _, scale in expected)
