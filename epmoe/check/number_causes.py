"""Likely causes of wrong numbers: lost NaN and subnormals, elements that changed places, blockwise FP8's scales."""

import ml_dtypes
import numpy as np

from epmoe.check.compare import array, row_shape_fits, same_type
from epmoe.check.compare_segments import compare_src_info, scales_of
from epmoe.check.difference import bits
from epmoe.check.places import packed
from epmoe_ref.casts import absmax, to_e4m3

FLOOR = np.float32(1e-4) / np.float32(448)  # the scale of a group whose absmax is below 1e-4


def matched(suspect):
    """Rows [n, 2] of the result and of the reference that hold the same message. src_info must be right."""
    where = suspect.where
    rows = (array(x, "src_info")[: where.n_rows].astype(np.int64) for x in (suspect.result, suspect.reference))
    pairs = compare_src_info(suspect.cfg, suspect.rank, where, *rows)[1]
    return pairs[where.src_rank[pairs[:, 1]] != -1]


def matched_tokens(suspect):
    """(result's, reference's) rows of output_tokens that hold the same message."""
    pairs = matched(suspect)
    return suspect.got[pairs[:, 0]].view(suspect.want.dtype), suspect.want[pairs[:, 1]]


NAN_LOST = "NaN is lost: every element that differs is NaN in the reference, and is none here"
FLUSHED = "subnormal numbers are lost: every element that differs is one in the reference, and is 0 here"


def nan_lost(got, want):
    """Whether all elements that differ, floats of any type, are NaN only in the reference."""
    return bool((np.isnan(want) & ~np.isnan(got)).all())


def both_nan(got, want):
    """Whether all elements that differ are NaN in both."""
    return bool((np.isnan(got) & np.isnan(want)).all())


def flushed(got, want):
    """Whether all elements that differ, of the reference's type, are subnormal in it and 0 in the result."""
    if want.dtype.kind in "iu":
        return False
    return bool(((got == 0) & (want != 0) & (np.abs(want) < ml_dtypes.finfo(want.dtype).smallest_normal)).all())


def _elements(test):
    """A test of a suspect: test(result's, reference's elements that differ). Two elements in a byte do not pass it."""

    def of(suspect):
        if packed(suspect.cfg):
            return False
        got, want = matched_tokens(suspect)
        different = bits(got) != bits(want)
        return test(got[different], want[different])

    return of


def _changed(change):
    """A test: the result's rows are bf16, change(the reference's), and some row differs."""

    def test(suspect):
        if suspect.cfg.token_format != "bf16":
            return False
        got, want = matched_tokens(suspect)
        made = change(want)
        same = (bits(got) == bits(made)) | (np.isnan(got) & np.isnan(made))
        return bool(same.all() and ((bits(made) != bits(want)) & ~np.isnan(want)).any())

    return test


def _neighbours_swapped(rows):
    return rows.reshape(len(rows), -1, 2)[:, :, ::-1].reshape(rows.shape)


def _bytes_swapped(rows):
    return bits(rows).byteswap().view(rows.dtype)


def _through(kind):
    return lambda rows: rows.astype(np.float32).astype(kind).astype(np.float32).astype(rows.dtype)


def _scales(test):
    """A test of a suspect: test(result's, reference's float32 scales of the rows). Other scales do not pass it."""

    def of(suspect):
        cfg, got, want = suspect.cfg, suspect.got, suspect.want
        if not got.dtype == want.dtype == np.float32 or not row_shape_fits(cfg, "output_scales", got, want):
            return False
        where, offsets, pairs = suspect.where, suspect.reference.row_offsets, matched(suspect)
        rows = (got, pairs[:, 0]), (want, pairs[:, 1])
        held = (scales_of(cfg, x, x.shape, at, where, offsets).view(np.float32).astype(np.float64) for x, at in rows)
        return bool(test(*held))

    return of


def _one_factor(got, want):
    finite = np.isfinite(want)
    factors = got[finite] / want[finite]
    return len(factors) > 1 and abs(factors[0] - 1) > 1e-5 and np.allclose(factors, factors[0], rtol=1e-6)


def _off_by_an_ulp(got, want):
    got, want = (bits(s.astype(np.float32)).astype(np.int64) for s in (got, want))
    return int(abs(got - want).max(initial=0)) == 1


def _blockwise(scale=lambda s: s, largest=absmax, width=128, divided=np.divide):
    """A test: values, or scales, are those that blockwise FP8 with this mistake gives for the tokens of their rows."""

    def test(suspect):
        cfg, where = suspect.cfg, suspect.where
        if cfg.token_format != "fp8_blockwise" or cfg.skip_a2a or not same_type(suspect.got, suspect.want):
            return False
        if not row_shape_fits(cfg, suspect.name, suspect.got, suspect.want):
            return width * len(suspect.got) == cfg.hidden and width != 128
        pairs = matched(suspect)
        rows, of = pairs[where.src_rank[pairs[:, 1]] >= 0].T
        sources = zip(where.src_rank[of], suspect.reference.src_info[of, 0])
        tokens = np.array([suspect.round.input_tokens[rank][token] for rank, token in sources], np.float32)
        groups = tokens.reshape(len(rows), -1, width)
        scales = scale(np.maximum(largest(groups), np.float32(1e-4)) / np.float32(448))
        if suspect.name == "output_scales":
            return np.array_equal(suspect.got.T[rows], scales[..., 0], equal_nan=True)
        return np.array_equal(bits(suspect.got)[rows], bits(to_e4m3(divided(groups, scales))).reshape(len(rows), -1))

    return test


BLOCKWISE = [
    ("a scale is for 64 columns; it must be for 128", _blockwise(width=64)),
    (
        "values are multiplied by 1 / scale; they must be divided",
        _blockwise(divided=lambda x, s: x * (np.float32(1) / s)),
    ),
    ("scales are rounded up to powers of two", _blockwise(scale=lambda s: np.exp2(np.ceil(np.log2(s))))),
    (
        "absmax is NaN where the group has one; it must skip NaN",
        _blockwise(largest=lambda x: abs(x).max(2, keepdims=True)),
    ),
]
PAYLOAD_CAUSES = [
    *BLOCKWISE,
    (NAN_LOST, _elements(nan_lost)),
    (FLUSHED, _elements(flushed)),
    ("the two elements of each 4 bytes are swapped", _changed(_neighbours_swapped)),
    ("the two bytes of each element are swapped", _changed(_bytes_swapped)),
    ("the tokens went through fp16 on their way, which has another range than bf16", _changed(_through(np.float16))),
    ("the tokens went through fp8 (e4m3) on their way", _changed(_through(ml_dtypes.float8_e4m3fn))),
    ("NaN has other bits: bf16 arrives as it is, and other formats' NaN has no sign", _elements(both_nan)),
]
SCALE_CAUSES = [
    *BLOCKWISE,
    (
        "the scales are reciprocals: an element is its code times the scale",
        _scales(lambda got, want: np.allclose(got * want, 1, rtol=1e-6)),
    ),
    ("all scales are wrong by one factor: another largest number than the format's, 448", _scales(_one_factor)),
    (
        "scales are off by an ulp: absmax is multiplied by the reciprocal of 448, not divided by 448",
        _scales(_off_by_an_ulp),
    ),
    (
        "the floor is missing: absmax is taken to be 1e-4 at least",
        _scales(lambda got, want: (want[got != want] == FLOOR).all()),
    ),
]
