"""Likely causes of wrong counts. Counts the ids again with one mistake at a time.

A mistake is a function (cfg, rank, src_rank, ids). It returns the ids [T, top_k] as that rank would count them here.
"""

import numpy as np

from epmoe.check.compare import array
from epmoe_ref import format_of


def _first_of_rank(cfg, ids):
    """The ids with -1 for all but the first k of each rank that a token goes to."""
    owner, first = ids // cfg.n_local_experts, ids.copy()
    for k in range(1, ids.shape[1]):
        again = (owner[:, :k] == owner[:, k : k + 1]).any(axis=1)
        first[again, k] = -1
    return first


def _in_turn(cfg, ids):
    return np.where(ids < 0, ids, ids % cfg.n_ranks * cfg.n_local_experts + ids // cfg.n_ranks)


def up_to_minus_one(ids):
    """bool [T, k]: the ids before a token's first -1."""
    return np.logical_and.accumulate(ids >= 0, axis=1)


def without_minus_one(ids):
    """bool [T, k]: all ids of the tokens that have no -1."""
    return np.broadcast_to((ids >= 0).all(axis=1, keepdims=True), ids.shape)


MISTAKES = (
    (
        "a token ends at its first -1; each k counts for itself, whatever is before it",
        lambda cfg, rank, source, ids: np.where(up_to_minus_one(ids), ids, -1),
    ),
    (
        "exactly the tokens that have a -1 are left out; their other k count",
        lambda cfg, rank, source, ids: np.where(without_minus_one(ids), ids, -1),
    ),
    (
        "-1 was treated as expert 0; it means: no expert, nothing is sent",
        lambda cfg, rank, source, ids: np.where(ids < 0, 0, ids),
    ),
    (
        "-1 was used as an index and hit the last expert; it means: no expert, nothing is sent",
        lambda cfg, rank, source, ids: np.where(ids < 0, cfg.n_experts - 1, ids),
    ),
    ("the last token of each src_rank is left out", lambda cfg, rank, source, ids: ids[:-1]),
    ("the first token of each src_rank is left out", lambda cfg, rank, source, ids: ids[1:]),
    ("only k = 0 of each token is sent", lambda cfg, rank, source, ids: ids[:, :1]),
    ("the last k of each token is left out", lambda cfg, rank, source, ids: ids[:, :-1]),
    (
        "a token with several experts on a rank is counted there once; each (token, k) is a row of its own",
        lambda cfg, rank, source, ids: _first_of_rank(cfg, ids),
    ),
    (
        "tokens for the rank's own experts are left out; a rank sends to itself too",
        lambda cfg, rank, source, ids: ids[:0] if source == rank else ids,
    ),
    (
        "experts were dealt to the ranks in turn; expert e is on rank e // n_local_experts",
        lambda cfg, rank, source, ids: _in_turn(cfg, ids),
    ),
)


def offsets_of(suspect, recv_count, pad=None):
    """The row_offsets for these counts, with groups rounded up to `pad` rows."""
    pad = format_of(suspect.cfg).pad_rows if pad is None else pad
    shared = [len(suspect.where.shared())] if suspect.cfg.fused_shared_expert else []
    counts = np.concatenate([shared, recv_count.sum(axis=1)]).astype(np.int64)
    return np.concatenate([[0], np.cumsum(-(-counts // pad) * pad)])


def counts_are_wrong(suspect):
    """Whether the result has a recv_count that differs from the reference's."""
    recv_count = array(suspect.result, "recv_count")
    return recv_count is not None and not same(recv_count, suspect.reference.recv_count)


def same(a, b):
    """Whether two arrays of integers hold the same numbers."""
    return (
        a is not None
        and a.dtype.kind in "iu"
        and a.shape == b.shape
        and bool((a.astype(np.int64) == b.astype(np.int64)).all())
    )


def _given(suspect, counts):
    """Whether the result's counts, or its offsets if it gives no counts, are these [n_local_experts, n_sources]."""
    recv_count = array(suspect.result, "recv_count")
    if recv_count is not None:
        return same(recv_count, counts)
    return same(array(suspect.result, "row_offsets"), offsets_of(suspect, counts))


def _test(mistaken):
    def test(suspect):
        cfg, rank = suspect.cfg, suspect.rank
        sources = [rank] if cfg.skip_a2a else range(cfg.n_ranks)
        ids = [mistaken(cfg, rank, source, suspect.round.topk_ids[source]) for source in sources]
        counts = np.stack([np.bincount(i[i >= 0], minlength=cfg.n_experts) for i in ids], 1)
        counts = counts[rank * cfg.n_local_experts : (rank + 1) * cfg.n_local_experts]
        if same(counts, suspect.reference.recv_count):
            return False  # the mistake would change nothing in this round
        return _given(suspect, counts)

    return test


def _cut_off(suspect):
    """Whether all counts above some number are cut to that number."""
    want = suspect.reference.recv_count
    return any(_given(suspect, np.minimum(want, room)) for room in range(int(want.max(initial=0))))


def _experts_cut_off(suspect):
    """Whether the experts' row counts above some number are cut to it, with the last sources' rows left out."""
    before = np.cumsum(suspect.reference.recv_count, axis=1) - suspect.reference.recv_count
    most = int(suspect.reference.recv_count.sum(axis=1).max(initial=0))
    return any(_given(suspect, np.clip(room - before, 0, suspect.reference.recv_count)) for room in range(most))


COUNT_CAUSES = [(sentence, _test(mistaken)) for sentence, mistaken in MISTAKES] + [
    ("rows beyond a fixed number for each (expert, src_rank) are left out; every routed pair arrives", _cut_off),
    ("rows beyond a fixed number for each expert are left out; every routed pair arrives", _experts_cut_off),
]
