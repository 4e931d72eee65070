"""Few mutants in many worlds: all processes go through the worlds of a mutant, until one of them notices it."""

from collections import Counter, deque
from dataclasses import replace
from queue import SimpleQueue

from epmoe.mutants import hunt, random_worlds

RUNS = 3                # of a piece


def hunt_in_pieces(workers, jobs, mutants, coverage, seeds=hunt.SEEDS, n_random=0):
    """Verdicts in the order in which they come. jobs: processes of the pool. n_random: random worlds behind the others.
    """
    last = runs_of_random(n_random)
    pieces, left, spent, ended = [], Counter(), Counter(), set()
    for number, mutant in enumerate(mutants):
        runs = [(world, seed) for seed in range(seeds) for world in coverage.worlds(mutant)] + last
        pieces += [(at, number, runs[at:at + RUNS]) for at in range(0, max(1, len(runs)), RUNS)]
    pieces = deque(sorted(pieces))          # the likeliest worlds of all come first
    left.update(number for _, number, _ in pieces)
    answers, flying = SimpleQueue(), 0
    while pieces or flying:
        while pieces and flying < 2 * jobs:
            _, number, runs = pieces.popleft()
            if number not in ended:
                workers.apply_async(_piece, (number, mutants[number], runs), callback=answers.put,
                                    error_callback=answers.put)
                flying += 1
        if not flying:
            break
        answer, flying = answers.get(), flying - 1
        if isinstance(answer, BaseException):
            raise answer
        number, verdict = answer
        left[number] -= 1
        spent[number] += verdict.seconds
        if number not in ended and (verdict.killed or not left[number]):
            ended.add(number)
            yield replace(verdict, seconds=spent[number])


def runs_of_random(n):
    """[(name, seed)] of the first n random worlds, one schedule each."""
    return [(name, number % hunt.SEEDS) for number, name in enumerate(random_worlds.names(n))]


def _piece(number, mutant, runs):
    return number, hunt.hunt_by(mutant, runs)
