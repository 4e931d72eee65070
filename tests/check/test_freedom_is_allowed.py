"""Freedoms of the protocol are no difference: order inside segments, padding, unused slots, spare capacity."""

import copy

import numpy as np
import pytest

from epmoe.check import check
from epmoe.check.adapters.reference import Reference

pytestmark = pytest.mark.usefixtures("each_case_once")

VECTOR = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "mxfp4_rows": 32}
GARBAGE = 0xA5


def scale_place(cfg, d, group, mn, k):
    """Index in output_scales of the scale of row mn of a group and scale column k; computed from the specification, one at a time."""
    row = int(d.row_offsets[group]) + mn
    if cfg.token_format == "fp8_blockwise":
        return k, row
    if cfg.token_format == "mxfp4_rows" and not cfg.fuse_a_scale_preshuffle:
        return row, k
    if cfg.token_format == "mxfp4_rows":
        n_scales, capacity = cfg.hidden // 32, -(-cfg.n_ranks * cfg.max_tokens_per_rank // 32) * 32
        return (
            group * capacity * n_scales
            + (mn // 16) % 2
            + 2 * ((k // 4) % 2)
            + 4 * (mn % 16)
            + 64 * (k % 4)
            + 256 * (k // 8)
            + 32 * n_scales * (mn // 32),
        )
    tile = int(d.row_offsets[group]) // 128 + int(d.scales_offset[group]) + mn // 128
    return tile, k // 4, mn % 32, mn % 128 // 32, k % 4


class Free(Reference):
    """The reference's result with every free part changed."""

    def dispatch(self, input_tokens, topk_ids, **options):
        results = super().dispatch(input_tokens, topk_ids, **options)
        return [self.changed(rank, d) for rank, d in enumerate(results)]

    def changed(self, rank, d):
        cfg, first = self.cfg, int(self.cfg.fused_shared_expert)
        new = copy.copy(d)
        n_rows = int(d.row_offsets[-1])
        moved = np.arange(n_rows)  # new row <- old row; -1 for padding
        for group in range(len(d.row_offsets) - 1):
            start, end = int(d.row_offsets[group]), int(d.row_offsets[group + 1])
            if group < first:
                world = cfg.allreduce_world_size if cfg.skip_a2a else 1
                start += len([t for t in range(d.num_tokens) if not cfg.skip_a2a]) or (
                    (d.num_tokens + world - rank - 1) // world
                )
            else:
                for count in d.recv_count[group - first]:
                    moved[start : start + count] = moved[start : start + count][::-1]
                    start += count
            moved[start:end] = -1
        spare = np.full((3, d.output_tokens.shape[1] * d.output_tokens.dtype.itemsize), GARBAGE, np.uint8)
        spare = spare.view(d.output_tokens.dtype)
        new.output_tokens = np.concatenate([d.output_tokens[moved], spare])
        new.output_tokens[:n_rows][moved < 0] = spare[0]
        new.src_info = np.concatenate(
            [d.src_info[np.where(moved < 0, np.arange(n_rows), moved)], np.full((3, 2), 77, np.int32)]
        )
        if d.output_scales is not None:
            new.output_scales = self.moved_scales(d, moved)
        return new

    def moved_scales(self, d, moved):
        cfg = self.cfg
        n_scales = cfg.hidden // VECTOR.get(cfg.token_format, 128)
        old = d.output_scales.view(f"u{d.output_scales.dtype.itemsize}")
        new = np.full_like(old, GARBAGE)
        if cfg.token_format in ("nvfp4", "mxfp4", "mxfp8"):
            new[:] = 0  # rows past an expert's count in a tile are zero by definition
        if cfg.fuse_a_scale_preshuffle:
            old, flat = old.reshape(-1), new.reshape(-1)
        else:
            flat = new
        groups = np.repeat(np.arange(len(d.row_offsets) - 1), np.diff(d.row_offsets.astype(int)))
        for row, source in enumerate(moved):
            if source >= 0:
                start = int(d.row_offsets[groups[row]])
                for k in range(n_scales):
                    place = (scale_place(cfg, d, groups[row], at - start, k) for at in (row, int(source)))
                    flat[next(place)] = old[next(place)]
        new = new.view(d.output_scales.dtype)
        if cfg.fuse_a_scale_preshuffle:
            return new
        axis = 1 if cfg.token_format == "fp8_blockwise" else 0
        spare = np.zeros([3 if i == axis else n for i, n in enumerate(new.shape)], new.dtype)
        return np.concatenate([new, spare], axis=axis)

    def combine(self, expert_outputs, dispatched, router_weights, **options):
        for d, rows in zip(dispatched, expert_outputs):
            d.src_info, d.output_tokens = d.src_info[: len(rows)], d.output_tokens[: len(rows)]
        return super().combine(expert_outputs, dispatched, router_weights, **options)


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.by_day(1)
def test_everything_that_is_free_passes(n_ranks):
    report = check(Free, n_ranks=n_ranks)
    assert report.passed, str(report)
    assert len(report.run) == len(report.outcomes)


class NonZeroFilling(Reference):
    """Leaves garbage in the tile rows past an expert's count."""

    def dispatch(self, input_tokens, topk_ids, **options):
        results = super().dispatch(input_tokens, topk_ids, **options)
        for d in results:
            scales = d.output_scales.view(np.uint8)
            if scales.size:
                scales[-1, 0, 31, 3, 3] = GARBAGE
        return results


def test_tile_rows_past_an_experts_count_are_zero():
    report = check(NonZeroFilling, n_ranks=2, only="mxfp8 ")
    assert len(report.failed) == 2
    difference = report.failed[0].differences[0]
    assert difference.what == "output_scales"
    assert "0xa5, reference 0x00: a row past the end of its expert" in str(difference)
    assert "rows past its count get 0" in difference.rule


@pytest.mark.parametrize(
    "case",
    [f"{name} with a shared expert" for name in ("fp8_blockwise", "nvfp4", "mxfp4", "mxfp8", "mxfp4_rows")]
    + ["mxfp4_rows with scales in slots"],
)
def test_one_wrong_scale_is_found_and_placed(case):
    class OneWrongScale(Reference):
        def dispatch(self, input_tokens, topk_ids, **options):
            results = super().dispatch(input_tokens, topk_ids, **options)
            d = results[1]
            row = int(np.flatnonzero(d.src_info[:, 0] >= 0)[-1])
            group = int(np.searchsorted(d.row_offsets, row, side="right")) - 1
            place = scale_place(self.cfg, d, group, row - int(d.row_offsets[group]), 2)
            scales = d.output_scales.view(f"u{d.output_scales.dtype.itemsize}")
            (scales.reshape(-1) if len(place) == 1 else scales)[place] ^= 1
            type(self).expected = (row, *d.src_info[row].tolist())
            return results

    report = check(OneWrongScale, n_ranks=2, only=case)
    ((difference,),) = (o.differences for o in report.failed)
    assert (difference.what, difference.rank) == ("output_scales", 1)
    assert (difference.row, difference.token, difference.k) == OneWrongScale.expected
    assert difference.column == 2 * VECTOR.get(case.split()[0], 128)
    assert "first of 1 differing scales in 1 of" in str(difference)


class FewSlots(Reference):
    """Supports at most three experts a token."""

    max_top_k = 3

    def dispatch(self, input_tokens, topk_ids, **options):
        assert all(ids.shape[1] <= self.max_top_k for ids in topk_ids)
        return super().dispatch(input_tokens, topk_ids, **options)


def test_more_experts_a_token_than_an_implementation_takes_are_listed_as_not_served():
    report = check(FewSlots, n_ranks=2)
    reasons = {o.case: o.not_served for o in report.outcomes}
    assert report.passed, str(report)
    assert reasons["one slot"] is None and reasons["uneven ranks"] == "top_k 4, more than 3"
    assert reasons["as many slots as experts"] == "top_k 6, more than 3"
