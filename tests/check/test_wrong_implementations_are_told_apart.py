"""A right NumPy implementation passes; each wrong one gets the message for its own mistake and no other."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import wrong_combines
import wrong_dispatches
from numpy_world import NumpyWorld

from epmoe.check import check
from epmoe.check.adapters.reference import Reference
from epmoe.check.causes import OR

pytestmark = pytest.mark.usefixtures("each_case_once")

# class -> (array that differs, words of its likely cause or of what the message says)
MISTAKES = {
    "SlotOrder": ("output_tokens", "payload and src_info of a segment's rows do not belong together"),
    "RankOrder": ("src_info", "in another order of src_ranks"),
    "DoubleRounding": ("output", "double rounding: the sum is rounded to"),
    "MinusOneIsZero": ("recv_count", "-1 was treated as expert 0"),
    "OffByOne": ("row_offsets", "off by one: every entry is one too large"),
    "ScaleNotTransposed": ("output_scales", "the scales are not transposed"),
    "PaddingForgotten": ("row_offsets", "the padding was forgotten"),
    "WeightsTwice": ("output", "the weights are applied twice"),
    "SrcInfoSwapped": ("src_info", "the two columns are swapped"),
    "StaleRows": ("output_tokens", "stale rows"),
    "GlobalExpertIds": ("expert_ids", "they are global ids"),
    "NotFused": ("output", "a fused multiply-add rounds once a step"),
    "Descending": ("output", "the rows are added in descending order of k"),
    "MinusOneTakesPart": ("output", "ids of -1 take part: NaN at exactly the tokens that have one"),
    "GarbageAtMinusOne": ("output", "rows of ids of -1 are not zero"),
    "LastTokenLost": ("recv_count", "the last token of each src_rank is left out"),
    "FirstSlotOnly": ("recv_count", "only k = 0 of each token is sent"),
    "ExpertsInTurn": ("recv_count", "experts were dealt to the ranks in turn"),
    "OtherRanksPayload": ("output_tokens", "each row holds the token with its number of another src_rank"),
    "NoFloor": ("output_scales", "the floor is missing"),
    "ReciprocalScales": ("output_scales", "the scales are reciprocals"),
    "NanIsZero": ("output_tokens", "NaN is lost"),
    "CutOff": ("output", "the sum is cut off to bf16"),
    "WeightsNormalised": ("output", "the weights are normalised"),
    "AddsToTheRoundBefore": ("output", "the sum is added to what the previous round left there"),
    "OtherRanksTokens": ("output", "these are the tokens of rank "),
    "LastTokenZero": ("output", "the tokens that differ are all zeros"),
    "InFloat64": ("output", "the sum is kept in float64"),
    "ByExpert": ("output", "the rows are added in the order of their experts' ids"),
    "WeightsByExpert": ("output", "the weights are in the order of the experts' ids"),
    "RanksFirst": ("output", "each rank's rows are summed first, then the ranks' sums"),
    "RanksFirstRounded": ("output", "each rank's rows are summed first and rounded to "),
    "BeginsWithTheProduct": ("output", "zeros have the wrong sign"),
    "SubnormalsAreZero": ("output", "subnormal sums are lost"),
    "SumIsNeverNan": ("output", "sums are never NaN"),
    "NeverCleared": ("output", "the sum begins with the previous round's"),
    "ThroughHalf": ("output_tokens", "the tokens went through fp16"),
    "NeighboursSwapped": ("output_tokens", "the two elements of each 4 bytes are swapped"),
    "PadsEveryGroup": ("row_offsets", "each group's row count is rounded up to 16"),
    "CountsForOffsets": ("row_offsets", "they are the row counts themselves"),
    "RowsBeside": ("output_tokens", "each row holds its neighbour's payload"),
    "OutputsBeside": ("output", "each (token, k) has the row next to its own"),
    "LastColumnsLost": ("output_tokens", "the last columns of the rows are lost"),
    "LastSumsLost": ("output", "the last columns of the output are lost"),
    "RoomForThree": ("recv_count", "rows beyond a fixed number for each (expert, src_rank) are left out"),
    "SortedByToken": ("src_info", "an expert's rows are not grouped by src_rank"),
    "WritesInput": ("topk_ids", "was written to"),
    "WeightsRounded": ("output", "the weights are rounded to bf16"),
    "StopsAtMinusOne": ("recv_count", "a token ends at its first -1"),
    "SumStopsAtMinusOne": ("output", "a sum ends at its token's first -1"),
    "MinusOneLosesTheToken": ("recv_count", "exactly the tokens that have a -1 are left out"),
    "ScalesByReciprocal": ("output_scales", "scales are off by an ulp"),
    "HalfAway": ("output", "halves are rounded away from zero"),
    "CountsDescending": ("recv_count", "the src_ranks are in descending order"),
    "StaleWhenEmpty": ("recv_count", "these are the counts of the previous round"),
    "OneBuffer": ("output_tokens", "the ranks' arrays share memory"),
    "UsualNan": ("output_tokens", "NaN has other bits"),
    "NanInAbsmax": ("output_tokens", "absmax is NaN where the group has one"),
    "TimesReciprocal": ("output_tokens", "values are multiplied by 1 / scale"),
    "PowersOfTwo": ("output_scales", "scales are rounded up to powers of two"),
    "GroupsOf64": ("output_scales", "a scale is for 64 columns"),
    "Raises": ("dispatch", "raised IndexError: index 12 is out of bounds"),
}


WRONG = vars(wrong_dispatches) | vars(wrong_combines)


@pytest.fixture(scope="module")
def reports():
    """The report on each mistake, made once."""
    return cache(lambda name: check(WRONG[name], n_ranks=2))


@pytest.mark.parametrize("n_ranks", [3, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_right_implementation_passes(n_ranks):
    report = check(NumpyWorld, n_ranks=n_ranks)
    assert report.passed, str(report)
    assert len(report.run) >= 15
    assert "PASS NumpyWorld" in report.verdict


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.by_day(10)
def test_a_mistake_is_named(name, reports):
    what, words = MISTAKES[name]
    failed = reports(name).failed
    assert failed
    named = [d for o in failed for d in o.differences if d.what == what and words in str(d)]
    assert named, str(reports(name))


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.by_day(10)
def test_no_other_mistake_is_named(name, reports):
    """Only the right cause is named; where a case cannot tell two apart, the right one is among them."""
    words = MISTAKES[name][1]
    causes = {d.cause for o in reports(name).failed for d in o.differences if d.cause}
    assert all(words in cause for cause in causes), causes
    assert not causes or any(OR not in cause for cause in causes), causes


@pytest.mark.nightly
def test_the_messages_are_as_many_as_the_mistakes(reports):
    def told(report):
        texts = [str(d) for o in report.failed for d in o.differences if OR not in d.cause]
        return {name for name, (_, words) in MISTAKES.items() if any(words in text for text in texts)}

    assert {name: told(reports(name)) for name in MISTAKES} == {name: {name} for name in MISTAKES}


def test_an_epilogue_that_gets_the_unrounded_sum_is_named():
    class Unrounded(Reference):
        def combine(self, expert_outputs, dispatched, router_weights, epilogue, epilogue_args):
            self.cfg = replace(self.cfg, combine_dtype="fp32")
            rows = [y.astype(np.float32) for y in expert_outputs]
            sums = super().combine(rows, dispatched, router_weights, epilogue=epilogue, epilogue_args=epilogue_args)
            return [s.astype(expert_outputs[0].dtype) for s in sums]

    text = str(check(Unrounded, n_ranks=2, only="an epilogue"))
    assert "cause: the epilogue got the sum before it was rounded to bf16" in text and "the epilogue gets that" in text


def test_a_difference_says_rank_expert_src_rank_token_k_column_and_both_values(reports):
    difference = reports("SlotOrder").failed[0].differences[0]
    for word in ("rank ", "expert ", "src_rank ", "token ", " k ", "row ", "column ", " is ", "reference "):
        assert word in str(difference)
    assert "rows swapped within a segment: allowed" in str(difference)
