"""Puzzles 15 and 16: whole kernels, held against `epmoe check`, broken word by word, and run on a GPU.

Losses: every way to lose or weaken a synchronisation in the student's lines. The judge must notice each, or it is
superfluous; and the student's own TESTS, which compare results alone, must notice the lost resets and waits that good
tests notice.
"""

import ast
import re
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill

import ml_dtypes
import numpy as np

from epmoe.check import check
from epmoe.lessons.answers import Wrong
from epmoe.lessons.telling import WIDTH
from epmoe.mutants.plain_atomics import PLAIN_ATOMICS
from epmoe.mutants.token_mutations import STRONG, mutants_of
from epmoe.puzzles.holes import own_lines
from epmoe.puzzles.judging import attempt, maker
from epmoe.puzzles.world import NOT_YET, Schedule, many

BF16 = np.dtype(ml_dtypes.bfloat16)
TRIED = (*(Schedule(seed) for seed in (None, 0, 1, 2, 3)), Schedule(4, stale=True))
TESTED = tuple(Schedule(seed, races=False) for seed in (None, 0))
SHOWN_BY_RESULTS = ("reset", "wait")  # kinds of Loss; of these the tests see more schedules
MORE_TESTED = tuple(Schedule(seed, races=False) for seed in range(1, 5))
KEPT = re.compile(r"#\s*kept:\s*\S")
CASES = (
    "uneven ranks",
    "slots without an expert",
    "a rank without tokens",
    "a hot expert",
    "hidden not a power of two",
)
MOST_TOKENS, MOST_ROUNDS, MOST_TESTS = 8, 4, 6
SHOWN = 6
GOOD_TESTS = (((3, 2), 2), ((0, 4), 3), ((5, 5), 2))
NOT_ACQ_REL = r"_(relaxed|acquire|release)_\w+\(done"  # an atomic that counts a block in `done`


def routing(rank, n, top_k, n_experts):
    """int32 [n, top_k]: distinct experts, and some empty slots."""
    t, k = np.indices((n, top_k))
    ids = (3 * t + rank + k * max(1, n_experts // top_k)) % n_experts
    return np.where((t + 2 * k + rank) % 7 == 6, -1, ids).astype(np.int32)


def values(rank, n, hidden):
    """bf16 [n, hidden]: numbers that tell their rank, token and column."""
    t, c = np.indices((n, hidden))
    return (64 * (rank + 1) + 8 * t + c % 8).astype(BF16)


def arrivals(ids, rank, local):
    """([(src_rank, token, k)] of a rank's rows, in their order; where each segment begins, and the end of the last)."""
    came, begins = [], [0]
    for expert in range(rank * local, (rank + 1) * local):
        for src_rank, of_rank in enumerate(ids):
            came += [(src_rank, t, k) for t, k in np.argwhere(of_rank == expert)]
            begins.append(len(came))
    return came, begins


def described(tokens, n_experts, rounds, grid, threads):
    """A world in words."""
    counts = " and ".join(map(str, tokens))
    return (
        f"ranks with {counts} tokens, {n_experts} experts, {many(rounds, 'round')}, {grid} blocks of {threads} threads"
    )


def only_these_missing(f, counts):
    """Whether a hang lacks just signals of counts of 0. counts: of each rank's words, shaped like a round of them.

    Looked at are the ranks that are stuck in the earliest round: the others may wait for these.
    """
    rounds = [
        max([0, *np.flatnonzero((m["recv_count"] != NOT_YET).reshape(f.world.rounds, -1).any(axis=1))]) for m in f.raw
    ]
    missing = [
        np.asarray(c)[m["recv_count"][n] == NOT_YET] for c, m, n in zip(counts, f.raw, rounds) if n == min(rounds)
    ]
    return any(map(len, missing)) and all((c == 0).all() for c in missing)


def unfenced(hole, pattern):
    """Whether a hole matches the pattern, and has no fence."""
    return re.search(pattern, hole) is not None and "fence" not in hole


@dataclass(frozen=True)
class Loss:
    """One synchronisation lost or weakened: its line, what it was and what it becomes, and the whole source then."""

    line: int
    kind: str
    change: str
    source: str


def losses(file, source, start):
    """Every Loss in the student's lines, in their order; what a comment `# kept: why` stands beside is left out.

    start: the text of the file that --start wrote.
    """
    lines = source.splitlines()
    own = {n for n in own_lines(start, source) if not KEPT.search(lines[n - 1])}
    found = [
        Loss(m.token.line, m.kind, m.change, m.apply(source))
        for m in mutants_of(file, source)
        if m.token.line in own and m.kind != "nc"
    ]
    return sorted(found + list(_lost_waits(source, own)), key=lambda loss: loss.line)


def _lost_waits(source, own):
    """Loops that do nothing but poll, gone."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.While)
            and node.lineno in own
            and any(isinstance(n, ast.Name) and STRONG.match(n.id) for n in ast.walk(node.test))
        ):
            gone = [" " * node.col_offset + "pass\n"] + ["\n"] * (node.end_lineno - node.lineno)
            edited = lines[: node.lineno - 1] + gone + lines[node.end_lineno :]
            yield Loss(node.lineno, "wait", f"{ast.unparse(node.test)}: the wait -> nothing", "".join(edited))


def more_of(implementation, world, compared):
    """What `judge` does behind the schedules.

    implementation: own_dispatch or own_combine. world, compared: as for `tested`.
    """

    def more(asked, answer, tell):
        tests, good = (tested(given, world, compared) for given in (tests_of(answer), GOOD_TESTS))
        said = [_checked(implementation(maker(asked, answer), world), tell)]
        tell()
        said.append(broken(asked, answer, tests, good, tell))
        return "\n".join(said)

    return more


def tested(tests, world, compared):
    """The worlds of some TESTS, in which only the regions `compared` must be as expected: results, and the signals.

    world: function that makes worlds of the puzzle.
    """
    made = [world((2, 4, 2, 8, max(1, *tokens)), tokens, rounds, grid=2, threads=33) for tokens, rounds in tests]
    return [replace(w, expected=tuple({k: e[k] for k in compared} for e in w.expected)) for w in made]


def tests_of(answer):
    """TESTS of the student's file; Wrong if it is not what it must be."""
    given = getattr(answer, "TESTS", None)
    try:
        tests = [(tuple(map(int, tokens)), int(rounds)) for tokens, rounds in given]
    except (TypeError, ValueError):
        raise Wrong(f"TESTS is {given!r}: it must be a list of ((tokens, tokens), rounds)") from None
    if not 1 <= len(tests) <= MOST_TESTS or any(
        len(tokens) != 2 or not all(0 <= n <= MOST_TOKENS for n in tokens) or not 1 <= rounds <= MOST_ROUNDS
        for tokens, rounds in tests
    ):
        raise Wrong(
            f"TESTS is {given!r}: give 1 to {MOST_TESTS} worlds of two ranks, with 0 to {MOST_TOKENS} tokens "
            f"each, and 1 to {MOST_ROUNDS} rounds"
        )
    return tests


def _checked(implementation, tell):
    """`epmoe check` of the student's kernels; Wrong if a case differs."""
    outcomes = []
    for case in CASES:
        tell()
        outcomes += check(implementation, n_ranks=2, only=case).outcomes
    failed = [o for o in outcomes if o.differences]
    if failed:
        raise Wrong(f"`epmoe check` finds a difference.\n\n{failed[0]}")
    return f"epmoe check: {len(outcomes)} cases, equal to the reference to the bit."


def broken(asked, answer, tests, good, tell):
    """Each synchronisation broken in turn; Wrong if nothing notices, or the tests notice too little.

    tests: the worlds of the student's TESTS. good: the worlds of good tests, which tell what can be noticed without the
    race detector.
    """
    file = Path(answer.__file__)
    found = losses(file.name, file.read_text(encoding="utf-8"), asked.start)
    superfluous, missed, certain, worlds = [], [], [], asked.worlds()
    for loss in found:
        tell()
        made = _maker_of(asked, answer, loss.source)
        shown_by_results = loss.kind in SHOWN_BY_RESULTS
        if not _noticed(asked, made, worlds, TRIED):
            superfluous.append(loss)
        elif not _noticed(asked, made, tests, TESTED + MORE_TESTED if shown_by_results else TESTED):
            missed.append(loss)
            if shown_by_results and _noticed(asked, made, good, TESTED):
                certain.append(loss)
    if superfluous:
        raise _wrong(
            "right, and no race; but something is superfluous or stronger than it must be: nobody notices "
            "if it is lost or weakened. Weaken it, take it out, or say on its line why it stays, "
            "# kept: ...",
            superfluous,
        )
    if certain:
        raise _wrong(
            "your TESTS are too weak: they do not notice that a reset or a wait is gone, which results can show. "
            "A lost reset shows in a second round, a lost wait with several tokens on a rank.",
            certain,
        )
    said = f"{len(found)} ways to lose or weaken a synchronisation: each is noticed, so nothing is superfluous."
    if missed:
        said += (
            f"\nYour TESTS, which compare results alone, miss {len(missed)} of them. For these you need the race "
            "detector:\n" + _listed(missed)
        )
    return said


def _wrong(cause, found):
    return Wrong(f"{fill(cause, WIDTH)}\n\n{_listed(found)}")


def _listed(found):
    lines = [f"  line {loss.line}: {loss.change}" for loss in found[:SHOWN]]
    return "\n".join(lines + ([f"  and {len(found) - SHOWN} more"] if len(found) > SHOWN else []))


def _maker_of(asked, answer, source):
    """maker() for edited source; its lines are the student's."""
    edited = type(answer)(answer.__name__)
    edited.__file__ = answer.__file__
    vars(edited).update(PLAIN_ATOMICS)
    exec(compile(source, answer.__file__, "exec"), vars(edited))
    return maker(asked, edited)


def _noticed(asked, made, worlds, schedules):
    """Whether something goes wrong in one of the worlds."""
    return any(attempt(asked, made(world), world, schedule) for schedule in schedules for world in worlds)
