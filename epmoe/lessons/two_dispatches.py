"""Rounds of the plain dispatch kernel without a combine between them, which ExpertParallel refuses."""

from epmoe.host.plain_kernels import Factories
from epmoe.mutants.page_worlds import PLAIN
from epmoe.mutants.world_kinds import World
from epmoe.mutants.world_run import WorldRun
from epmoe_ref.errors import DeadlockError, RaceError


class _WithoutCombine(WorldRun):
    """All ranks' dispatches in flight at once; results are not looked at."""

    def _start(self, phase, *launch):
        if phase == "dispatch":
            super()._start(phase, *launch)

    def _check(self, rounds):
        pass


def outcome(rounds, seed, *, racecheck=True):
    """("ends", "hang" or "race", the report) of n dispatches in a row under one schedule."""
    world = World("dispatches in a row", PLAIN, ((5, 3),) * rounds, fused=True)
    try:
        _WithoutCombine(world, Factories(), seed, racecheck=racecheck).go()
    except DeadlockError as error:
        return "hang", str(error)
    except RaceError as error:
        return "race", str(error)
    return "ends", ""
