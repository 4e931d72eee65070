"""The text of a DeadlockError: where each thread waits, and for which word."""

from .memory import MEMORY
from .race_report import site


def text(why, scheduler):
    """why, then a line for each place where threads wait, the most informative first (words that no thread writes)."""
    threads = {}  # (spins?, rank, block, where, what) -> threads
    for t in all_threads(scheduler):
        key = (t not in scheduler.spinners, t.rank, t.block.index, " < ".join(t.where()), waits_for(t, scheduler))
        threads.setdefault(key, []).append(t.tid)
    blocks = {}  # the same threads of several blocks -> blocks
    for key in sorted(threads):
        kind, rank, block, where, what = key
        blocks.setdefault((kind, rank, ranges("thread", threads[key]), where, what), []).append(block)
    lines = [why + ":"]
    for kind in (False, True):
        table = [place for place in blocks if place[0] == kind]
        for place in table[:24]:
            _, rank, of, where, what = place
            lines.append("  rank %d %s %s at %s: %s" % (rank, ranges("block", blocks[place]), of, where, what))
        if len(table) > 24:
            lines.append("  ... and %d more places" % (len(table) - 24))
    for launch in dict.fromkeys(t.block.launch for t in all_threads(scheduler)):
        if launch.to_start:
            lines.append(
                "  rank %d: %s of %s not resident: no room until others end"
                % (launch.rank, ranges("block", launch.to_start), launch)
            )
    over = scheduler.run.over - {t.rank for t in all_threads(scheduler)}
    if over:
        lines.append("  %s: every launch has ended" % ranges("rank", over))
    return "\n".join(lines)


def all_threads(scheduler):
    """Every thread of the run that has not ended."""
    return [t for b in scheduler.run.blocks for t in b.threads if t.block is b]


def waits_for(t, scheduler):
    """What a stuck thread waits for, as text."""
    if t in scheduler.spinners:
        words = {look & ~1: value for look, value in t.polled.items()}
        return "spins on " + ", ".join(looked_at(a, v, t.block, scheduler) for a, v in words.items())
    watched = scheduler.watch.notes if scheduler.watch else {}
    looks = watched[t].looked_at() if t in watched else ()
    loop = "".join(
        "; looks again and again at %s, at %s" % (looked_at(address, value, t.block, scheduler), site(code, place))
        for address, value, code, place in looks
    )
    if t in t.block.arrived:
        return at_barrier("syncthreads", t.block.live - len(t.block.arrived), t.block.live, "threads") + loop
    if t in t.warp.waiting:
        return at_barrier(t.warp.kind, t.warp.live - t.warp.count, t.warp.live, "lanes of its warp") + loop
    return "runs" + loop


def looked_at(address, value, block, scheduler):
    """A word, what it holds and who wrote it last, or an mbarrier and what its phase lacks."""
    place, mbarrier = place_of(address, block), block.mbarriers.get(address)
    if mbarrier is None:
        return "%s, which holds %s%s" % (place, number(value), last_write(address, scheduler))
    phase = mbarrier.phase
    return "the mbarrier %s: its phase %d (parity %d) lacks %s" % (place, phase, phase & 1, mbarrier.lacks())


def last_write(address, scheduler):
    """ " (last written at send.py:35 by rank 1)", if the race detector runs and no other process writes.

    Empty for words of shared_add_i32, because a poll is such a write.
    """
    detector = getattr(scheduler.detector, "inner", scheduler.detector)
    if detector is None or scheduler.real_time:
        return ""
    writes = detector.last_writes(address)
    if not writes:
        return " (not written by these launches)"
    actor, _, _, _, _, _, word, code, place, *_ = writes[-1]
    return "" if word == "shared_add_i32" else " (last written at %s by rank %d)" % (site(code, place), actor.rank)


def at_barrier(word, n, live, noun):
    """ "waits at syncthreads, 1 of 64 threads has not come"."""
    return "waits at %s, %d of %d %s %s not come" % (word, n, live, noun, "has" if n == 1 else "have")


def number(value):
    """A word's value. The largest 64-bit number, which means "not arrived", is shown as 2**64 - 1."""
    return "2**64 - 1" if value == 2**64 - 1 else "%d" % value


def place_of(address, block):
    """The name of a word in memory, or in the block's shared memory."""
    span = next((s for _, s in block.spans if s.low <= address < s.high), None)
    return span.describe(address) if span else MEMORY.describe(address)


def ranges(noun, numbers):
    """ "threads 0-31,40"."""
    numbers = sorted(numbers)
    parts, start = [], None
    for i, n in enumerate(numbers):
        if start is None:
            start = n
        if i + 1 == len(numbers) or numbers[i + 1] != n + 1:
            parts.append("%d-%d" % (start, n) if n > start else str(n))
            start = None
    return noun + ("s " if len(numbers) > 1 else " ") + ",".join(parts)
