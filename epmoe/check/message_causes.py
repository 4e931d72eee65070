"""Likely causes of wrong messages in dispatch's recv_buf and of wrong rows in combine's.

The messages of a segment may have any order, so wanted messages are searched for: whole or in part, in their segment,
elsewhere in the buffer, and on other ranks. Tests get an epmoe.check.words.Suspect.
"""

import numpy as np

from epmoe_ref import format_of


class _Segment:
    """One segment of a dispatch recv_buf: the wanted messages, its slots' content, and their previous content."""

    def __init__(self, suspect, local_expert, src_rank):
        self.at, self.suspect = (local_expert, src_rank), suspect
        self.count = int(suspect.state.messages_here[self.at])
        self.want = suspect.fixed.values[self.at][: self.count]
        self.free = suspect.fixed.free[self.at][0] if self.count else None  # padding bytes
        self.got = suspect.raw[self.at][: self.count]
        before = suspect.before.get(suspect.name)
        self.before = None if before is None else before[self.at][: self.count]

    def equal(self, one, other, part=slice(None)):
        """bool [len(one), len(other)]: which messages are equal in a part, ignoring padding."""
        kept = np.flatnonzero(~self.free[part])
        return (one[:, part][:, kept][:, None] == other[:, part][:, kept][None]).all(axis=-1)

    @property
    def missing(self):
        """Indices of wanted messages that no slot of the segment holds."""
        return np.flatnonzero(~self.equal(self.want, self.got).any(axis=1))

    @property
    def stray(self):
        """Slots that hold no wanted message."""
        return np.flatnonzero(~self.equal(self.want, self.got).any(axis=0))

    def stale(self, slots, part=slice(None)):
        """bool: which slots still hold their previous bytes, in a part."""
        if self.before is None:
            return np.zeros(len(slots), bool)
        kept = np.flatnonzero(~self.free[part])
        return (self.got[slots][:, part][:, kept] == self.before[slots][:, part][:, kept]).all(axis=1)


def _segments(suspect):
    shape = suspect.state.messages_here.shape
    every = [_Segment(suspect, *at) for at in np.ndindex(shape) if suspect.state.messages_here[at]]
    return [segment for segment in every if len(segment.missing) or len(segment.stray)]


def _parts(suspect):
    fmt = format_of(suspect.cfg)
    src_info, topk_info = fmt.src_info_offset(), fmt.topk_info_offset()
    return slice(0, src_info), slice(src_info, topk_info), slice(topk_info, fmt.msg_size())


def _all(test):
    """A test of a suspect that holds if test(segment) holds for every wrong segment."""

    def of_suspect(suspect):
        wrong = _segments(suspect)
        return bool(wrong) and all(test(segment) for segment in wrong)

    return of_suspect


def _only(*right):
    """All messages of a segment are right in the parts with these numbers, and some are wrong in each other part."""

    def test(segment):
        parts = _parts(segment.suspect)
        equal = np.logical_and.reduce([segment.equal(segment.want, segment.got, parts[i]) for i in right])
        wrong = [i for i in range(3) if i not in right]
        others = [segment.equal(segment.want, segment.got, parts[i]) & equal for i in wrong]
        matched = equal.any(axis=1).all() and equal.any(axis=0).all()
        return bool(matched) and not any(other.any(axis=1).all() for other in others)

    return test


def _holds(part_number, dtype, change):
    """It is the only wrong part, and it holds change(suspect, wanted words), which differs from the wanted words."""
    right = [i for i in range(3) if i != part_number]

    def test(suspect):
        if not _all(_only(*right))(suspect):
            return False
        part = _parts(suspect)[part_number]
        for segment in _segments(suspect):
            rows, slots = np.nonzero(
                np.logical_and.reduce([segment.equal(segment.want, segment.got, _parts(suspect)[i]) for i in right])
            )
            n = 4 if part_number == 1 else 2 * suspect.cfg.top_k
            want, got = (np.ascontiguousarray(m[:, part][:, :n]).view(dtype) for m in (segment.want, segment.got))
            if not (change(suspect, segment, want[rows]) == got[slots]).all():
                return False
        return True

    return test


def _slot_of(suspect, segment, want):
    ids = np.ascontiguousarray(segment.want[:, _parts(suspect)[2]][:, : 2 * suspect.cfg.top_k]).view("<u2")
    expert = suspect.state.rank * suspect.cfg.n_local_experts + segment.at[0]
    return np.argmax(ids == expert, axis=1)[: len(want), None]


def _stale(segment):
    return len(segment.stray) and segment.stale(segment.stray).all()


def _claimed_twice(segment):
    last = np.arange(segment.count - len(segment.stray), segment.count)
    return _stale(segment) and np.array_equal(segment.stray, last) and len(segment.stray) < segment.count


def _never_written(segment):
    return _stale(segment) and not _claimed_twice(segment)


def _payload_late(segment):
    payload = _parts(segment.suspect)[0]
    return _only(1, 2)(segment) and segment.stale(segment.stray, payload).all()


def _twice(segment):
    """Slots hold copies of a message that another slot of the segment also holds."""
    equal = segment.equal(segment.want, segment.got)
    return len(segment.missing) and not len(segment.stray) and bool((equal.sum(axis=1) > 1).any())


def _payloads_mixed(segment):
    payload = _parts(segment.suspect)[0]
    other = segment.equal(segment.want, segment.got, payload)
    return _only(1, 2)(segment) and bool(other.any(axis=0)[segment.stray].all())


def _found(where):
    """Every missing message of every wrong segment is at a place for which where(segment, rank, place) holds."""

    def test(suspect):
        wrong = _segments(suspect)
        return (
            bool(wrong)
            and all(
                any(where(segment, rank, place) for rank, place in _places(segment, message))
                for segment in wrong
                for message in segment.missing
            )
            and any(len(segment.missing) for segment in wrong)
        )

    return test


def _places(segment, message):
    """(rank, (local_expert, src_rank, slot)) of every slot that holds a message of the segment and should not.

    A token's message is the same for all of its experts, so other segments may hold it rightly.
    """
    kept = np.flatnonzero(~segment.free)
    wanted = segment.want[message][kept]
    for rank, regions in segment.suspect.held.items():
        state, held = segment.suspect.states[rank], regions.get(segment.suspect.name)
        if held is not None:
            slots = np.arange(held.shape[2]) < state.messages_here[..., None]
            rightly = ((state.dispatch_recv_buf[..., kept] == wanted).all(axis=-1) & slots).any(axis=-1)
            there = (held[..., kept] == wanted).all(axis=-1) & ~(rightly[..., None] & slots)
            yield from ((rank, tuple(place)) for place in np.argwhere(there).tolist())


def _own(test):
    return lambda segment, rank, place: rank == segment.suspect.state.rank and test(segment, place)


WRONG_TOKEN = "src_info is wrong: int32, the token's index at the src_rank"
WRONG_IDS = "topk_info is wrong: uint16, the token's global expert ids in the order of k, -1 as 65535"
WRONG_PAYLOAD = "the payload is wrong, the trailer is right"
OTHER_RANK = "misplaced: messages lie on another rank than their expert's owner"
GENERAL_OF_MESSAGES = (WRONG_TOKEN, WRONG_IDS, WRONG_PAYLOAD, OTHER_RANK)
MESSAGE_CAUSES = [
    ("src_info holds k; it is the token's index at the src_rank", _holds(1, "<i4", _slot_of)),
    ("src_info is counted from 1", _holds(1, "<i4", lambda suspect, segment, want: want + 1)),
    (WRONG_TOKEN, _all(_only(0, 2))),
    (
        "topk_info holds local expert ids; they are global",
        _holds(
            2, "<u2", lambda suspect, segment, want: np.where(want == 65535, want, want % suspect.cfg.n_local_experts)
        ),
    ),
    (WRONG_IDS, _all(_only(0, 1))),
    ("src_info and topk_info are both wrong: the trailer is at another place, or is not written", _all(_only(0))),
    ("payload and trailer do not belong together", _all(_payloads_mixed)),
    ("the trailer is there and the payload is not: the signal went out before the payload", _all(_payload_late)),
    (WRONG_PAYLOAD, _all(_only(1, 2))),
    (
        "slots were claimed twice, so that messages overwrote each other and the last slots stay empty: a claim is one "
        "atomic fetch-add on reserved",
        _all(_claimed_twice),
    ),
    ("a slot that counts was never written", _all(_never_written)),
    ("a message is there twice, and another is missing", _all(_twice)),
    (
        "misplaced: messages lie in slots past the count",
        _found(_own(lambda segment, place: place[:2] == segment.at and place[2] >= segment.count)),
    ),
    (
        "misplaced: messages lie in the segment of another src_rank",
        _found(_own(lambda segment, place: place[0] == segment.at[0] and place[1] != segment.at[1])),
    ),
    (
        "misplaced: messages lie in the segment of another local expert",
        _found(_own(lambda segment, place: place[0] != segment.at[0])),
    ),
    (OTHER_RANK, _found(lambda segment, rank, place: rank != segment.suspect.state.rank)),
]


def _wrong_rows(suspect):
    return np.argwhere((~suspect.fixed.free & (suspect.got != suspect.fixed.values)).any(axis=-1))


def _rows_stale(suspect):
    before = suspect.before.get(suspect.name)
    return before is not None and all((suspect.got[t, k] == before[t, k]).all() for t, k in _wrong_rows(suspect))


def _rows_at(where):
    """Every wrong row's wanted bytes are at a (rank, token, k) for which where(suspect, (t, k), place) holds."""

    def test(suspect):
        for t, k in _wrong_rows(suspect).tolist():
            wanted = suspect.fixed.values[t, k]
            places = [
                (rank, *place)
                for rank, regions in suspect.held.items()
                if suspect.name in regions
                for place in np.argwhere((regions[suspect.name] == wanted).all(axis=-1)).tolist()
            ]
            if not any(where(suspect, (t, k), place) for place in places):
                return False
        return True

    return test


ROW_CAUSES = [
    ("rows are missing: the previous bytes are still there", _rows_stale),
    (
        "misplaced: rows lie at another k of their token",
        _rows_at(lambda suspect, at, place: place[0] == suspect.state.rank and place[1] == at[0]),
    ),
    (
        "misplaced: rows lie at another token",
        _rows_at(lambda suspect, at, place: place[0] == suspect.state.rank and place[1] != at[0]),
    ),
    (
        "misplaced: rows lie on another rank than their token's",
        _rows_at(lambda suspect, at, place: place[0] != suspect.state.rank),
    ),
]
