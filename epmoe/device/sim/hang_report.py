"""The text of a DeadlockError: where each thread waits, and for what."""
from collections import Counter

from .memory import MEMORY


def text(why, scheduler):
    """why, then one line for each place where threads wait, the most telling ones (words that nobody writes) first."""
    spinning, other = Counter(), Counter()
    threads = {}
    for t in all_threads(scheduler):
        what = waits_for(t, scheduler)
        key = (t.rank, t.block.index, " < ".join(t.where()), what)
        (spinning if t in scheduler.spinners else other)[key] += 1
        threads.setdefault(key, []).append(t.tid)
    lines = ["%s, and nothing can change that:" % why if why == "every thread waits" else why + ":"]
    for table in (spinning, other):
        for key in sorted(table)[:24]:
            rank, block, where, what = key
            lines.append("  rank %d block %d %s at %s: %s" % (rank, block, ranges(threads[key]), where, what))
        if len(table) > 24:
            lines.append("  ... and %d more places" % (len(table) - 24))
    for launch in dict.fromkeys(t.block.launch for t in all_threads(scheduler)):
        if launch.to_start:
            lines.append("  rank %d: blocks %s of %s are not resident, they start when others end"
                         % (launch.rank, ranges(launch.to_start).partition(" ")[2], launch))
    return "\n".join(lines)


def all_threads(scheduler):
    """Every thread of the run that has not ended."""
    return [t for b in scheduler.run.blocks for t in b.threads if t.block is b]


def waits_for(t, scheduler):
    """What a thread that cannot go on waits for, in words."""
    if t in scheduler.spinners:
        return "spins on " + ", ".join("%s, which holds %d" % (MEMORY.describe(a), v) for a, v in t.polled.items())
    if t in t.block.arrived:
        return "waits at syncthreads for %d of %d threads" % (t.block.live - len(t.block.arrived), t.block.live)
    if t in t.warp.waiting:
        return "waits at %s for %d of %d lanes of its warp" % (t.warp.kind, t.warp.live - t.warp.count, t.warp.live)
    return "runs"


def ranges(numbers):
    """"threads 0-31,40"."""
    numbers = sorted(numbers)
    parts, start = [], None
    for i, n in enumerate(numbers):
        if start is None:
            start = n
        if i + 1 == len(numbers) or numbers[i + 1] != n + 1:
            parts.append("%d-%d" % (start, n) if n > start else str(n))
            start = None
    return ("thread " if len(numbers) == 1 else "threads ") + ",".join(parts)
