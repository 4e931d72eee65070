"""Windows: memory at every rank into which the others may push small numbers of rows before it has announced anything
in a combine.

A rank has two windows for each src_rank, used in turn. Call e writes those of its parity without asking. A rank that
has ended call e - 1 has seen that every rank had begun it, and no rank begins it before its launch of e - 2 has ended,
and with it all reading of e - 2's rows. Flags in the control memory show what has arrived; epochs only grow, so flags
are never lowered. For small batches this removes the round trip of the notes before the rows.
"""

from typing import NamedTuple

from epmoe.device import (any_lane, device_fn, i32, lane_id, st_relaxed_sys_u32, syncwarp, u32, u64)

from ..params import in_context
from . import control, row_flags, waits
from .status import FOR_WINDOW

X, PROBS = range(2)     # arrays of a window


class Windows(NamedTuple):
    """Device functions made for one kernel.

    all_few(notes): whether no rank gets more rows than a window holds back from another one. at: for each array,
    (params, epoch, rank, source) -> address of it in the window that a rank has for a source. raise_flag(params, epoch,
    rank, source, row, part): behind a fence of the same thread. await_flag(params, epoch, my_rank, source, row, part):
    each lane waits for the flag of its own source and row, those with row < 0 for none; whether all came.
    """

    all_few: callable
    at: tuple
    raise_flag: callable
    await_flag: callable


def _row_sizes(shape):
    """Bytes of a row of each array."""
    return shape.row_bytes, 4 * shape.n_meta * shape.has_probs


def bytes_for(shape):
    """Bytes of all windows of one parity for the calls of a kernel."""
    return shape.n_ranks * control.WINDOW_ROWS * sum(_row_sizes(shape))


def make(shape, block, phase, wait=waits.wait_for_flag):
    """The Windows of one kernel. wait: for a flag."""
    ranks, sizes, rows = shape.n_ranks, _row_sizes(shape), control.WINDOW_ROWS
    n_words, flags_at = control.experts_at(ranks), control.window_flags_at(ranks)
    pool_of, control_of, p_words = in_context(block, "pool_ptrs"), in_context(block, "control_ptrs"), block.index("words")
    p_windows, p_bytes, p_timeout = (block.index(n) for n in ("windows_at", "window_bytes", "timeout_ns"))

    @device_fn
    def all_few(notes):
        most, i = i32(0), i32(lane_id())
        while i < ranks * ranks:
            source, target = i32(u32(i) // u32(ranks)), i32(u32(i) % u32(ranks))
            most = i32(max(most, i32(notes[source * n_words + control.COUNTS + target])))
            i = i32(i + 32)
        return row_flags.largest(most) <= rows

    def array(index):
        begin, a_source = ranks * rows * sum(sizes[:index]), rows * sizes[index]

        @device_fn
        def at(params, epoch, rank, source):
            pool = pool_of(params, rank)
            base = u64(pool + params[p_windows])
            half = u64((u64(epoch) & u64(1)) * params[p_bytes])
            return u64(base + half + u64(begin) + u64(source) * u64(a_source))

        return at

    @device_fn
    def flag_at(params, epoch, rank, source, row, part):
        index = u64(((u64(epoch) & u64(1)) * u64(ranks) + u64(source)) * u64(rows) + u64(row))
        base = u64(control_of(params, rank) + u64(flags_at))
        return u64(base + u64(row_flags.FLAG_BYTES) * (index * u64(row_flags.PARTS) + u64(part)))

    @device_fn
    def raise_flag(params, epoch, rank, source, row, part):
        st_relaxed_sys_u32(flag_at(params, epoch, rank, source, row, part), u32(epoch))

    @device_fn
    def await_flag(params, epoch, my_rank, source, row, part):
        ok = True
        if row >= 0:
            ok = wait(flag_at(params, epoch, my_rank, source, row, part), u32(epoch),
                      params[p_words] + u64(control.STATUS),
                      params[p_timeout], phase, FOR_WINDOW, source)
        failed = any_lane(not ok)
        syncwarp()                              # what one lane acquired, all lanes read
        return failed == 0

    return Windows(all_few, tuple(array(i) for i in range(len(sizes))), raise_flag, await_flag)
