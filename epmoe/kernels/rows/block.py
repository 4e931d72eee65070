"""The parameter block of the rows kernels: one table of fields for all of them; each kernel fills in the fields that it
reads.
"""

from functools import cache

from ..params import ParameterBlock
from .shape import MAX_PLACES

FIRST = "places"        # from here on fields differ from call to call


@cache
def parameter_block(n_ranks: int) -> ParameterBlock:
    """The fields, in uint64 words.

    control_ptrs, pool_ptrs: every rank's control and pool memory. notes_at, note_bytes: of the control memory. words:
    this rank's own control words. trace: where stamps go. columns: scratch of the layout, [blocks, columns]. places:
    offsets in the pool of the arrays that peers write in this call. capacity: rows that they hold. windows_at: offset
    in the pool of the windows, window_bytes of each parity. bits_at, bits_bytes: of the bits by expert;
    lamport_at, lamport_bytes: of the windows of Lamport rows.
    x, ids, probs, scales, out...: arrays of the caller and of results; row_of [T, R], counts [R, R], slot_of [T, E],
    expert_row [N, L] and the rest: arrays of a handle.
    """
    return ParameterBlock(
        ("notes_at", 1), ("note_bytes", 1), ("words", 1), ("timeout_ns", 1), ("trace", 1), ("columns", 1),
        ("windows_at", 1), ("window_bytes", 1), ("bits_at", 1), ("bits_bytes", 1),
        ("lamport_at", 1), ("lamport_bytes", 1),
        (FIRST, MAX_PLACES), ("capacity", 1),
        ("x", 1), ("ids", 1), ("probs", 1), ("scales", 1), ("encoded", 1), ("row_of", 1), ("counts", 1), ("info", 1),
        ("tokens_per_expert", 1), ("slot_of", 1), ("expert_base", 1), ("expert_rows", 1), ("expert_row", 1),
        ("overflow", 1), ("n_rows", 1), ("pad", 1), ("out", 1), ("out_probs", 1), ("out_scales", 1),
        ("sources", MAX_PLACES), ("targets", MAX_PLACES), ("word_counts", MAX_PLACES),
        context=(("control_ptrs", n_ranks), ("pool_ptrs", n_ranks)))
