"""A world refuses misspelt simulator options and invalid values."""

import pytest

from epmoe import EPValueError, LocalWorld, MPIWorld, ShmemWorld
from epmoe.device.sim.recorder import Recorder
from epmoe.worlds.simulation import OPTIONS

VALUES = {
    "seed": 3,
    "racecheck": False,
    "stale": True,
    "n_sms": 2,
    "resident_limit": 1,
    "expire_waits": True,
    "stop_at_first_race": False,
    "recorder": Recorder(),
}


def test_every_option_is_the_machines():
    machine = LocalWorld(2, **VALUES).machine
    assert {name: getattr(machine, name) for name in OPTIONS} == VALUES


@pytest.mark.parametrize(
    "given, parts",
    [
        (dict(sead=3), ["sead=3", "LocalWorld", "stream", *OPTIONS]),
        (dict(rank=1), ["rank=1", "no option"]),
        (dict(seed="a"), ["seed='a'", "whole number", "None"]),
        (dict(seed=1.5), ["seed=1.5", "whole number"]),
        (dict(seed=True), ["seed=True"]),
        (dict(n_sms=0), ["n_sms=0", "at least 1"]),
        (dict(resident_limit="2"), ["resident_limit='2'", "at least 1"]),
        (dict(racecheck="yes"), ["racecheck='yes'", "True"]),
    ],
    ids=str,
)
def test_what_is_no_option_is_refused_by_name_rule_and_remedy(given, parts):
    with pytest.raises(EPValueError) as error:
        LocalWorld(2, **given)
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("world, own", [(MPIWorld, "gpu"), (ShmemWorld, "p2p_world_size")])
def test_ranks_in_processes_refuse_before_they_ask_for_mpi(world, own):
    with pytest.raises(EPValueError, match=f"{world.__name__} has no option p2p_size=2; it has .*{own}.*seed"):
        world(p2p_size=2)
