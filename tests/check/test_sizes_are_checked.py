"""Implementations that are right only for a few rows, experts, tokens or rounds fail, in every layout."""

import copy

import numpy as np
import pytest

from epmoe.check import check
from epmoe.check.adapters.reference import Reference, ReferenceHybrid, ReferenceRows


def scales_changed(change):
    """The reference, with change(scales as bytes) applied to output_scales."""

    class Changed(Reference):
        def dispatch(self, input_tokens, topk_ids, **options):
            results = super().dispatch(input_tokens, topk_ids, **options)
            for d in results:
                change(d.output_scales.view(np.uint8))
            return results

    return Changed


def rows_from_32_on(scales):
    scales[:, :, :, 1:] = 0


def second_tiles(scales):
    scales[1:] = 0


def upper_half_of_slots(scales):
    scales.reshape(-1)[1::2] = 0  # rows 16 to 31 of every 32


class WithoutRowOffsets(Reference):
    """scales_offset lacks its term - row_offsets // 128."""

    def dispatch(self, input_tokens, topk_ids, **options):
        results = [copy.copy(d) for d in super().dispatch(input_tokens, topk_ids, **options)]
        for d in results:
            tiles = -(-np.diff(d.row_offsets.astype(np.int64)) // 128)
            d.scales_offset = (np.cumsum(tiles) - tiles).astype(d.scales_offset.dtype)
        return results


TILED = [f"{token_format}, many rows" for token_format in ("nvfp4", "mxfp4", "mxfp8")]


@pytest.mark.parametrize(
    ("implementation", "cases"),
    [
        (scales_changed(rows_from_32_on), TILED),
        (scales_changed(second_tiles), TILED),
        (WithoutRowOffsets, TILED),
        (scales_changed(upper_half_of_slots), ["mxfp4_rows in slots, many rows"]),
    ],
)
def test_wrong_scales_of_many_rows_differ(implementation, cases):
    for case in cases:
        report = check(implementation, only=case)
        assert {d.what for o in report.failed for d in o.differences} <= {"output_scales", "scales_offset"}
        assert report.failed, str(report)


class Small(Reference):
    """As a kernel whose block is too small for more."""

    def dispatch(self, input_tokens, topk_ids, **options):
        assert max(map(len, input_tokens)) <= 128 or self.cfg.n_local_experts <= 32
        return super().dispatch(input_tokens, topk_ids, **options)


class SmallRows(ReferenceRows):
    def dispatch(self, x, token_indices, token_probs, num_experts):
        assert max(map(len, x)) <= 128 or num_experts <= 32 * len(x)
        return super().dispatch(x, token_indices, token_probs, num_experts)


class SmallHybrid(ReferenceHybrid):
    def dispatch(self, x, routing_map, probs, num_local_experts, **options):
        assert max(map(len, x)) <= 128 or num_local_experts <= 32
        return super().dispatch(x, routing_map, probs, num_local_experts, **options)


@pytest.mark.parametrize("implementation", [Small, SmallRows, SmallHybrid])
def test_a_large_batch_with_many_experts_is_tried(implementation):
    report = check(implementation, only="large batch")
    assert "raised AssertionError" in str(report)


@pytest.mark.parametrize("base", [Reference, ReferenceRows, ReferenceHybrid])
def test_results_that_are_lost_from_the_fourth_round_on_differ(base):
    class Lost(base):
        calls = 0

        def combine(self, *arguments, **options):
            self.calls += 1
            sums = super().combine(*arguments, **options)
            return sums if self.calls < 4 else [s * 0 for s in sums]

    report = check(Lost, only="five rounds")
    assert [d.round for o in report.failed for d in o.differences] == [4] * 4


@pytest.mark.parametrize("base", [Reference, ReferenceRows, ReferenceHybrid])
def test_batch_sizes_change_and_a_rank_gets_rows_then_none_then_rows(base):
    class Fixed(base):
        batch = rows = None

        def dispatch(self, x, *arguments, **options):
            results = super().dispatch(x, *arguments, **options)
            rows = [len(r.output_tokens) for r in results] if base is Reference else [len(r) for r in results[0]]
            turned = self.rows and [before and not now for before, now in zip(self.rows, rows)]
            assert not self.batch or self.batch == [*map(len, x)], f"another batch: {turned}"
            self.batch, self.rows = [*map(len, x)], rows
            return results

    report = check(Fixed)
    assert [o.case for o in report.failed] == ["batch sizes that change"]
    assert "another batch: [True, True, True, False]" in str(report)


def in_a_byte(array):
    return np.where(array < 0, array, array & 255)


@pytest.mark.parametrize("name", ["row_offsets", "src_info", "topk_ids"])
def test_numbers_that_need_more_than_a_byte_are_tried(name):
    class Narrow(Reference):
        def dispatch(self, input_tokens, topk_ids, **options):
            if name == "topk_ids":
                topk_ids = [in_a_byte(ids) for ids in topk_ids]
            results = [copy.copy(d) for d in super().dispatch(input_tokens, topk_ids, **options)]
            for d in results:
                setattr(d, name, in_a_byte(getattr(d, name)))
            return results

    assert len(check(Narrow, only="more than 256").failed) == 1


def test_there_may_be_more_ranks_than_share_an_interconnect():
    report = check(Reference, n_ranks=9, only="one slot")
    assert report.passed and "9 ranks" in report.verdict, str(report)
    assert "1 rank)" in check(Reference, n_ranks=1, only="one slot").verdict
