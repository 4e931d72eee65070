"""Likely causes of wrong rows in a dispatch whose counts and src_info are right: rows in other places, old rows.

`number_causes` has the causes of wrong numbers within a row.
"""

import numpy as np

from epmoe.check.compare import array
from epmoe.check.difference import bits
from epmoe.check.number_causes import PAYLOAD_CAUSES
from epmoe.check.place_causes import BESIDE, ROWS_LOST, rows_beside, rows_lost
from epmoe.check.places import packed


def same_up_to_segments(segment, got, want):
    """True if the rows of each segment are the same, in any order."""
    if len(got) < len(segment):
        return False
    a, b = (np.column_stack([segment, x[: len(segment)].astype(np.int64)]) for x in (got, want))
    return bool((a[np.lexsort(a.T[::-1])] == b[np.lexsort(b.T[::-1])]).all())


def _stale_rows(suspect):
    """Every row that is not the reference's is the previous round's row in that place."""
    before, where = suspect.before, suspect.where
    if before is None:
        return False
    got = bits(suspect.got)[: where.n_rows]
    expected = {key: row.tobytes() for key, row in zip(_keys(where, suspect.reference), bits(suspect.want))}
    wrong = [
        i
        for i, key in enumerate(_keys(where, suspect.result))
        if where.src_rank[i] != -1 and got[i].tobytes() != expected.get(key)
    ]
    return all(i < len(before) and bits(before)[i].tobytes() == got[i].tobytes() for i in wrong)


def _keys(where, result):
    src_info = array(result, "src_info")[: where.n_rows]
    rows = np.where(where.src_rank >= 0, 0, where.row_in_group)
    return [tuple(key) for key in np.column_stack([where.group, where.src_rank, rows, src_info]).tolist()]


def _payloads_alike(suspect, segment):
    real = suspect.where.src_rank != -1
    a, b = (
        [(s, row.tobytes()) for s, row in zip(segment[real], bits(x)[: len(real)][real])]
        for x in (suspect.got, suspect.want)
    )
    return sorted(a) == sorted(b)


def _payload_in_segment(suspect):
    return _payloads_alike(suspect, suspect.segment)


def _payload_in_group(suspect):
    return not _payload_in_segment(suspect) and _payloads_alike(suspect, suspect.where.group)


def _payload_of_other_rank(suspect):
    """Each row holds the token with the same number of another src_rank. The distance between the ranks is constant."""
    where, inputs = suspect.where, suspect.round.input_tokens
    n, src_info = suspect.cfg.n_ranks, suspect.reference.src_info
    if suspect.cfg.token_format != "bf16" or suspect.cfg.skip_a2a:
        return False
    held = {
        (*key[:2], *key[3:]): row.tobytes()  # of (group, src_rank, token, k)
        for key, row in zip(_keys(where, suspect.result), bits(suspect.got)[: where.n_rows])
    }
    rows = [(int(where.group[i]), int(where.src_rank[i]), *map(int, src_info[i])) for i in where.routed()]
    for shift in range(1, n):
        sources = [inputs[(source + shift) % n] for _, source, _, _ in rows]
        # the others have no token
        known = [(key, x) for key, x in zip(rows, sources) if key[2] < len(x)]
        if known and all(held.get(key) == bits(x[key[2]]).tobytes() for key, x in known):
            return True
    return False


def _nibbles_swapped(suspect):
    if not packed(suspect.cfg):
        return False
    got = bits(suspect.got)[: suspect.where.n_rows]
    swapped = (got >> np.uint8(4)) | (got << np.uint8(4))
    return same_up_to_segments(suspect.segment, swapped, bits(suspect.want))


def _never_written(suspect):
    got = bits(suspect.got)[: suspect.where.n_rows]
    wrong = (got != bits(suspect.want)).any(axis=1)
    return len(np.unique(got[wrong])) == 1


ROW_CAUSES = [
    ("stale rows: they hold what the previous round left in their place", _stale_rows),
    (
        "payload and src_info of a segment's rows do not belong together: rows were moved without their src_info, or "
        "slots claimed in another order than the payloads'",
        _payload_in_segment,
    ),
    ("the payloads of an expert's rows are in another order of src_ranks than their src_info", _payload_in_group),
    ("each row holds the token with its number of another src_rank", _payload_of_other_rank),
    (BESIDE, rows_beside),
    ("the two fp4 codes of each byte are swapped: the even column is in the low nibble", _nibbles_swapped),
    ("all bytes of the wrong rows are alike: they were never written", _never_written),
    (ROWS_LOST, rows_lost),
    *PAYLOAD_CAUSES,
]
