"""Likely causes of wrong numbers in the rows of a dispatch: of blockwise FP8's scales, and of codes of NaN."""

import numpy as np

from epmoe.check.compare import array
from epmoe.check.compare_segments import compare_src_info, scales_of
from epmoe.check.difference import bits
from epmoe.check.places import packed

FLOOR = np.float32(1e-4) / np.float32(448)      # the scale of a group whose absmax is below 1e-4


def _matched(suspect):
    """Rows [n, 2] of the result and of the reference that hold the same message; src_info must be right."""
    where = suspect.where
    rows = (array(x, "src_info")[:where.n_rows].astype(np.int64) for x in (suspect.got, suspect.want))
    pairs = compare_src_info(suspect.cfg, suspect.rank, where, *rows)[1]
    return pairs[where.src_rank[pairs[:, 1]] != -1]


def _payloads(suspect):
    """(result's, reference's) elements that differ in their bits, as float32; None where bytes hold two of them."""
    got, want = suspect.both("output_tokens")
    if packed(suspect.cfg):
        return None
    pairs = _matched(suspect)
    a, b = got[pairs[:, 0]].view(want.dtype), want[pairs[:, 1]]
    different = bits(a) != bits(b)
    return a[different].astype(np.float32), b[different].astype(np.float32)


def _nan_lost(suspect):
    differing = _payloads(suspect)
    return differing is not None and bool((np.isnan(differing[1]) & ~np.isnan(differing[0])).all())


def _nan_of_other_bits(suspect):
    differing = _payloads(suspect)
    return differing is not None and bool((np.isnan(differing[0]) & np.isnan(differing[1])).all())


def _scales(suspect):
    """(result's, reference's) float32 scales of the rows; None for other scales."""
    got, want = suspect.both("output_scales")
    if want.dtype != np.float32 or got.dtype != np.float32 or got.ndim != want.ndim or len(got) != len(want):
        return None
    where, cfg, offsets, pairs = suspect.where, suspect.cfg, suspect.want.row_offsets, _matched(suspect)
    return tuple(scales_of(cfg, x, x.shape, rows, where, offsets).view(np.float32).astype(np.float64)
                 for x, rows in ((got, pairs[:, 0]), (want, pairs[:, 1])))


def _reciprocals(suspect):
    scales = _scales(suspect)
    return scales is not None and np.allclose(scales[0] * scales[1], 1, rtol=1e-6)


def _one_factor(suspect):
    scales = _scales(suspect)
    if scales is None:
        return False
    finite = np.isfinite(scales[1])
    factors = scales[0][finite] / scales[1][finite]
    return len(factors) > 1 and np.allclose(factors, factors[0], rtol=1e-6)


def _no_floor(suspect):
    scales = _scales(suspect)
    return scales is not None and bool((scales[1][scales[0] != scales[1]] == FLOOR).all())


PAYLOAD_CAUSES = [
    ("NaN is lost: every element that differs is NaN in the reference, and is none here", _nan_lost),
    ("NaN has other bits than the format's: those of the reference have no sign", _nan_of_other_bits)]
SCALE_CAUSES = [
    ("the scales are reciprocals: an element is its code times the scale", _reciprocals),
    ("all scales are wrong by one factor: another largest number than the format's, 448", _one_factor),
    ("the floor is missing: absmax is taken to be 1e-4 at least", _no_floor)]
