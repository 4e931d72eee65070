"""The part of PTX's memory consistency model that the kernels use, axiomatically: which accesses of a run race.

Written from chapter 8 of the PTX manual (the sections are named below), one function for each of its relations, slowly.
A run is a list of operations in order of execution: each read sees the last write. A relation is a boolean matrix:
[i, j] says that it holds between operations i and j.

Points that the manual leaves open, or that are decided differently here so that the race detector agrees in every run:

* Sight. A write counts as observed only if it is strong: 8.9.2 would let a thread's own atomic publish its plain store.
* Bulk copies (8.9.1.1) come after what their thread did before, and before a wait that covers them. The manual has no
  axiom for `fence.proxy.async`. Here an ordinary write is ordered before a copy only if a proxy fence lies between them
  on the way; an ordinary read needs none, and neither do operations after the wait for a copy.
* Loads through the non-coherent path are outside the model (8.1): memory they read must not be written while their
  launch runs, so they race with every write that is not ordered before its beginning or behind its end.
"""

from dataclasses import dataclass

import numpy as np

SCOPES = ("cta", "gpu", "sys")


@dataclass(frozen=True)
class Thread:
    """The thread of an operation. Ranks are GPUs; launch: its number on the rank; launches follow one another."""

    rank: int
    block: int
    index: int
    launch: int = 0


@dataclass(frozen=True)
class Operation:
    """One operation of a thread.

    kind: "read", "write", "atomic" (reads, writes, and returns what it read), "reduction" (returns nothing), "fence",
    "proxy fence", "barrier", "copy read" and "copy write" (of a bulk copy), "commit", "wait", "wait read".
    order: "weak", "relaxed", "acquire", "release" or "acq_rel". scope: "cta", "gpu", "sys", or None of weak ones.
    address, nbytes: the bytes touched. group: of a barrier, which one; its participants have the same. value: that a
    plain strong store writes. non_coherent: of a read.
    """

    thread: Thread
    kind: str
    order: str = "weak"
    scope: str = None
    address: int = 0
    nbytes: int = 0
    group: int = None
    value: int = None
    non_coherent: bool = False

    @property
    def is_memory(self):
        return self.nbytes > 0

    @property
    def is_strong(self):
        return self.order != "weak"

    @property
    def is_read(self):
        return self.kind in ("read", "atomic", "copy read")

    @property
    def is_write(self):
        return self.kind in ("write", "atomic", "reduction", "copy write")

    @property
    def is_atomic(self):
        return self.kind in ("atomic", "reduction")

    @property
    def is_copy(self):
        return self.kind in ("copy read", "copy write")

    @property
    def releases(self):
        return self.order in ("release", "acq_rel")

    @property
    def acquires(self):
        return self.order in ("acquire", "acq_rel")


def includes(x, y):
    """8.5: does the scope of x include the thread of y?"""
    return (
        x.scope == "sys"
        or x.thread.rank == y.thread.rank
        and (x.scope == "gpu" or x.thread.block == y.thread.block and x.thread.launch == y.thread.launch)
    )


def overlap(x, y):
    """8.2.1: do they share bytes?"""
    return x.is_memory and y.is_memory and x.address < y.address + y.nbytes and y.address < x.address + x.nbytes


def overlap_completely(x, y):
    return x.is_memory and y.is_memory and (x.address, x.nbytes) == (y.address, y.nbytes)


def relation(ops, holds):
    """The matrix of holds(i, j)."""
    n = range(len(ops))
    return np.array([[bool(holds(i, j)) for j in n] for i in n], bool).reshape(len(ops), len(ops))


def then(first, second):
    """Composition: i first k and k second j, for some k."""
    return (first.astype(np.int32) @ second.astype(np.int32)) > 0


def closure(r):
    """The smallest transitive relation that holds r."""
    while True:
        more = r | then(r, r)
        if (more == r).all():
            return r
        r = more


def program_order(ops):
    """8.9.1: all operations of a thread, one after another; copies are not part of it."""
    return relation(
        ops, lambda i, j: i < j and ops[i].thread == ops[j].thread and not ops[i].is_copy and not ops[j].is_copy
    )


def morally_strong(ops):
    """8.7."""

    def holds(i, j):
        x, y = ops[i], ops[j]
        by_one_thread = x.thread == y.thread and not x.is_copy and not y.is_copy
        strong = x.is_strong and y.is_strong and includes(x, y) and includes(y, x)
        return (
            (by_one_thread or strong)
            and x.is_copy == y.is_copy
            and (not x.is_memory or not y.is_memory or overlap_completely(x, y))
        )

    return relation(ops, holds)


def reads_from(ops):
    """W is the last write before R to every byte that R reads; R is a read, or an atomic operation of any kind."""
    last = {}  # byte -> number of the last write
    r = relation(ops, lambda i, j: False)
    for j, op in enumerate(ops):
        span = range(op.address, op.address + op.nbytes)
        if op.is_read or op.is_atomic:
            writers = {last.get(byte) for byte in span}
            if len(writers) == 1 and None not in writers:
                r[writers.pop(), j] = True
        if op.is_write:
            last.update(dict.fromkeys(span, j))
    return r


def observation_order(ops):
    """8.9.2: from a write to a read, through atomic operations. Only strong writes (see above)."""
    strong = np.array([op.is_strong for op in ops], bool)
    step = morally_strong(ops) & reads_from(ops) & strong[:, None]
    through = step.copy()
    while True:
        atomic = np.array([op.is_atomic for op in ops], bool)
        more = through | then(through & atomic[None, :], step)
        if (more == through).all():
            break
        through = more
    return through & np.array([op.is_read for op in ops], bool)[None, :]


def release_patterns(ops, po):
    """8.8: (first operation, write) of each."""
    for i, x in enumerate(ops):
        if x.is_write and x.releases:
            yield i, i
        for j, w in enumerate(ops):
            if (
                po[i, j]
                and w.is_write
                and w.is_strong
                and (x.is_write and x.releases and overlap_completely(x, w) or x.kind == "fence")
            ):
                yield i, j


def acquire_patterns(ops, po):
    """8.8: (read, last operation) of each. A reduction is no read."""
    for j, y in enumerate(ops):
        if y.is_read and y.acquires:
            yield j, j
        for i, r in enumerate(ops):
            if (
                po[i, j]
                and r.is_read
                and r.is_strong
                and (y.is_read and y.acquires and overlap_completely(r, y) or y.kind == "fence")
            ):
                yield i, j


def synchronizes(ops, po):
    """8.9.4: barriers, release patterns with acquire patterns, launches of a stream, and waits for copies."""
    strong, seen = morally_strong(ops), observation_order(ops)
    r = relation(
        ops,
        lambda i, j: (
            i != j
            and (
                ops[i].kind == ops[j].kind == "barrier"
                and ops[i].group == ops[j].group
                or ops[i].thread.rank == ops[j].thread.rank
                and ops[i].thread.launch < ops[j].thread.launch
            )
        ),
    )
    for first, write in release_patterns(ops, po):
        for read, last in acquire_patterns(ops, po):
            if seen[write, read] and strong[first, last]:
                r[first, last] = True
    for i, copy in enumerate(ops):
        if copy.is_copy:
            for j, op in enumerate(ops):
                if op.thread == copy.thread and not op.is_copy and j < i:
                    r[j, i] = True  # 8.9.1.1: behind prior instructions of its thread
                if (
                    op.thread == copy.thread
                    and j > i
                    and (op.kind == "wait" or (op.kind == "wait read" and copy.kind == "copy read"))
                ):
                    committed = any(c.kind == "commit" and c.thread == op.thread for c in ops[i:j])
                    r[i, j] = r[i, j] or committed
    return r


def base_causality_order(ops):
    """8.9.5."""
    po = program_order(ops)
    return closure(po | synchronizes(ops, po))


def through_fence(ops, base):
    """Where base causality leads through a proxy fence, or (8.9.4) from a launch to the next one of its stream."""
    fence = np.array([op.kind == "proxy fence" for op in ops], bool)
    stream = relation(
        ops, lambda i, j: ops[i].thread.rank == ops[j].thread.rank and ops[i].thread.launch < ops[j].thread.launch
    )
    or_itself = base | np.eye(len(ops), dtype=bool)
    return then(base & fence[None, :], base) | then(then(or_itself, stream), or_itself)


def proxy_preserved(ops, base):
    """8.9.5, for bulk copies: an ordinary write reaches a copy through a proxy fence."""
    fenced = through_fence(ops, base)
    ordinary_write = np.array([op.is_write and not op.is_copy for op in ops], bool)
    copy = np.array([op.is_copy for op in ops], bool)
    return base & (fenced | ~(ordinary_write[:, None] & copy[None, :]))


def causality_order(ops):
    """8.9.5. A copy after a read is ordered after what the read saw only through a proxy fence."""
    base = base_causality_order(ops)
    preserved = proxy_preserved(ops, base)
    copy = np.array([op.is_copy for op in ops], bool)
    behind_sight = base & (through_fence(ops, base) | ~copy[None, :])
    return preserved | then(observation_order(ops), behind_sight)


def data_races(ops):
    """8.7.1: pairs (i, j), i before j in the run, that conflict and are neither ordered nor morally strong."""
    ordered, strong = causality_order(ops), morally_strong(ops)

    def race(i, j):
        x, y = ops[i], ops[j]
        if not overlap(x, y) or not (x.is_write or y.is_write):
            return False
        if x.non_coherent or y.non_coherent:
            return not (x.thread.rank == y.thread.rank and x.thread.launch < y.thread.launch)
        return not ordered[i, j] and not strong[i, j]

    return [(i, j) for j in range(len(ops)) for i in range(j) if race(i, j)]


def unordered_stores(ops):
    """Pairs of stores of different values, morally strong but not ordered, the second straight over the first.

    This is no data race, but the final value is undefined, so the race detector reports it.
    """
    ordered, strong = causality_order(ops), morally_strong(ops)
    out, last = [], {}
    for j, y in enumerate(ops):
        if not y.is_write:
            continue
        before = {last.get(byte) for byte in range(y.address, y.address + y.nbytes)}
        i = before.pop() if len(before) == 1 else None
        if (
            i is not None
            and y.kind == ops[i].kind == "write"
            and strong[i, j]
            and not ordered[i, j]
            and ops[i].value != y.value
            and ops[i].thread != y.thread
        ):
            out.append((i, j))
        last.update(dict.fromkeys(range(y.address, y.address + y.nbytes), j))
    return out
