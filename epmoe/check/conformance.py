"""`check(implementation)`: compares every case that it serves with the reference. The report names the differences."""

import textwrap
from contextlib import nullcontext
from dataclasses import dataclass, field

from epmoe.check import compare, experts, hybrid, rows
from epmoe.check.calls import WrongForm, progress
from epmoe.check.cases import cases
from epmoe.check.difference import Difference, of_all_ranks
from epmoe.check.frames import where
from epmoe.check.implementation import HybridImplementation, Implementation, not_served, whole
from epmoe.check.ranks import ranks_of
from epmoe_ref.config import MAX_EXPERTS
from epmoe_ref.errors import EPValueError, UnavailableError

MOST_RANKS = MAX_EXPERTS // 3
SHOWN = 4  # differences of a case that the report prints
RUNS = 2  # of each case, each time on a new object
CAUGHT = Exception, SystemExit  # what an implementation may raise
AGAIN = (
    "the case's first run was equal, a second one on a new object is not: something is left over (a global, "
    "memory that is not initialised), or there is a race"
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case: its differences (none: it passed), or why it is not served or was not run. Also names
    the reference's arrays that were not compared because the implementation did not return them."""

    case: str
    differences: tuple = ()
    not_served: str | None = None
    not_given: frozenset = frozenset()
    not_run: str | None = None

    @property
    def state(self):
        """Its state in a word or two, for people and for JSON."""
        states = {"not served": self.not_served, "not run": self.not_run, "differs": self.differences, "ok": True}
        return next(state for state, holds in states.items() if holds)

    def record(self):
        """The same as a dict that JSON can hold: case, state, and why."""
        return {
            "case": self.case,
            "state": self.state,
            "not_served": self.not_served,
            "not_run": self.not_run,
            "not_given": sorted(self.not_given),
            "differences": [d.record() for d in self.differences],
        }

    @classmethod
    def of_record(cls, record):
        """The Outcome of a record(), without the arrays."""
        differences = tuple(Difference(**of_one) for of_one in record["differences"])
        return cls(record["case"], differences, record["not_served"], frozenset(record["not_given"]))

    def __str__(self):
        if not self.differences:
            why = self.not_served or self.not_run
            return f"{self.state:12}{self.case}" + (f": {why}" if why else "")
        return f"DIFFERS     {self.case}\n" + textwrap.indent(compare.report(self.differences, SHOWN), "  ")


@dataclass
class Report:
    """All outcomes of one implementation. `passed` is True if some case was run and none differs."""

    name: str
    n_ranks: int
    outcomes: list = field(default_factory=list)

    @property
    def served(self):
        """Outcomes of the cases that it serves."""
        return [o for o in self.outcomes if not o.not_served]

    @property
    def run(self):
        """Outcomes of the cases that were run."""
        return [o for o in self.served if not o.not_run]

    @property
    def made(self):
        """Whether `make` returned in some case that was run."""
        first = [o.differences[0] if o.differences else None for o in self.run]
        return not first or any(not d or d.what != "make" or not d.says.startswith("raised ") for d in first)

    @property
    def failed(self):
        """Cases that differ."""
        return [o for o in self.run if o.differences]

    @property
    def passed(self):
        """Whether some case was run and none differs."""
        return bool(self.run) and not self.failed

    @property
    def not_given(self):
        """Sorted names of the reference's arrays that were not compared because some result lacked them."""
        return sorted(frozenset().union(*(o.not_given for o in self.run)))

    @property
    def verdict(self):
        """The last line of the report: PASS or FAIL, and for how many cases."""
        n_served = len(self.served)
        served = f"{n_served} of {len(self.outcomes)} cases served, {self.n_ranks} rank{'s' * (self.n_ranks != 1)}"
        if not self.run:
            return f"FAIL {self.name}: no case was run ({served})"
        if not self.made:
            return f"FAIL {self.name}: it cannot be made, so nothing was compared ({served})"
        if self.failed:
            rest = f", {n_served - len(self.run)} not run" if n_served > len(self.run) else ""
            cases_differ = "case differs" if n_served == 1 else "cases differ"
            differ = f"{len(self.failed)} of {n_served} {cases_differ} from the reference{rest}"
            return f"FAIL {self.name}: {differ} ({served})"
        missing = f"; not given and not compared: {', '.join(self.not_given)}" if self.not_given else ""
        return f"PASS {self.name}: equal to the reference ({served}{missing})"

    def record(self):
        """The same as a dict that JSON can hold: name, n_ranks, passed, verdict, not_given, and a record a case."""
        return {
            "name": self.name,
            "n_ranks": self.n_ranks,
            "passed": self.passed,
            "verdict": self.verdict,
            "not_given": self.not_given,
            "cases": [o.record() for o in self.outcomes],
        }

    def __str__(self):
        return "\n".join([*map(str, self.outcomes), self.verdict])


def check(implementation, *, n_ranks=None, ranks=None, only="", name=None, tell=None, around=None):
    """Compares an implementation with the reference.

    implementation: a class derived from Implementation, RowsImplementation or HybridImplementation.
    n_ranks: size of the world; default 4, with per_rank the number of processes. ranks: the result of `ranks_of`, if
    already known. only: runs the case of this name, else those whose name contains it. name: the implementation's name
    in the report; default: the class's. around: returns the context in which a case of this name runs. tell: called with
    each Outcome. Returns a Report, the same on all ranks. An exception of the implementation is a difference of its case,
    but with per_rank it is raised. Errors: UnavailableError if per_rank finds no ranks, or if `make` raises it.
    """
    whole(implementation, getattr(implementation, "__name__", repr(implementation)))
    ranks = ranks or ranks_of(implementation, n_ranks)
    report = Report(name or implementation.__name__, ranks.size)
    for case, reason, run in chosen(all_cases(implementation, ranks.size), only):
        with around(case.name) if around else nullcontext():
            report.outcomes.append(outcome(implementation, case, reason, run, ranks))
        if tell:
            tell(report.outcomes[-1])
    return report


def chosen(entries, only):
    """Those of all_cases whose name contains `only`, or the one that has this name. only: a name, or a list of names."""
    if isinstance(only, list):
        return [entry for entry in entries if entry[0].name in only]
    exact = [entry for entry in entries if entry[0].name == only]
    return exact or [entry for entry in entries if only in entry[0].name]


def all_cases(implementation, n_ranks):
    """(case, why it is not served or None, the function that runs it) for every case of the implementation's layout."""
    if n_ranks > MOST_RANKS:
        raise EPValueError(f"n_ranks={n_ranks} must be at most {MOST_RANKS}: the cases have three experts a rank")
    if issubclass(implementation, Implementation):
        listed, run = cases(n_ranks, implementation.hidden), experts.run_case
    else:
        layout = hybrid if issubclass(implementation, HybridImplementation) else rows
        listed, run = layout.cases(n_ranks), layout.run_case
    return [(case, not_served(implementation, case), run) for case in listed]


def outcome(implementation, case, reason, run, ranks):
    """Run one case, unless there is a reason not to, and run it again if nothing differs. An exception is a difference.

    With one rank a process it is raised instead, to end all ranks.
    """
    if reason:
        return Outcome(case.name, not_served=reason)
    not_given = set()
    for time in range(RUNS):
        found = _guarded(implementation, case, run, ranks, not_given)
        all_found = tuple(of_all_ranks(found, ranks.gather))
        if all_found:
            break
    if time and all_found:
        all_found = tuple(d.because(f"{AGAIN}{'; ' if d.cause else ''}{d.cause}") for d in all_found)
    return Outcome(case.name, all_found, not_given=frozenset(not_given))


def _guarded(implementation, case, run, ranks, not_given):
    try:
        return run(implementation, case, ranks, not_given)
    except CAUGHT as error:
        if isinstance(error, UnavailableError) and progress.call == "make":
            raise
        if implementation.per_rank:
            if isinstance(error, SystemExit):
                says = f"the implementation ended the process: sys.exit({error.code})"
                raise RuntimeError(says).with_traceback(error.__traceback__) from error
            raise
        if isinstance(error, WrongForm):
            return [error.difference]
        called = implementation.__init__ if progress.call == "make" else getattr(implementation, progress.call, None)
        says = f"raised {type(error).__name__}: {error}"
        place = where(error, called)
        if place[2:-1].rpartition("/")[2] not in says:  # reports of the simulator name the line themselves
            says += place
        return [Difference(progress.call or "call", says, round=progress.round)]
