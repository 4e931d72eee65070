"""Right memory passes; each wrong word gets the message for its own mistake and no other."""

import numpy as np
import pytest
import wrong_words
from numpy_world import NumpyWorld
from word_world import WordWorld

from epmoe.check import Implementation, check
from epmoe.check.causes import OR
from epmoe_ref.errors import EPValueError

# class -> (region, words of its likely cause)
LEFT, EARLY = "it is not reset: it still has its value from before", "it is reset too early"
MISTAKES = {
    "CountersNotReset": ("reserved", LEFT),
    "FinishedNotReset": ("finished", LEFT),
    "CompletionNotReset": ("rank_completion", LEFT),
    "ReservedResetEarly": ("reserved", EARLY),
    "CompletionCountsPeersOnce": ("rank_completion", "each peer is counted once"),
    "SignalsNotReset": ("dispatch_recv_count", "not put back to MAX_FINITE"),
    "SignalsResetToZero": ("combine_recv_count", "put back to 0, which is a real count"),
    "SignalsResetInHalf": ("dispatch_recv_count", "only 32 bits of the words"),
    "NoSignalOfZero": ("dispatch_recv_count", "signals of count 0 are not sent"),
    "CountTooLarge": ("dispatch_recv_count", "the counts are one too large"),
    "CountOfAllExperts": ("combine_recv_count", "the count of all experts of the rank is sent to each"),
    "SignalsAtTheReceiver": ("dispatch_recv_count", "the signals lie at the receiver's rank"),
    "LocalExpertIds": ("dispatch_recv_buf", "topk_info holds local expert ids"),
    "SlotForToken": ("dispatch_recv_buf", "src_info holds k;"),
    "NoTrailer": ("dispatch_recv_buf", "src_info and topk_info are both wrong"),
    "PayloadLate": ("dispatch_recv_buf", "the signal went out before the payload"),
    "PayloadOfTheNext": ("dispatch_recv_buf", "the payload is wrong, the trailer is right"),
    "SlotClaimedTwice": ("dispatch_recv_buf", "slots were claimed twice"),
    "SlotSkipped": ("dispatch_recv_buf", "a slot that counts was never written"),
    "MessageInTheNextSegment": ("dispatch_recv_buf", "in the segment of another src_rank"),
    "MessageAtTheOtherExpert": ("dispatch_recv_buf", "in the segment of another local expert"),
    "MessageOnTheNextRank": ("dispatch_recv_buf", "on another rank than their expert's owner"),
    "ReadyMissing": ("A", "READY (1024) is missing"),
    "StartRows": ("A", "these are start rows"),
    "RowsWithinTheExpert": ("A", "sums within an expert"),
    "PaddingNotCounted": ("A", "the row padding of the format is not counted"),
    "SharedRowsNotCounted": ("A", "the shared expert's rows are not counted"),
    "EntryZeroedEarly": ("A", "zero before combine_async has read it"),
    "EntryNotZeroed": ("A", LEFT),
    "OnlyHalfZeroed": ("A", "only some of its words are reset"),
    "FlagsLeftRaised": ("combine_wait", "not lowered again"),
    "ReadyFlagLeftRaised": ("E", "not lowered again"),
    "RowsMissing": ("combine_recv_buf", "rows are missing"),
    "RowsInAnotherSlot": ("combine_recv_buf", "rows lie at another k"),
    "RowsAtTheNextToken": ("combine_recv_buf", "rows lie at another token"),
}
CASES = {"PaddingNotCounted": "fp8_blockwise with a shared expert", "SharedRowsNotCounted": "a shared expert"}


@pytest.fixture(scope="module")
def reports():
    return {
        name: check(getattr(wrong_words, name), n_ranks=3, only=CASES.get(name, "uneven ranks")) for name in MISTAKES
    }


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.by_day(1)
def test_right_words_pass(n_ranks, each_case_once):
    report = check(WordWorld, n_ranks=n_ranks)
    assert report.passed, str(report)
    assert len(report.run) >= 15


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_word_is_named(name, reports):
    what, said = MISTAKES[name]
    named = [d for o in reports[name].failed for d in o.differences if d.what == what and said in d.cause]
    assert named, str(reports[name])
    assert named[0].rule and " after " in named[0].says and ", wanted " in named[0].says


@pytest.mark.parametrize("name", MISTAKES)
def test_no_other_wrong_word_is_named(name, reports):
    said = MISTAKES[name][1]
    causes = {d.cause for o in reports[name].failed for d in o.differences if d.cause and d.what == MISTAKES[name][0]}
    assert all(said in cause for cause in causes), causes
    assert any(OR not in cause for cause in causes), causes


def test_a_difference_says_region_indices_both_values_and_the_rule(reports):
    text = str(reports["ReadyMissing"].failed[0].differences[0])
    for part in (
        "rank 0: A [local_expert 0, src_rank 0, READY + end row] after dispatch_wait is ",
        ", wanted 10",
        "rule: A[2i] = READY + end row",
        "likely cause: READY (1024) is missing",
    ):
        assert part in text, text
    text = str(reports["LocalExpertIds"].failed[0].differences[0])
    assert "topk_info of the message of token" in text and "wanted 0x" in text


def test_memory_of_another_shape_or_name_is_a_difference():
    class Odd(WordWorld):
        def buffers(self):
            return {"recv_buf": self.recv_buf, "combine_recv_count": self.back_count.astype(np.int64)}

    text = str(check(Odd, n_ranks=2))
    assert "gave 'recv_buf'; there are dispatch_recv_buf" in text
    assert "combine_recv_count is int64" in text and "the model has uint64" in text


def test_memory_that_is_not_as_before_the_first_round_is_a_difference():
    class Full(WordWorld):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.recv_count[:] = 0

    text = str(check(Full, n_ranks=2, only="uneven"))
    assert "dispatch_recv_count [local_expert 0, src_rank 0] at the start is 0, wanted MAX_FINITE" in text


def test_without_halves_words_are_compared_after_dispatch_and_after_combine():
    class Whole(WordWorld):
        dispatch_async = dispatch_wait = combine_async = combine_wait = None

        def dispatch(self, input_tokens, topk_ids):
            WordWorld.dispatch_async(self, input_tokens, topk_ids)
            return WordWorld.dispatch_wait(self)

        def combine(self, expert_outputs, dispatched, router_weights):
            WordWorld.combine_async(self, expert_outputs, dispatched)
            return WordWorld.combine_wait(self, router_weights)

    class Wrong(Whole):
        reset_after_combine = wrong_words.EntryNotZeroed.reset_after_combine

    assert check(Whole, n_ranks=2, only="uneven").passed
    part = type("Part", (Whole,), {"counters": None})
    assert "not given and not compared: ep_counters)" in check(part, n_ranks=2, only="uneven").verdict
    report = check(Wrong, n_ranks=2, only="uneven")
    assert "A [local_expert 0, src_rank 0, READY + end row] after combine_wait" in str(report)


def test_some_halves_without_the_others_are_refused():
    class Half(NumpyWorld):
        dispatch_async = WordWorld.dispatch_async

    with pytest.raises(EPValueError, match="Half has dispatch_async; all four of dispatch_async, dispatch_wait"):
        check(Half, n_ranks=2)

    class Nothing(Implementation):
        pass

    with pytest.raises(EPValueError, match="has no method dispatch"):
        check(Nothing, n_ranks=2)
