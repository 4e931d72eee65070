"""Rows of bf16 patterns that a quantiser can get wrong, as uint16."""

import ml_dtypes
import numpy as np

NAN, NEGATIVE_NAN, INF, NEGATIVE_INF = 0x7FC1, 0xFFFF, 0x7F80, 0xFF80


def patterns(values):
    """Numbers -> uint16 patterns of the nearest bf16."""
    with np.errstate(all="ignore"):
        return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def every_pattern(hidden):
    """All 65536, ascending: the groups hold neighbours, so codes are near the top of their range."""
    return np.arange(65536, dtype=np.uint16).reshape(-1, hidden)


def below_a_maximum(maxima, group, seed):
    """A group for each pattern of `maxima`, which is the largest in magnitude there, at each place in turn.

    The others lie up to 20 binades below it and have signs and mantissas of their own; half of them are products of it
    with a short fraction, among which ties between codes are frequent.
    """
    rng = np.random.default_rng(seed)
    n = len(maxima)
    top = (np.asarray(maxima, np.uint16) & 0x7FFF).astype(np.int64)[:, None]
    drop = (20 * rng.random((n, group)) ** 3 * 128).astype(np.int64)
    scattered = np.maximum(top - drop, 0)
    short = rng.integers(0, 65, (n, group)) / 64 * 2.0 ** -rng.integers(0, 8, (n, group))
    with np.errstate(all="ignore"):
        value = (top << 16).astype(np.uint32).view(np.float32).astype(np.float64) * short
        fractions = patterns(value).astype(np.int64) & 0x7FFF
    x = np.where(rng.random((n, group)) < 0.5, scattered, np.where(fractions <= top, fractions, scattered))
    x |= rng.integers(0, 2, (n, group)) << 15
    x[np.arange(n), np.arange(n) % group] = maxima
    return x.astype(np.uint16)


def edge_groups(group):
    """[n, group]: zeros, NaN, Inf, subnormals, scales at both ends of their range, every tie of both code tables."""
    rows = []

    def add(*leading, fill=0):
        row = np.full(group, fill, np.uint16)
        row[: len(leading)] = leading
        rows.append(row)
        rows.append(np.roll(row, group // 2 + 1))

    one = int(patterns(1.0))
    add()  # +0
    add(fill=0x8000)  # -0
    add(0x8000, 0, 0x8000)
    add(fill=NAN)  # nothing but NaN: absmax 0
    add(NEGATIVE_NAN, one, 0x8000 | one, 0x8000, 0)  # NaN beside numbers
    add(INF, one, 0x8000 | one, 0, 0x8000, NAN, NEGATIVE_INF)
    add(NEGATIVE_INF, 0x7F7F, 0xFF7F)
    add(0x7F7F, 0xFF7F, 0x7F00, one, 0x0001, 0x8001)  # the largest numbers, and the smallest
    for bits in (0x01, 0x02, 0x3F, 0x40, 0x41, 0x7F, 0x80, 0x81, 0xFF, 0x100, 0x180, 0x200, 0x280):
        # subnormals, and where MX scales reach 2**-127
        add(bits, 0x8000 | bits, 1, 0x8001, bits // 2, 0x8000)
    for exponent in range(-20, -4):  # NVFP4: scales that are subnormal in e4m3 or underflow
        for mantissa in (1.0, 1.0078125, 1.25, 1.5, 1.75, 1.9921875):
            v = int(patterns(6 * mantissa * 2.0**exponent))
            add(v, 0x8000 | v, int(patterns(mantissa * 2.0**exponent)), 0x8000)
    for value in (1e-4, 2e-5, 3e-9, 448e-4, 1e-4 / 448):  # blockwise FP8: the floor of the scale
        add(int(patterns(value)), int(patterns(-value / 3)), 0x8000)
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0.249, 0.251, 4.99, 5.03, 6, 7]
    for power in (-126, -100, -3, 0, 1, 60, 120):
        for lo in range(0, len(ties), group - 2):
            part = [t * 2.0**power for t in ties[lo : lo + group - 2]]
            add(int(patterns(6 * 2.0**power)), *(int(p) for p in patterns(part)))
            add(int(patterns(-4 * 2.0**power)), *(int(p) for p in patterns([-t for t in part])))
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    middles = (codes[1:] + codes[:-1]) / 2
    for power in (-12, 0, 7):
        for lo in range(0, 126, group - 1):
            part = middles[lo : lo + group - 1] * 2.0**power
            add(int(patterns(448 * 2.0**power)), *(int(p) for p in patterns(part)))
            add(int(patterns(-448 * 2.0**power)), *(int(p) for p in patterns(-part)))
    return np.stack(rows)


def as_rows(groups, hidden):
    """Groups [n, group] end to end in rows of `hidden`; the last row is filled up with zeros."""
    flat = groups.reshape(-1)
    n = -(-flat.size // hidden)
    return np.concatenate([flat, np.zeros(n * hidden - flat.size, np.uint16)]).reshape(n, hidden)
