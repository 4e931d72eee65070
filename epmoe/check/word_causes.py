"""Likely causes of wrong words: common mistakes in kernels, each recognised by the whole region that it leaves.

A cause is named only if it explains every word of the region that is not free. Tests get a Suspect (words.py).
"""

import numpy as np

from epmoe.check.causes import best
from epmoe.check.message_causes import GENERAL_OF_MESSAGES, MESSAGE_CAUSES, ROW_CAUSES
from epmoe_ref import format_of
from epmoe_ref.config import READY
from epmoe_ref.protocol import MAX_FINITE


def cause_of(suspect):
    """The sentence that explains the region; several are joined if each would; "" if none does."""
    with np.errstate(all="ignore"):
        return best([cause for cause, test in CAUSES[suspect.name] if test(suspect)], GENERAL)


def _is(suspect, other):
    """Whether the region holds `other` wherever its words are not free."""
    return (
        other is not None
        and np.shape(other) == suspect.got.shape
        and bool(((suspect.got == other) | suspect.fixed.free).all())
    )


def _before(suspect):
    return suspect.before.get(suspect.name)


def _reset_is_due(suspect):
    idle = MAX_FINITE if suspect.name.endswith("count") else 0
    return bool((suspect.fixed.values == idle).all())


def _kept(suspect):
    return _reset_is_due(suspect) and _is(suspect, _before(suspect))


def _partly_kept(suspect):
    before = _before(suspect)
    if before is None or not _reset_is_due(suspect) or _kept(suspect):
        return False
    return _is(suspect, np.where(suspect.got == suspect.fixed.values, suspect.got, before))


def _zero_too_early(suspect):
    return not _reset_is_due(suspect) and _is(suspect, np.zeros_like(suspect.got))


def _left_raised(suspect):
    before = _before(suspect)
    return _reset_is_due(suspect) and before is not None and not before.any()


def _differ_by(amount):
    def test(suspect):
        values = suspect.fixed.values
        return bool((values != MAX_FINITE).all()) and _is(suspect, values.astype(np.int64) + amount)

    return test


def _where_wrong(suspect, wanted, got):
    """Whether every wrong word should be `wanted` (a test of values) and is `got`."""
    wrong = ~suspect.fixed.free & (suspect.got != suspect.fixed.values)
    return bool((wanted(suspect.fixed.values[wrong]) & (suspect.got[wrong] == np.uint64(got))).all())


def _no_signal_of_zero(suspect):
    return _where_wrong(suspect, lambda values: values == 0, MAX_FINITE)


def _no_signals(suspect):
    return _where_wrong(suspect, lambda values: (values != 0) & (values != MAX_FINITE), MAX_FINITE)


def _reset_to_zero(suspect):
    return _where_wrong(suspect, lambda values: values == MAX_FINITE, 0)


def _reset_to_32_bits(suspect):
    return _where_wrong(suspect, lambda values: values == MAX_FINITE, 2**32 - 1)


def _transposed(suspect):
    values = suspect.fixed.values
    return values.shape[0] == values.shape[1] and _is(suspect, np.swapaxes(values, 0, 1))


def _only_in_column_of_receiver(suspect):
    arrived = suspect.got != MAX_FINITE
    column = np.arange(arrived.shape[1]) == suspect.state.rank
    return arrived.shape[1] > 1 and bool((arrived == column).all())


def _one_count_a_rank(suspect):
    values = suspect.fixed.values
    return bool((values != MAX_FINITE).all()) and _is(
        suspect, np.broadcast_to(values.sum(axis=0, dtype=np.uint64), values.shape)
    )


def _per_peer(suspect):
    return _is(suspect, np.sign(suspect.fixed.values)) and not _is(suspect, suspect.fixed.values)


def _a(change):
    """A test of region A: its end rows and counts are change(end rows without READY, counts, suspect)."""

    def test(suspect):
        if suspect.step != "dispatch_wait":
            return False
        ends, counts = np.moveaxis(suspect.fixed.values.astype(np.int64), -1, 0)
        changed = change(ends - READY, counts, suspect)
        return changed is not None and _is(suspect, np.stack(changed, axis=-1))

    return test


def _without_shared(ends, counts, suspect):
    shift = int((ends - counts).min())
    return (ends - shift + READY, counts) if suspect.cfg.fused_shared_expert else None


def _without_padding(ends, counts, suspect):
    if format_of(suspect.cfg).pad_rows == 1:
        return None
    shift = len(suspect.state.topk_ids) if suspect.cfg.fused_shared_expert else 0
    return shift + np.cumsum(counts.ravel()).reshape(counts.shape) + READY, counts


def _within_expert(ends, counts, suspect):
    return np.cumsum(counts, axis=1) + READY, counts


LEFT = "it is not reset: it still has its value from before this step"
PARTLY = "only some of its words are reset"
GENERAL = (PARTLY, *GENERAL_OF_MESSAGES)
RESET = [(LEFT, _kept), (PARTLY, _partly_kept)]
EARLY = [("it is reset too early: dispatch_wait resets it, when everybody has read it", _zero_too_early)]
RAISED = [("what this step raised in it is not lowered again at its end", _left_raised)]
SIGNALS = [
    ("the words are not put back to MAX_FINITE after they were taken", _kept),
    (PARTLY, _partly_kept),
    ('the words are put back to 0, which is a real count; "not arrived" is MAX_FINITE, 2**64 - 1', _reset_to_zero),
    ("only 32 bits of the words are put back; MAX_FINITE is 2**64 - 1", _reset_to_32_bits),
    ("signals of count 0 are not sent; every one of the n_experts signals is sent in every round", _no_signal_of_zero),
    ("signals with a count are not sent", _no_signals),
    ("the counts are one too large", _differ_by(1)),
    ("the counts are one too small", _differ_by(-1)),
    ("the indices are swapped; the first is the local expert, the second the src_rank", _transposed),
    ("the signals lie at the receiver's rank; the second index is the src_rank", _only_in_column_of_receiver),
    ("the count of all experts of the rank is sent to each; a signal counts one expert's messages", _one_count_a_rank),
]
CAUSES = {
    "dispatch_recv_buf": MESSAGE_CAUSES,
    "combine_recv_buf": ROW_CAUSES,
    "dispatch_recv_count": SIGNALS,
    "combine_recv_count": SIGNALS,
    "reserved": [*RESET, *EARLY, ("the indices are swapped; the first is the local expert", _transposed)],
    "finished": [*RESET, *EARLY, ("the indices are swapped; the first is the local expert", _transposed)],
    "rank_completion": [*RESET, *EARLY, ("each peer is counted once; each signal to it counts", _per_peer)],
    "A": [
        *RESET,
        ("it is zero before combine_async has read it, or dispatch_wait does not write it", _zero_too_early),
        ("READY (1024) is missing: a written 0 could not be told from an unwritten one", _a(lambda e, c, s: (e, c))),
        ("these are start rows; the first word of an entry is READY + end row", _a(lambda e, c, s: (e - c + READY, c))),
        ("the two words of an entry are swapped", _a(lambda e, c, s: (c, e + READY))),
        ("the shared expert's rows are not counted in the end rows", _a(_without_shared)),
        ("the row padding of the format is not counted in the end rows", _a(_without_padding)),
        ("these are sums within an expert (region B), not rows of the output", _a(_within_expert)),
    ],
    "B": [],
    "C": [],
    "D": [*RESET, *RAISED],
    "E": [*RESET, *RAISED],
    "F": [*RESET, *RAISED],
    "G": [*RESET, *RAISED],
    "combine_wait": [*RESET, *RAISED],
}
