"""Likely causes of wrong numbers: lost NaN and subnormals, elements that changed places, blockwise FP8's scales."""

import ml_dtypes
import numpy as np

from epmoe.check.compare import array, row_shape_fits
from epmoe.check.compare_segments import compare_src_info, scales_of
from epmoe.check.difference import bits
from epmoe.check.places import packed

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


def _payloads(suspect):
    """(result's, reference's) elements that differ in their bits; None if a byte holds two elements."""
    if packed(suspect.cfg):
        return None
    a, b = matched_tokens(suspect)
    different = bits(a) != bits(b)
    return a[different], b[different]


NAN_LOST = "NaN is lost: every element that differs is NaN in the reference, and is none here"
FLUSHED = "subnormal numbers are lost: every element that differs is one in the reference, and is 0 here"


def nan_lost(got, want):
    """Whether all elements that differ, floats of any type, are NaN only in the reference."""
    return bool((np.isnan(want) & ~np.isnan(got)).all())


def flushed(got, want):
    """Whether all elements that differ, of the reference's type, are subnormal in it and 0 in the result."""
    if want.dtype.kind in "iu":
        return False
    return bool(((got == 0) & (want != 0) & (np.abs(want) < ml_dtypes.finfo(want.dtype).smallest_normal)).all())


def _elements(test):
    def of(suspect):
        differing = _payloads(suspect)
        return differing is not None and test(*differing)

    return of


def _changed(change):
    """A test: the result's rows are bf16, change(the reference's), and some row differs."""

    def test(suspect):
        if suspect.cfg.token_format != "bf16":
            return False
        got, want = matched_tokens(suspect)
        made = change(want)
        same = (bits(got) == bits(made)) | (np.isnan(got) & np.isnan(made))
        return bool(same.all() and (bits(made) != bits(want)).any())

    return test


def _neighbours_swapped(rows):
    return rows.reshape(len(rows), -1, 2)[:, :, ::-1].reshape(rows.shape)


def _bytes_swapped(rows):
    return bits(rows).byteswap().view(rows.dtype)


def _through(kind):
    return lambda rows: rows.astype(np.float32).astype(kind).astype(np.float32).astype(rows.dtype)


def _nan_of_other_bits(suspect):
    differing = _payloads(suspect)
    return differing is not None and bool((np.isnan(differing[0]) & np.isnan(differing[1])).all())


def _scales(suspect):
    """(result's, reference's) float32 scales of the rows; None for other scales."""
    got, want = suspect.got, suspect.want
    if (
        want.dtype != np.float32
        or got.dtype != np.float32
        or not row_shape_fits(suspect.cfg, "output_scales", got, want)
    ):
        return None
    where, cfg = suspect.where, suspect.cfg
    offsets, pairs = suspect.reference.row_offsets, matched(suspect)
    return tuple(
        scales_of(cfg, x, x.shape, rows, where, offsets).view(np.float32).astype(np.float64)
        for x, rows in ((got, pairs[:, 0]), (want, pairs[:, 1]))
    )


def _reciprocals(suspect):
    scales = _scales(suspect)
    return scales is not None and np.allclose(scales[0] * scales[1], 1, rtol=1e-6)


def _one_factor(suspect):
    scales = _scales(suspect)
    if scales is None:
        return False
    finite = np.isfinite(scales[1])
    factors = scales[0][finite] / scales[1][finite]
    return len(factors) > 1 and abs(factors[0] - 1) > 1e-5 and np.allclose(factors, factors[0], rtol=1e-6)


def _off_by_an_ulp(suspect):
    scales = _scales(suspect)
    if scales is None:
        return False
    got, want = (bits(s.astype(np.float32)).astype(np.int64) for s in scales)
    return int(abs(got - want).max(initial=0)) == 1


def _no_floor(suspect):
    scales = _scales(suspect)
    return scales is not None and bool((scales[1][scales[0] != scales[1]] == FLOOR).all())


PAYLOAD_CAUSES = [
    (NAN_LOST, _elements(nan_lost)),
    (FLUSHED, _elements(flushed)),
    ("the two elements of each 4 bytes are swapped", _changed(_neighbours_swapped)),
    ("the two bytes of each element are swapped", _changed(_bytes_swapped)),
    ("the tokens went through fp16 on their way, which has another range than bf16", _changed(_through(np.float16))),
    ("the tokens went through fp8 (e4m3) on their way", _changed(_through(ml_dtypes.float8_e4m3fn))),
    ("NaN has other bits than the format's: the reference's have no sign", _nan_of_other_bits),
]
SCALE_CAUSES = [
    ("the scales are reciprocals: an element is its code times the scale", _reciprocals),
    ("all scales are wrong by one factor: another largest number than the format's, 448", _one_factor),
    ("scales are off by an ulp: absmax is multiplied by the reciprocal of 448, not divided by 448", _off_by_an_ulp),
    ("the floor is missing: absmax is taken to be 1e-4 at least", _no_floor),
]
