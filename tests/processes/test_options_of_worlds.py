"""A world refuses misspelt simulator options and invalid values."""

import numpy as np
import pytest

from epmoe import EPValueError, LocalWorld, MPIWorld, ShmemWorld
from epmoe.device.sim.recorder import Recorder
from epmoe.worlds.launcher import library
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


def test_integers_of_numpy_are_whole_numbers():
    world = LocalWorld(np.int64(2), seed=np.int32(3), n_sms=np.uint8(2))
    kinds = {type(n) for n in (world.n_ranks, world.machine.seed, world.machine.n_sms)}
    assert (world.n_ranks, world.machine.seed, world.machine.n_sms, kinds) == (2, 3, 2, {int})


@pytest.mark.parametrize("world", [MPIWorld, ShmemWorld])
def test_ranks_in_processes_refuse_what_is_no_communicator_and_no_time(world):
    with pytest.raises(EPValueError, match="comm=4 must be .*mpi4py.*mpirun -n"):
        world(4)
    with pytest.raises(EPValueError, match="timeout=0 must be a positive number of seconds"):
        world(timeout=0)


@pytest.mark.parametrize(
    "version, named",
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\0", "Open MPI v5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: x\n", "MPICH 5.0.2"),
    ],
)
def test_an_mpi_library_is_named_briefly(version, named):
    assert library(version) == named


@pytest.mark.parametrize("world, own", [(MPIWorld, "gpu"), (ShmemWorld, "p2p_world_size")])
def test_ranks_in_processes_refuse_before_they_ask_for_mpi(world, own):
    with pytest.raises(EPValueError, match=f"{world.__name__} has no option p2p_size=2; it has .*{own}.*seed"):
        world(p2p_size=2)
