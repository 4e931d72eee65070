"""Splits the runs of mutants among processes, until one run notices each mutant."""

from collections import Counter, deque
from dataclasses import replace
from queue import SimpleQueue

from epmoe.mutants import hunt, random_worlds

RUNS = 3  # of a piece


class Hunt:
    """One hunt of mutants. runs: for each mutant [(world's name, seed)], the likeliest first."""

    def __init__(self, mutants, runs):
        self.mutants, self.runs = list(mutants), list(runs)
        self.done, self.spent, self.ended = (
            Counter(),
            Counter(),
            set(),
        )  # runs and seconds of each mutant, by its number

    def verdicts(self, workers, jobs):
        """Verdicts in order of completion. jobs: processes of the pool."""
        pieces = deque(
            sorted(
                (at, number, runs[at : at + RUNS])
                for number, runs in enumerate(self.runs)
                for at in range(0, max(1, len(runs)), RUNS)
            )
        )  # the likeliest runs of all mutants come first
        answers, flying = SimpleQueue(), 0
        while pieces or flying:
            while pieces and flying < 2 * jobs:
                _, number, runs = pieces.popleft()
                if number not in self.ended:
                    workers.apply_async(
                        _piece,
                        (number, self.mutants[number], runs),
                        callback=answers.put,
                        error_callback=answers.put,
                    )
                    flying += 1
            if not flying:
                break
            answer, flying = answers.get(), flying - 1
            if isinstance(answer, BaseException):
                raise answer
            verdict = self._verdict(*answer)
            if verdict:
                yield verdict

    def _verdict(self, number, n_runs, verdict):
        """The Verdict on a mutant, if this piece of its runs decides it."""
        self.done[number] += n_runs
        self.spent[number] += verdict.seconds
        if number in self.ended or not (
            verdict.killed or self.done[number] == len(self.runs[number])
        ):
            return None
        self.ended.add(number)
        return replace(verdict, seconds=self.spent[number])

    def undecided(self):
        """[(mutant, runs that did not notice it, runs in all)] of those without a Verdict."""
        return [
            (mutant, self.done[number], len(self.runs[number]))
            for number, mutant in enumerate(self.mutants)
            if number not in self.ended
        ]


def hunt_of(mutants, coverage, seeds=hunt.SEEDS, n_random=0):
    """The Hunt through all of a mutant's worlds with each seed, then through random worlds."""
    return Hunt(
        mutants,
        (
            [(world, seed) for seed in range(seeds) for world in coverage.worlds(mutant)]
            + runs_of_random(n_random)
            for mutant in mutants
        ),
    )


def runs_of_random(n):
    """[(name, seed)] of the first n random worlds, one schedule each."""
    return [(name, number % hunt.SEEDS) for number, name in enumerate(random_worlds.names(n))]


def _piece(number, mutant, runs):
    return number, len(runs), hunt.hunt_by(mutant, runs)
