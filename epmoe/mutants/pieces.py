"""Distributes the runs of mutants over processes, until one run notices each mutant."""

from collections import Counter, deque
from dataclasses import replace
from queue import SimpleQueue

from epmoe.mutants import hunt, random_worlds

RUNS = 3  # of a piece


class Hunt:
    """One hunt of mutants. runs: for each mutant [(world's name, seed)], the likeliest first."""

    def __init__(self, mutants, runs):
        self.mutants, self.runs = list(mutants), list(runs)
        # runs and seconds of each mutant, by its number
        self.done, self.spent, self.ended = Counter(), Counter(), set()

    def verdicts(self, workers, jobs, advance=lambda n: None):
        """Verdicts in the order in which they come. jobs: processes of the pool. advance(n): n runs are over."""
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
                        _piece, (number, self.mutants[number], runs), callback=answers.put, error_callback=answers.put
                    )
                    flying += 1
            if not flying:
                break
            answer, flying = answers.get(), flying - 1
            if isinstance(answer, BaseException):
                raise answer
            number, n_runs, _ = answer
            decided = number in self.ended
            verdict = self._verdict(*answer)
            if verdict:
                n_runs += len(self.runs[number]) - self.done[number]  # the rest need not run
                yield verdict
            if not decided:
                advance(n_runs)

    def _verdict(self, number, n_runs, verdict):
        """The Verdict on a mutant, if this piece of its runs decides it."""
        self.done[number] += n_runs
        self.spent[number] += verdict.seconds
        if number in self.ended or not (verdict.killed or self.done[number] == len(self.runs[number])):
            return None
        self.ended.add(number)
        return replace(verdict, seconds=self.spent[number])

    def undecided(self):
        """[(mutant, runs that did not notice it, runs in all)] of the mutants without a Verdict."""
        return [
            (mutant, self.done[number], len(self.runs[number]))
            for number, mutant in enumerate(self.mutants)
            if number not in self.ended
        ]

    @property
    def n_runs(self):
        """The most runs that all mutants can need."""
        return sum(map(len, self.runs))


def hunt_of(mutants, coverage, seeds):
    """The Hunt through all worlds that run a mutant, under each seed."""
    return Hunt(
        mutants, ([(world, seed) for seed in range(seeds) for world in coverage.worlds(mutant)] for mutant in mutants)
    )


def hunt_of_edits(edits, coverage, seeds):
    """The Hunt through the worlds that run an edit's lines, under each seed.

    After these come worlds that run only the function around the lines, since another schedule may lead them there.
    Random worlds have one schedule.
    """
    runs = []
    for edit in edits:
        running, beside = coverage.running(edit), coverage.beside(edit)
        runs.append([(name, 0) for name in running])
        runs[-1] += [(n, seed) for seed in range(1, seeds) for n in running if not random_worlds.is_random(n)]
        runs[-1] += [(name, number % seeds) for number, name in enumerate(beside)]
    return Hunt(edits, runs)


def runs_of_random(n):
    """[(name, seed)] of the first n random worlds, one schedule each."""
    return [(name, number % hunt.SEEDS) for number, name in enumerate(random_worlds.names(n))]


def _piece(number, mutant, runs):
    return number, len(runs), hunt.hunt_by(mutant, runs)
