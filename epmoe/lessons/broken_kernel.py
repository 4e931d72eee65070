"""Finds a synchronisation of the plain kernels whose removal causes a race on a given region of memory."""

from importlib import import_module

from epmoe.host.plain_kernels import Factories
from epmoe.mutants import edited_kernels
from epmoe.mutants.page_worlds import PLAIN
from epmoe.mutants.token_mutations import mutants_of
from epmoe.mutants.world_kinds import World
from epmoe.mutants.world_run import WorldRun
from epmoe_ref.errors import EPError, RaceError

SEEDS = 4
FOLDER = "plain/"
WORLD = World("split", PLAIN, ((5, 3),) * 2)


def unordered(region):
    """(Mutant, report) of the first fence or release whose removal causes a race on the region. Raises LookupError.

    If several schedules race, a report that names the changed line is preferred.
    """
    for mutant in _candidates():
        edits = {mutant.token.file: mutant.apply(edited_kernels.source_of(mutant.token.file))}
        reports = []
        for seed in range(SEEDS):
            report = _race(seed, edits)
            if not report.startswith(f"data race on {region}["):
                break
            reports.append(report)
            if f"{mutant.token.file.rpartition('/')[2]}:{mutant.token.line} " in report:
                return mutant, report
        if reports:
            return mutant, reports[0]
    raise LookupError(f"no fence or release of epmoe/kernels/plain makes a race on {region} when it is lost")


def _race(seed, edits):
    """The race report of a run with edited kernels; "" if the run does not end with a race."""
    try:
        package = edited_kernels.load(edits)
        plain = import_module(f"{package.__name__}.plain")
        WorldRun(WORLD, Factories(plain), seed).go()
    except RaceError as race:
        return str(race)
    except EPError:
        pass
    return ""


def _candidates():
    """Sort key: removed fences first, then relaxed releases of system scope, then relaxed releases of device scope."""
    found = [
        m
        for file in edited_kernels.files()
        if file.startswith(FOLDER)
        for m in mutants_of(file, edited_kernels.source_of(file))
    ]
    lost = [m for m in found if m.token.text.startswith("fence_acq_rel") and m.new == "pass"]
    relaxed = [m for m in found if m.kind == "order" and "_release_" in m.token.text]
    return lost + sorted(relaxed, key=lambda m: "_sys_" not in m.token.text)
