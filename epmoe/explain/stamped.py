"""Makes a trace of a round on GPUs from stamps of the devices' clocks.

Clocks of different GPUs need not agree. A rank cannot have all peers' counts before each peer has announced its own. So
each round bounds the difference of two clocks from one side, and closely if the sender was the last. If the bounds of
all rounds show that two clocks differ, a rank's times are shifted to their middle, and the trace says by how much.
"""

import numpy as np

from epmoe.explain.trace import Trace
from epmoe.kernels.stamps import MARKS

# Arrows by a kernel's name: (marks at the tail, of which the first that a rank has is used; which block; marks at the
# head). Dispatch: from the announcement (small batches, which have none: when places are known and sending begins) to
# the arrival of all peers' counts. Combine: from sending the first rows to the end of reduction; rows in between arrive
# one by one.
TELLS, HEARS = ("announced", "claimed"), ("counted",)
ARROWS = {"dispatch": (TELLS, np.max, HEARS), "combine": (("sent",), np.min, ("reduced",))}


def of_stamps(rounds, about):
    """The trace of the last round. rounds: lists of epmoe.kernels.stamps.Stamps, of all ranks and kernels."""
    shifts, doubt = corrections(rounds)
    stamps = rounds[-1]
    first = min((int(s.times[s.times > 0].min()) + shifts[s.rank] for s in stamps if s.times.any()), default=0)
    trace = Trace(about | {"clock": "globaltimer of each rank's device", "shift_ns": shifts, "doubt_ns": doubt})
    for s in sorted(stamps, key=lambda s: (s.rank, s.kernel)):
        for block, times in enumerate(s.times):
            _block(trace, s, block, times, shifts[s.rank] - first)
    for name, (told, which, heard) in ARROWS.items():
        for source in ends(stamps, name, told, which):
            for target in ends(stamps, name, heard, np.max):
                if source[0] != target[0]:
                    trace.arrow(
                        f"{name}: {told[0]}",
                        *(
                            (rank, block, (at + shifts[rank] - first) / 1000 - 0.001)
                            for rank, block, at in (source, target)
                        ),
                    )
    return trace


def _block(trace, stamps, block, times, shift):
    reached = sorted((int(t), name) for name, t in zip(MARKS, times) if t)
    if len(reached) < 2:
        return
    us = [((t + shift) / 1000, name) for t, name in reached]
    trace.slice(stamps.rank, block, stamps.kernel, us[0][0], us[-1][0], "kernel")
    for (begin, _), (end, name) in zip(us, us[1:]):
        trace.slice(stamps.rank, block, f"until {name}", begin, end, "phase", mark=MARKS[name])


def ends(stamps, name, marks, choose):
    """[(rank, block, time)] of the first of these marks that each rank has; `choose` picks the time, and so the block,
    from the blocks' times."""
    found = {}
    for s in stamps:
        columns = [s.times[:, list(MARKS).index(mark)] for mark in marks]
        times = next((c for c in columns if c.any()), None)
        if s.kernel.startswith(name) and times is not None:
            wanted = choose(times[times > 0])
            found[s.rank] = s.rank, int(np.flatnonzero(times == wanted)[0]), int(wanted)
    return list(found.values())


def corrections(rounds):
    """({rank: ns to add to its times}, {rank: possible error in ns}), relative to the first rank's clock."""
    ranks = sorted({s.rank for stamps in rounds for s in stamps})
    low, high = {r: -np.inf for r in ranks}, {r: np.inf for r in ranks}
    for stamps in rounds:
        # a rank that has all announcements has this one too; small batches: one block, perhaps the first, sends it
        tell = {rank: at for rank, _, at in ends(stamps, "dispatch", TELLS, np.min)}
        hear = {rank: at for rank, _, at in ends(stamps, "dispatch", HEARS, np.min)}
        for r in ranks:
            if ranks[0] in tell and r in hear:
                low[r] = max(low[r], tell[ranks[0]] - hear[r])
            if r in tell and ranks[0] in hear:
                high[r] = min(high[r], hear[ranks[0]] - tell[r])
    shifts, doubt = {}, {}
    for r in ranks:
        known = np.isfinite(low[r]) and np.isfinite(high[r])
        agrees = r == ranks[0] or low[r] <= 0 <= high[r] or not known
        shifts[r] = 0 if agrees else int((low[r] + high[r]) / 2)
        doubt[r] = int(abs(high[r] - low[r]) / 2) if known and r != ranks[0] else 0
    return shifts, doubt
