"""Runs one implementation's cases in a separate process. epmoe.check.guarded starts and watches it.

It reports, in this order: ["cases", [name, why it is not served or None] of every case, number of ranks], then for each
case ["begin", its number], ["call", name of each call that begins, its round] and ["done", record of its Outcome]; or
["cannot", why] if the implementation, a library or a GPU is missing. At SIGUSR1, or if it crashes, it writes its stack
to the file task["stack"].
"""

import faulthandler
import signal

from epmoe import guard
from epmoe.check import conformance
from epmoe.check.calls import progress
from epmoe.check.command import compile_first
from epmoe.check.conformance import all_cases, chosen, outcome
from epmoe.check.implementation import load
from epmoe.check.ranks import ranks_of
from epmoe_ref.errors import EPError


def run(task, say):
    """Run the cases of task: {"name", "ranks", "only", "first": number of the case to begin with, "stack"}."""
    stack = open(task["stack"], "w")
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    progress.tell = lambda call, round_: say(["call", call, round_])
    conformance.CAUGHT = (*conformance.CAUGHT, KeyboardInterrupt)  # Ctrl-C does not reach this process
    try:
        implementation = load(task["name"])
        compile_first([task["name"]], task["only"], task["ranks"])
        ranks = ranks_of(implementation, task["ranks"], task["name"])
        found = chosen(all_cases(implementation, ranks.size), task["only"])
        say(["cases", [[case.name, reason] for case, reason, _ in found], ranks.size])
        for number in range(task["first"], len(found)):
            say(["begin", number])
            say(["done", outcome(implementation, *found[number], ranks).record()])
    except EPError as error:
        say(["cannot", str(error)])


if __name__ == "__main__":
    guard.child(run)
