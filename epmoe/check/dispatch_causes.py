"""Likely causes of a wrong dispatch: common mistakes, each recognised by the whole array that it would give.

`CAUSES[array]` lists (sentence, test). If the result passes a test, its sentence is the cause. A test gets a `Suspect`.
A cause is named only if it explains every difference of that array on that rank, so a wrong cause is unlikely.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from epmoe.check.causes import explained
from epmoe.check.compare import array, row_shape_fits, same_type
from epmoe.check.count_causes import COUNT_CAUSES, counts_are_wrong, offsets_of, same
from epmoe.check.number_causes import FLUSHED, NAN_LOST, SCALE_CAUSES
from epmoe.check.place_causes import ROWS_LOST
from epmoe.check.places import Places, layout, places_of
from epmoe.check.row_causes import ROW_CAUSES, same_up_to_segments
from epmoe_ref import format_of
from epmoe_ref.formats.scale_layout import transposed


@dataclass(frozen=True)
class Suspect:
    """One wrong array of one rank's result, by name, and the round (with its inputs and the previous round)."""

    round: object
    rank: int
    name: str

    @property
    def cfg(self):
        """The EPConfig."""
        return self.round.cfg

    @property
    def result(self):
        """The rank's whole result."""
        return self.round.dispatched[self.rank]

    @property
    def reference(self):
        """The reference's, a Dispatched."""
        return self.round.dispatched_want[self.rank]

    @property
    def got(self):
        """The array of the result; None if it has none."""
        return array(self.result, self.name)

    @property
    def want(self):
        """The reference's array."""
        return array(self.reference, self.name)

    @property
    def before(self):
        """The same array in this rank's result of the previous round, or None."""
        previous = self.round.previous
        return None if previous is None else array(previous.dispatched[self.rank], self.name)

    @property
    def where(self) -> Places:
        """The places of the reference's rows."""
        return places_of(self.cfg, self.rank, self.reference)

    @property
    def segment(self):
        """For each row a number of its (group, src_rank)."""
        return self.where.group * 2**20 + self.where.src_rank


def with_causes(round_, differences):
    """The differences of a round's dispatch, each with its likely cause if one is known."""

    def candidates(difference):
        suspect = Suspect(round_, difference.rank, difference.what)
        if suspect.got is None or not _comparable(suspect):
            return []
        of_counts = difference.what == "row_offsets" and counts_are_wrong(suspect)
        causes = COUNT_CAUSES if of_counts else CAUSES.get(difference.what, ())
        if _one_buffer(suspect):
            return ["the ranks' arrays share memory: a later rank's overwrites this one"]
        with np.errstate(all="ignore"):
            return [cause for cause, test in causes if test(suspect)]

    return explained(differences, candidates, (MIXED, NAN_LOST, FLUSHED, ROWS_LOST))


def _one_buffer(suspect):
    others = [result for result in suspect.round.dispatched if result is not None and result is not suspect.result]
    return any(np.shares_memory(suspect.got, array(other, suspect.name)) for other in others)


def _comparable(suspect):
    """Whether an array has the form that its causes need; a wrong form is all there is to say."""
    name, got, want = suspect.name, suspect.got, suspect.want
    if name in ("src_info", "output_tokens"):
        return row_shape_fits(suspect.cfg, name, got, want) and same_type(got, want)
    if name == "output_scales":  # some of its causes are about the form
        return got.ndim > 0
    return got.dtype.kind in "iu" and got.ndim == want.ndim


def _padded_to(rows):
    def test(s):
        return rows != format_of(s.cfg).pad_rows and same(s.got, offsets_of(s, s.reference.recv_count, rows))

    return test


def _counts_for_sums(s):
    counts = np.diff(s.want.astype(np.int64))
    return same(s.got, np.concatenate([[0], counts])) or same(s.got, counts)


def _shared_group_missing(s):
    return s.cfg.fused_shared_expert and same(s.got, s.want[1:].astype(np.int64) - int(s.want[1]))


def _not_arrived(s):
    return s.got.dtype.itemsize == 8 and bool((s.got.astype(np.int64) == -1).any())


def _from_before(s):
    return s.before is not None and same(s.got, s.before)


def _other_rank_order(suspect):
    """Each expert's rows are the reference's, but with its src_ranks in another order, the same for all experts."""
    where, n_src = suspect.where, suspect.reference.recv_count.shape[1]
    orders = [range(n_src)[::-1], *[[(i + first) % n_src for i in range(n_src)] for first in range(1, n_src)]]
    if n_src <= 4:
        orders += list(itertools.permutations(range(n_src)))[1:]
    for order in orders:
        position = np.argsort(list(order))
        key = np.where(where.src_rank >= 0, position[where.src_rank], n_src)
        rows = np.lexsort((key, where.group))  # the reference's rows in that order of ranks
        segment = where.group * 2**20 + key
        if same_up_to_segments(segment[rows], suspect.got, suspect.want[rows]):
            return True
    return False


def _tokens_counted_over_ranks(suspect):
    where = suspect.where
    first = np.cumsum([0, *map(len, suspect.round.topk_ids)])[:-1]
    shift = np.where(where.src_rank >= 0, first[where.src_rank], 0)
    local = suspect.got[: where.n_rows] - np.column_stack([shift, np.zeros_like(shift)])
    return same_up_to_segments(suspect.segment, local, suspect.want)


def _not_transposed(suspect):
    got, want = suspect.got, suspect.want
    rows, n_scales = want.shape[::-1] if want.ndim == 2 else (0, 0)
    return layout(suspect.cfg) is transposed and got.ndim == 2 and got.shape[1] == n_scales <= rows <= len(got)


def _not_tiled(s):
    return s.want.ndim > 2 and s.got.ndim == 2 and s.got.shape[1] == format_of(s.cfg).n_scales()


RANK_ORDER = "an expert's rows are in another order of src_ranks; ranks must ascend inside an expert"
MIXED = "an expert's rows are not grouped by src_rank; ranks must ascend inside an expert"
CAUSES = {
    "recv_count": COUNT_CAUSES
    + [
        ("the src_ranks are in descending order; they must ascend", lambda s: same(s.got, s.want[:, ::-1])),
        ("the array is transposed: the first axis is the local expert", lambda s: same(s.got, s.want.T)),
        ("a word that was not yet written (2**64 - 1) was used as a count", _not_arrived),
        ("these are the counts of the previous round", _from_before),
    ],
    "row_offsets": COUNT_CAUSES
    + [
        ("the padding was forgotten: each group's row count is rounded up to 4 in this format", _padded_to(1)),
        *[
            (f"each group's row count is rounded up to {rows}, which this format does not do", _padded_to(rows))
            for rows in (2, 4, 8, 16, 32, 64, 128)
        ],
        ("they are the row counts themselves; their running sum is needed", _counts_for_sums),
        ("off by one: every entry is one too large", lambda s: same(s.got, s.want.astype(np.int64) + 1)),
        ("off by one: every entry is one too small", lambda s: same(s.got, s.want.astype(np.int64) - 1)),
        ("inclusive sums: the leading 0 is missing", lambda s: same(s.got, s.want[1:]) or same(s.got[:-1], s.want[1:])),
        ("the shared expert's group is missing; it is group 0", _shared_group_missing),
        ("these are the offsets of the previous round", _from_before),
    ],
    "expert_ids": [
        (
            "they are global ids; the rank's first expert has the local id 0",
            lambda s: same(s.got, s.want + s.rank * s.cfg.n_local_experts),
        )
    ],
    "src_info": [
        (
            "the two columns are swapped: (token, k), not (k, token)",
            lambda s: same_up_to_segments(s.segment, s.got[:, ::-1], s.want),
        ),
        (RANK_ORDER, _other_rank_order),
        (MIXED, lambda s: same_up_to_segments(s.where.group, s.got, s.want)),
        ("tokens are counted over all ranks; the index is the one at the src_rank", _tokens_counted_over_ranks),
        ("these are the rows of the previous round", _from_before),
    ],
    "output_tokens": ROW_CAUSES,
    "output_scales": [
        ("the scales are not transposed: row-major [rows, hidden / 128]", _not_transposed),
        ("the scales are row-major, not in this format's layout", _not_tiled),
        *SCALE_CAUSES,
    ],
}
