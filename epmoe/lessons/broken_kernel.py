"""Finds a release of the plain kernels that is needed: relaxed, it causes a race on a given region of memory."""

from importlib import import_module
from pathlib import Path

from epmoe.host.plain_kernels import Factories
from epmoe.mutants import edited_kernels
from epmoe.mutants.page_worlds import PLAIN
from epmoe.mutants.token_mutations import mutants_of
from epmoe.mutants.world_kinds import World
from epmoe.mutants.world_run import WorldRun
from epmoe_ref.errors import EPError, RaceError

SEEDS = 4
WORLD = World("split", PLAIN, ((5, 3),) * 2)


def unordered(region):
    """(Mutant, report) of the first relaxed release that a report of a race on the region names. Raises LookupError."""
    for mutant in _relaxed():
        file = mutant.token.file
        package = edited_kernels.load({file: mutant.apply(edited_kernels.source_of(file))})
        plain = Factories(import_module(f"{package.__name__}.plain"))
        for seed in range(SEEDS):
            try:
                WorldRun(WORLD, plain, seed).go()
            except RaceError as race:
                report = str(race)
                if report.startswith(f"data race on {region}[") and f"{Path(file).name}:{mutant.token.line} " in report:
                    return mutant, report
            except EPError:
                pass
    raise LookupError(f"no release of epmoe/kernels/plain makes a race on {region} when it is relaxed")


def _relaxed():
    """Mutants of the plain kernels that relax a release, those of system scope first."""
    plain = [file for file in edited_kernels.files() if file.startswith("plain/")]
    mutants = [m for file in plain for m in mutants_of(file, edited_kernels.source_of(file))]
    relaxed = [m for m in mutants if m.kind == "order" and "_release_" in m.token.text]
    return sorted(relaxed, key=lambda m: "_sys_" not in m.token.text)
