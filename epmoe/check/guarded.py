"""Runs an implementation's cases in another process, which may hang, crash or exit. Each case gets an Outcome."""

from epmoe import guard
from epmoe.check.conformance import Outcome, Report
from epmoe.check.difference import Difference
from epmoe_ref.errors import EPValueError

START_S = 300  # at least this long for imports and compilation
MOST_LOST = 3  # after this many cases without an answer, no more are tried


def check(name, *, n_ranks, only, timeout, tell, output=None):
    """The Report on the implementation of this name. EPValueError if it cannot be run.

    timeout: seconds for a case. tell: called with each Outcome. output: where the implementation's prints go, as for
    subprocess; default: this process's stdout.
    """
    report, lost = Report(name, n_ranks), 0

    def add(outcome):
        report.outcomes.append(outcome)
        tell(outcome)

    while True:
        cases, why = _some_cases(
            report, dict(name=name, ranks=n_ranks, only=only), timeout, add, output
        )
        if why is None:
            return report
        lost += 1
        add(Outcome(cases[len(report.outcomes)], (Difference("call", why),)))
        for case in cases[len(report.outcomes) :] if lost == MOST_LOST else ():
            add(Outcome(case, not_served=f"not run after {lost} cases without an answer"))
        if len(report.outcomes) == len(cases):
            return report


def _some_cases(report, task, timeout, add, output):
    """Run cases until one is lost. Returns (names of all cases, why it was lost or None)."""
    cases, begun = [], False
    task["first"] = len(report.outcomes)
    with guard.process("epmoe.check.child", task, output) as (process, lines):
        for what, *rest in lines(lambda: timeout if begun else max(timeout, START_S)):
            if what == "cannot":
                raise EPValueError(rest[0])
            if what == "cases":
                cases, report.n_ranks = rest
            elif what == "done":
                add(Outcome.of_record(rest[0]))
            begun = what == "begin"
            if not begun and len(report.outcomes) == len(cases):
                return cases, None
        if process.late:
            limit = timeout if begun else max(timeout, START_S)
            why = f"did not return within {limit:g} s" + (" (--timeout)" if begun else "")
        else:
            why = guard.how_it_ended(process)
    if not begun:
        raise EPValueError(f"{task['name']} {why}, outside of any case")
    return cases, why
