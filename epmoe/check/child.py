"""Runs one implementation's cases in a separate process. epmoe.check.guarded starts and watches it.

It reports, in this order: ["cases", name of every case, number of ranks], then for each case ["begin", its number] and
["done", record of its Outcome]; or ["cannot", why] if the implementation or a library is missing.
"""

from epmoe import guard
from epmoe.check.command import compile_first
from epmoe.check.conformance import all_cases, outcome
from epmoe.check.implementation import load
from epmoe.check.ranks import ranks_of
from epmoe_ref.errors import EPError


def run(task, say):
    """Run the cases of task, {"name", "ranks", "only", "first": number of the case to begin with}."""
    try:
        implementation = load(task["name"])
        compile_first([task["name"]], task["only"], task["ranks"])
        ranks = ranks_of(implementation, task["ranks"])
        found = [
            entry
            for entry in all_cases(implementation, ranks.size)
            if task["only"] in entry[0].name
        ]
    except EPError as error:
        say(["cannot", str(error)])
        return
    say(["cases", [case.name for case, *_ in found], ranks.size])
    for number in range(task["first"], len(found)):
        say(["begin", number])
        say(["done", outcome(implementation, *found[number], ranks).record()])


if __name__ == "__main__":
    guard.child(run)
