"""Compares rows within (expert, src_rank) segments: src_info first, then payload, then scales.

Rows of a segment are matched by (token, k), so swapping whole rows makes no difference.
"""

import numpy as np

from epmoe.check.difference import Difference, bits, columns, shown, shown_fp4
from epmoe.check.places import global_expert, layout, packed, scale_index, src_rank_at
from epmoe_ref import format_of
from epmoe_ref.formats import scale_layout

SWAP = "rows swapped within a segment: allowed, if output_tokens, scales and src_info move together"
QUANTISED = {
    "fp8_blockwise": "s = max(absmax of 128 columns, 1e-4) / 448, q = e4m3(clamp(x / s, -448, 448)); absmax skips NaN",
    "nvfp4": "s = e4m3(g * (absmax of 16 columns * (1/6))), g the input scale, q = e2m1(x * (1 / (s * (1/g))))",
    "mxfp4": "s = e8m0(absmax of 32 columns * (1/6)), rounded up, q = e2m1(x * (1/s))",
    "mxfp8": "s = e8m0(absmax of 32 columns * (1/448)), rounded up, q = e4m3(x * (1/s))",
    "mxfp4_rows": "s = 2**(e - 127), e = ((bits(absmax of 32 columns) + 2**21) >> 23 & 255) - 2, from 0 to 254, "
    "q = e2m1(x / s)",
}


def compare_src_info(cfg, rank, where, got, want):
    """(first Difference or None, pairs): pairs [n, 2] are the rows of got and want that hold the same message."""
    order_got, order_want = _sorted_rows(where, got), _sorted_rows(where, want)
    wrong = np.flatnonzero((got[order_got] != want[order_want]).any(axis=1))
    if not len(wrong):
        return None, np.stack([order_got, order_want], axis=1)
    row_got, row = int(order_got[wrong[0]]), int(order_want[wrong[0]])
    segment = np.flatnonzero((where.group == where.group[row]) & (where.src_rank == where.src_rank[row]))
    src_rank = int(where.src_rank[row])
    place = dict(rank=rank, expert=global_expert(cfg, rank, where.group[row]), row=row_got)
    if src_rank < 0:
        kind = "a shared expert's row" if place["expert"] == "shared" else "a padding row"
        says = f"is {tuple(got[row_got].tolist())}, reference (-1, -1) in {kind}"
        rule = "src_info of shared and padding rows is (-1, -1)"
        return Difference("src_info", says, got, want, rule=rule, **place), None
    missing = _only_in(want[segment], got[segment])
    extra = _only_in(got[segment], want[segment])
    says = (
        f"of this segment (rows {segment[0]} to {segment[-1]}) lacks (token, k) {_some(missing)} and has "
        f"{_some(extra)} instead; {len(wrong)} of {where.n_rows} rows differ after sorting"
    )
    token, k = (int(x) for x in (missing[0] if missing else want[row]))
    place |= dict(src_rank=src_rank_at(cfg, rank, src_rank), token=token, k=k)
    rule = "src_info[row] = (token, k) at the src_rank. " + SWAP
    return Difference("src_info", says, got, want, rule=rule, **place), None


def _sorted_rows(where, src_info):
    """Row numbers by (group, src_rank, token, k). Shared and padding rows keep their order."""
    free = (where.src_rank >= 0)[:, None]
    key = np.where(free, src_info, 0)
    starts = (np.diff(where.group) != 0) | (np.diff(where.src_rank) != 0)
    segment = np.concatenate([[0], np.cumsum(starts)])[: where.n_rows]
    return np.lexsort((key[:, 1], key[:, 0], segment))


def _only_in(these, those):
    """Sorted pairs of `these` that `those` lacks, counting repetitions."""
    left = {}
    for pair in map(tuple, those.tolist()):
        left[pair] = left.get(pair, 0) + 1
    result = []
    for pair in sorted(map(tuple, these.tolist())):
        if left.get(pair, 0):
            left[pair] -= 1
        else:
            result.append(pair)
    return result


def _some(pairs):
    text = ", ".join(map(str, pairs[:3]))
    return text + (f" and {len(pairs) - 3} more" if len(pairs) > 3 else "") or "nothing"


def compare_payload(cfg, rank, where, pairs, src_info, got, want):
    """Differences of output_tokens over the matched rows. Padding rows are skipped."""
    pairs = _real(where, pairs)
    different = bits(got)[pairs[:, 0]] != bits(want)[pairs[:, 1]]
    if not different.any():
        return []
    n, column = (int(i) for i in np.argwhere(different)[0])
    row_got, row = (int(i) for i in pairs[n])
    a, b = got[row_got, column], want[row, column]
    if packed(cfg):
        byte_a, byte_b = int(bits(a.reshape(1))[0]), int(bits(b.reshape(1))[0])
        upper = (byte_a ^ byte_b) & 15 == 0
        column, texts = 2 * column + upper, (shown_fp4(byte_a, upper), shown_fp4(byte_b, upper))
    else:
        texts = shown(np.asarray(a).reshape(1).view(want.dtype)), shown(b)
    says = (
        f"is {texts[0]}, reference {texts[1]}; first of {int(different.sum())} differing elements in "
        f"{int(different.any(axis=1).sum())} of {len(pairs)} rows{'' if packed(cfg) else columns(different)}"
    )
    rule = "; ".join([*filter(None, [QUANTISED.get(cfg.token_format)]), SWAP])
    return [_at_row(cfg, rank, where, src_info, row_got, row, "output_tokens", says, got, want, column, rule)]


def compare_scales(cfg, rank, where, pairs, src_info, got, want, row_offsets):
    """Differences of output_scales over the matched rows, and of the zero bytes that fill 5-D tiles."""
    pairs = _real(where, pairs)
    shape = want.shape if got.size == want.size else got.shape  # slots may have another shape
    a = scales_of(cfg, got, shape, pairs[:, 0], where, row_offsets)
    b = scales_of(cfg, want, want.shape, pairs[:, 1], where, row_offsets)
    different = a != b
    if different.any():
        n, k = (int(i) for i in np.argwhere(different)[0])
        row_got, row = (int(i) for i in pairs[n])
        values = [shown(x[n, k].reshape(1).view(want.dtype)[0]) for x in (a, b)]
        V = format_of(cfg).group_size
        says = (
            f"of columns {k * V} to {k * V + V - 1} is {values[0]}, reference {values[1]}; first of "
            f"{int(different.sum())} differing scales in {int(different.any(axis=1).sum())} of {len(pairs)} rows"
        )
        rule = f"{QUANTISED[cfg.token_format]}; {LAYOUT_RULES[layout(cfg)]}"
        told = "output_scales", says, got, want, k * V, rule
        return [_at_row(cfg, rank, where, src_info, row_got, row, *told)]
    is_tiled = layout(cfg) is scale_layout.tiles_5d
    return _compare_tile_filling(cfg, rank, where, got, want, row_offsets) if is_tiled else []


def _compare_tile_filling(cfg, rank, where, got, want, row_offsets):
    unused = np.ones(want.size, bool)
    unused[scale_index(cfg, want.shape, row_offsets, where.group, where.row_in_group)] = False
    wrong = np.flatnonzero(unused & (bits(got)[: len(want)].reshape(-1) != 0))
    if not len(wrong):
        return []
    at = tuple(int(i) for i in np.unravel_index(wrong[0], want.shape))
    says = (
        f"[{', '.join(map(str, at))}] is 0x{int(bits(got)[at]):02x}, reference 0x00: a row past the end of its "
        f"expert; first of {len(wrong)}"
    )
    rule = "all 128 rows of a tile that an expert touches are written; rows past its count get 0"
    return [Difference("output_scales", says, got, want, rank, rule=rule)]


def scales_of(cfg, scales, shape, rows, where, row_offsets):
    """Bits of the scales of the given rows, [n, n_scales]."""
    index = scale_index(cfg, shape, row_offsets, where.group[rows], where.row_in_group[rows])
    return bits(scales).reshape(-1)[index]


LAYOUT_RULES = {
    scale_layout.transposed: "scales are transposed: [hidden / elements a scale, rows]",
    scale_layout.tiles_5d: "element (r, k) of a group has its scale at [r // 128, k // 4V, r % 32, r % 128 // 32, k // V % 4]",
    scale_layout.slots_4d: "scales lie in the slot layout of fuse_a_scale_preshuffle",
    scale_layout.row_major: "scales are row-major: [rows, hidden / elements a scale]",
}


def _real(where, pairs):
    return pairs[where.src_rank[pairs[:, 1]] != -1]


def _at_row(cfg, rank, where, src_info, row_got, row, what, says, got, want, column, rule):
    place = dict(rank=rank, expert=global_expert(cfg, rank, where.group[row]), row=row_got, column=column)
    if where.src_rank[row] >= 0:
        token, k = (int(x) for x in src_info[row])
        place |= dict(src_rank=src_rank_at(cfg, rank, where.src_rank[row]), token=token, k=k)
    else:
        place |= dict(token=int(where.row_in_group[row]))
    return Difference(what, says, got, want, rule=rule, **place)
