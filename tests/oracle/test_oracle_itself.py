"""The models against hand-worked examples and a third way of rounding."""

import random
from fractions import Fraction

import exact_codes as codes
import exact_float32 as f32
import exact_formats as formats
import ml_dtypes
import numpy as np
import pytest
import record_model
from random_worlds import bits_of, random_world

KINDS = ("ordinary", "anything", "tiny", "huge", "coarse", "salted")


def bit_pairs(seed, n=400):
    rng = np.random.default_rng(seed)
    for kind_a in KINDS:
        for kind_b in KINDS:
            yield from zip(bits_of(rng, kind_a, n, 8, 23), bits_of(rng, kind_b, n, 8, 23))


def float_of(bits):
    return np.array([bits], np.uint32).view(np.float32)[0]


def same(x, value):
    bits = f32.to_bits(x)
    return (f32.is_nan(x) and np.isnan(value)) or bits == int(np.array(value, np.float32).view(np.uint32))


@pytest.mark.parametrize("name", ["mul", "add", "div"])
def test_single_operations_round_as_ieee_machines_do(name):
    operation = {"mul": np.multiply, "add": np.add, "div": np.divide}[name]
    with np.errstate(all="ignore"):
        for a, b in bit_pairs(1, 100):
            exact = getattr(f32, name)(f32.from_bits(int(a)), f32.from_bits(int(b)))
            assert same(exact, operation(float_of(a), float_of(b))), (name, hex(a), hex(b))


def round_fraction(x):
    """float32 nearest to a Fraction, by searching the exponent: slow and plain."""
    if x == 0:
        return 0
    exponent = -149
    while abs(x) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    n = round(x / Fraction(2) ** exponent)  # Python's round of a Fraction: ties to even
    m = abs(n) << (exponent + 149)
    if m >= 1 << 277:
        m = f32.INF
    if m == 0:
        return f32.NEG_ZERO if x < 0 else 0
    return -m if x < 0 else m


def test_fma_rounds_once():
    rng = np.random.default_rng(2)
    bits = [bits_of(rng, kind, (50, 3), 8, 23) for kind in KINDS]
    near = bits_of(rng, "ordinary", (50, 3), 8, 23)
    near[:, 2] = [
        f32.to_bits(f32.mul(f32.from_bits(int(a)), f32.from_bits(int(b)))) ^ 0x80000000 for a, b, _ in near
    ]  # c = -(a * b) rounded: what is left is the rounding error
    checked = 0
    for row in np.concatenate(bits + [near]).tolist():
        a, b, c = (f32.from_bits(x) for x in row)
        if any(isinstance(x, float) for x in (a, b, c)):
            continue
        unit = Fraction(1, f32.ONE)
        expected = round_fraction(a * unit * b * unit + c * unit)
        assert f32.to_bits(f32.fma(a, b, c)) == f32.to_bits(expected), [hex(x) for x in row]
        checked += 1
    assert checked > 200


@pytest.mark.parametrize(
    "a, b, c, expected",
    [
        (f32.ONE, -f32.ONE, f32.ONE, 0),  # cancels to +0
        (1, -1, 0, f32.NEG_ZERO),  # underflows: the sign stays
        (f32.NEG_ZERO, f32.ONE, 0, 0),  # -0 + +0
        (f32.NEG_ZERO, f32.ONE, f32.NEG_ZERO, f32.NEG_ZERO),
        (f32.INF, 0, f32.ONE, f32.NAN),
        (f32.INF, f32.ONE, -f32.INF, f32.NAN),
        (f32.ONE, f32.ONE, -f32.INF, -f32.INF),
        (f32.NAN, f32.ONE, f32.ONE, f32.NAN),
    ],
)
def test_fma_of_special_values(a, b, c, expected):
    assert f32.to_bits(f32.fma(a, b, c)) == f32.to_bits(expected)


@pytest.mark.parametrize("name, dtype", [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)])
def test_sixteen_bit_casts_and_values(name, dtype, tonight):
    kind = codes.OUTPUT_TYPES[name]
    every = np.arange(0, 1 << 16, 1 if tonight else 3, dtype=np.uint16)
    with np.errstate(all="ignore"):
        values = every.view(dtype).astype(np.float32)
        for bits, value in zip(every.tolist(), values):
            assert same(kind.from_bits(bits), value)
            assert kind.is_nan_bits(bits) == bool(np.isnan(value))
        rng = np.random.default_rng(3)
        for kind_of_value in KINDS:
            bits = bits_of(rng, kind_of_value, 500, 8, 23)
            cast = bits.view(np.float32).astype(dtype)
            for b, c in zip(bits.tolist(), cast):
                mine = kind.to_bits(f32.from_bits(b))
                assert mine == int(c.view(np.uint16)) or (kind.is_nan_bits(mine) and np.isnan(np.float32(c))), hex(b)


def test_e8m0_vectors_of_the_format_text():
    vectors = {
        0x003FFFFF: 0,
        0x00400000: 0,
        0x00400001: 1,
        0x7F800000: 255,
        0x403FFFFF: 129,
        0x40400001: 129,
        0: 0,
        0x3F800000: 127,
        0x40800000: 129,
        0x45800000: 139,
        0x80000000: 0,
        0xC5800000: 139,
        0xBF800000: 127,
        0x7F000000: 254,
    }
    for bits, byte in vectors.items():
        assert codes.to_e8m0(f32.from_bits(bits)) == byte, hex(bits)
    draw = random.Random(4)
    for _ in range(3000):  # the formula of the text
        bits = draw.getrandbits(31) if draw.random() < 0.7 else draw.getrandbits(24)
        e, m = bits >> 23, bits & 0x7FFFFF
        formula = 0xFF if e == 0xFF else e + (m > 0 and e != 0xFE and not (e == 0 and m <= 0x400000))
        assert codes.to_e8m0(f32.from_bits(bits)) == formula, hex(bits)


def test_e2m1_boundaries_of_the_format_text():
    steps = [(0.25, 0), (0.75, None), (1.25, 2), (1.75, None), (2.5, 4), (3.5, None), (5, 6)]
    for boundary, inclusive in steps:
        at = codes.to_e2m1(f32.from_bits(int(np.float32(boundary).view(np.uint32))))
        below = codes.to_e2m1(f32.from_bits(int(np.float32(boundary).view(np.uint32)) - 1))
        above = codes.to_e2m1(f32.from_bits(int(np.float32(boundary).view(np.uint32)) + 1))
        assert above == below + 1
        assert at == (below if inclusive is not None else above)
    assert codes.to_e2m1(f32.INF) == 7 and codes.to_e2m1(-f32.INF) == 15 and codes.to_e2m1(f32.NAN) == 7
    assert codes.to_e2m1(f32.NEG_ZERO) == 8


def test_e4m3_values_and_saturation():
    for code in range(256):
        value = np.array([code], np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)[0]
        assert same(codes.from_e4m3(code), value)
        if code & 0x7F != 0x7F:
            assert codes.to_e4m3(codes.from_e4m3(code)) == code
    for x, code in [(f32.INF, 0x7E), (-f32.INF, 0xFE), (480 * f32.ONE, 0x7E), (f32.NAN, 0x7F), (f32.NEG_ZERO, 0x80)]:
        assert codes.to_e4m3(x) == code


def bf16_bits(*values):
    return tuple(int(b) for b in np.array(values, ml_dtypes.bfloat16).view(np.uint16))


def test_even_scale_vectors():
    for absmax, byte in [(1.6, 125), (6, 127), (7, 128), (0, 0)]:
        _, scale = formats.encode_group("mxfp4_rows", bf16_bits(absmax, *[0] * 31), f32.ONE)
        assert scale == bytes([byte]), absmax


def test_scales_offset_example_of_the_format_text():
    world = random_world(5, token_format="mxfp8", fused_shared_expert=False, skip_a2a=False)
    received = record_model.Received(rows=[], row_offsets=[0, 100, 300, 400], group_rows=[100, 200, 100])
    record_model.place_scales(world, received)
    assert received.scales_offset == [0, 1, 1]


@pytest.mark.parametrize("hidden, capacity", [(256, 7), (512, 33), (768, 64)])
def test_slot_layout_is_bijective(hidden, capacity):
    mpad = formats.align_up(capacity, 32)
    places = {
        formats.slot_byte(slot, row, column, hidden, capacity)
        for slot in range(2)
        for row in range(mpad)
        for column in range(hidden // 32)
    }
    assert places == set(range(2 * mpad * hidden // 32))


@pytest.mark.parametrize("hidden, group", [(64, 16), (384, 32)])
def test_tile_layout_is_bijective(hidden, group):
    places = [
        formats.tile_byte(1, row, column, hidden, group) for row in range(256) for column in range(hidden // group)
    ]
    assert sorted(places) == list(range(128 * hidden // group, 3 * 128 * hidden // group))


def test_records_of_a_world_on_paper():
    """Two ranks, two local experts, top-2: the exchange worked out by hand."""
    row = lambda rank, token: [0x3F80 + 16 * rank + token] * 8  # noqa: E731
    world = record_model.World(
        2, 2, 2, 8, 3, "bf16", tokens=[[row(0, 0), row(0, 1)], [row(1, 0)]], topk_ids=[[[3, 0], [2, -1]], [[0, 3]]]
    )
    zero, one = record_model.dispatch(world)
    origin = lambda received: [(r.group, r.src_rank, r.token, r.slot) for r in received.rows]  # noqa: E731
    assert origin(zero) == [(0, 0, 0, 1), (0, 1, 0, 0)]
    assert origin(one) == [(0, 0, 1, 0), (1, 0, 0, 0), (1, 1, 0, 1)]
    assert zero.row_offsets == [0, 2, 2] and one.row_offsets == [0, 1, 3]
    assert zero.recv_count == [[1, 1], [0, 0]] and one.recv_count == [[1, 0], [1, 1]]
    world.routed_outputs = [[[row(0, 8)] * 2, [row(0, 9)] * 2], [[row(1, 8)] * 2]]
    assert record_model.combine(world)[0][1] == [row(0, 9), [0] * 8]
    world.weights = [[[0x3F800000, 0xBF800000], [0x3F800000, 0x7FC00000]], [[0x3F800000, 0]]]
    assert record_model.combine(world) == [[[0] * 8, row(0, 9)], [row(1, 8)]]


def test_shares_of_the_shared_expert_cover_all_tokens():
    for tokens in range(9):
        for ranks in range(1, 5):
            world = record_model.World(
                ranks,
                1,
                1,
                8,
                9,
                "bf16",
                tokens=[[[0] * 8] * tokens] * ranks,
                topk_ids=[[[0]] * tokens] * ranks,
                fused_shared_expert=True,
                skip_a2a=True,
                allreduce_world_size=ranks,
            )
            assert [t for rank in range(ranks) for t in world.shared_share(rank)] == list(range(tokens))
