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
    """One rank's wrong result, the reference's, and the round (with its inputs and the previous round)."""

    round: object
    rank: int
    got: object
    want: object

    @property
    def cfg(self):
        """The EPConfig."""
        return self.round.cfg

    @property
    def where(self) -> Places:
        """The places of the reference's rows."""
        return places_of(self.cfg, self.rank, self.want)

    def both(self, name):
        """A field of the result and of the reference's, as arrays."""
        return array(self.got, name), array(self.want, name)

    def before(self, name):
        """The same array in this rank's result of the previous round, or None."""
        previous = self.round.previous
        return None if previous is None else array(previous.dispatched[self.rank], name)


def with_causes(round_, differences):
    """The differences of a round's dispatch, each with its likely cause if one is known."""

    def candidates(difference):
        rank = difference.rank
        suspect = Suspect(round_, rank, round_.dispatched[rank], round_.dispatched_want[rank])
        got, want = suspect.both(difference.what)
        if got is None or not _comparable(suspect.cfg, difference.what, got, want):
            return []
        of_counts = difference.what == "row_offsets" and counts_are_wrong(suspect)
        causes = COUNT_CAUSES if of_counts else CAUSES.get(difference.what, ())
        with np.errstate(all="ignore"):
            return [cause for cause, test in causes if test(suspect)]

    return explained(differences, candidates, (MIXED, NAN_LOST, FLUSHED, ROWS_LOST))


def _comparable(cfg, name, got, want):
    """Whether an array has the form that its causes need; a wrong form is all there is to say."""
    if name in ("src_info", "output_tokens"):
        return row_shape_fits(cfg, name, got, want) and same_type(got, want)
    if name == "output_scales":  # some of its causes are about the form
        return got.ndim > 0
    return got.dtype.kind in "iu" and got.ndim == want.ndim


def _padding_forgotten(suspect):
    got, want = suspect.both("row_offsets")
    pads = format_of(suspect.cfg).pad_rows > 1
    return pads and same(got, offsets_of(suspect, suspect.want.recv_count, pad=1))


def _padded_to(rows):
    def test(suspect):
        got, want = suspect.both("row_offsets")
        return rows != format_of(suspect.cfg).pad_rows and same(got, offsets_of(suspect, suspect.want.recv_count, rows))

    return test


def _counts_for_sums(suspect):
    got, want = suspect.both("row_offsets")
    counts = np.diff(want.astype(np.int64))
    return same(got, np.concatenate([[0], counts])) or same(got, counts)


def _shifted(by):
    def test(suspect):
        got, want = suspect.both("row_offsets")
        return same(got, want.astype(np.int64) + by)

    return test


def _leading_zero_missing(suspect):
    got, want = suspect.both("row_offsets")
    return same(got, want[1:]) or same(got[:-1], want[1:])


def _shared_group_missing(suspect):
    got, want = suspect.both("row_offsets")
    return suspect.cfg.fused_shared_expert and same(got, want[1:].astype(np.int64) - int(want[1]))


def _count_transposed(suspect):
    got, want = suspect.both("recv_count")
    return same(got, want.T)


def _not_arrived(suspect):
    got = array(suspect.got, "recv_count")
    return got.dtype.itemsize == 8 and bool((got.astype(np.int64) == -1).any())


def _from_before(name):
    def test(suspect):
        before = suspect.before(name)
        return before is not None and same(array(suspect.got, name), before)

    return test


def _global_ids(suspect):
    got, want = suspect.both("expert_ids")
    return same(got, want + suspect.rank * suspect.cfg.n_local_experts)


def _columns_swapped(suspect):
    got, want = suspect.both("src_info")
    return same_up_to_segments(suspect.where.group * 2**20 + suspect.where.src_rank, got[:, ::-1], want)


def _other_rank_order(suspect):
    """Each expert's rows are the reference's, but with its src_ranks in another order, the same for all experts."""
    where, n_src = suspect.where, array(suspect.want, "recv_count").shape[1]
    orders = [range(n_src)[::-1], *[[(i + first) % n_src for i in range(n_src)] for first in range(1, n_src)]]
    if n_src <= 4:
        orders += list(itertools.permutations(range(n_src)))[1:]
    got, want = suspect.both("src_info")
    for order in orders:
        position = np.argsort(list(order))
        key = np.where(where.src_rank >= 0, position[where.src_rank], n_src)
        rows = np.lexsort((key, where.group))  # the reference's rows in that order of ranks
        segment = where.group * 2**20 + key
        if same_up_to_segments(segment[rows], got, want[rows]):
            return True
    return False


def _ranks_mixed(suspect):
    """Each expert has its rows, in any order."""
    got, want = suspect.both("src_info")
    return same_up_to_segments(suspect.where.group, got, want)


def _tokens_counted_over_ranks(suspect):
    got, want = suspect.both("src_info")
    where = suspect.where
    first = np.cumsum([0, *suspect.round.case.n_tokens])[:-1]
    shift = np.where(where.src_rank >= 0, first[where.src_rank], 0)
    local = got[: where.n_rows] - np.column_stack([shift, np.zeros_like(shift)])
    return same_up_to_segments(where.group * 2**20 + where.src_rank, local, want)


def _not_transposed(suspect):
    got, want = suspect.both("output_scales")
    rows, n_scales = want.shape[::-1] if want.ndim == 2 else (0, 0)
    return layout(suspect.cfg) is transposed and got.ndim == 2 and got.shape[1] == n_scales <= rows <= len(got)


def _not_tiled(suspect):
    got, want = suspect.both("output_scales")
    return want.ndim > 2 and got.ndim == 2 and got.shape[1] == format_of(suspect.cfg).n_scales()


RANK_ORDER = "an expert's rows are in another order of src_ranks; ranks must ascend inside an expert"
MIXED = "an expert's rows are not grouped by src_rank; ranks must ascend inside an expert"
CAUSES = {
    "recv_count": COUNT_CAUSES
    + [
        ("the array is transposed: the first axis is the local expert", _count_transposed),
        ("a word that was not yet written (2**64 - 1) was used as a count", _not_arrived),
        ("these are the counts of the previous round", _from_before("recv_count")),
    ],
    "row_offsets": COUNT_CAUSES
    + [
        ("the padding was forgotten: each group's row count is rounded up to 4 in this format", _padding_forgotten),
        *[
            (f"each group's row count is rounded up to {rows}, which this format does not do", _padded_to(rows))
            for rows in (2, 4, 8, 16, 32, 64, 128)
        ],
        ("they are the row counts themselves; their running sum is needed", _counts_for_sums),
        ("off by one: every entry is one too large", _shifted(1)),
        ("off by one: every entry is one too small", _shifted(-1)),
        ("inclusive sums: the leading 0 is missing", _leading_zero_missing),
        ("the shared expert's group is missing; it is group 0", _shared_group_missing),
        ("these are the offsets of the previous round", _from_before("row_offsets")),
    ],
    "expert_ids": [("they are global ids; the rank's first expert has the local id 0", _global_ids)],
    "src_info": [
        ("the two columns are swapped: (token, k), not (k, token)", _columns_swapped),
        (RANK_ORDER, _other_rank_order),
        (MIXED, _ranks_mixed),
        ("tokens are counted over all ranks; the index is the one at the src_rank", _tokens_counted_over_ranks),
        ("these are the rows of the previous round", _from_before("src_info")),
    ],
    "output_tokens": ROW_CAUSES,
    "output_scales": [
        ("the scales are not transposed: row-major [rows, hidden / 128]", _not_transposed),
        ("the scales are row-major, not in this format's layout", _not_tiled),
        *SCALE_CAUSES,
    ],
}
