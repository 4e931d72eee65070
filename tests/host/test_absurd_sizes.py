"""Sizes, times and kinds that cannot be meant get an error that names value and rule, before memory is asked for."""

import numpy as np
import pytest
from worlds_at_hand import config, parallel

from epmoe import EPConfig, ExpertParallel, LocalWorld, MPIWorld, fused_a2a
from epmoe.fused_a2a.buffer import Buffer
from epmoe_ref.errors import EPStateError, EPValueError, UnavailableError


@pytest.mark.parametrize("timeout", [1e13, 1e10, 0, -1, float("nan"), float("inf"), True, "30", None, np.ones(2)])
def test_times_are_positive_and_fit_the_device_clock(timeout):
    for make in (lambda: parallel(config(), timeout=timeout), lambda: Buffer(LocalWorld(2), timeout=timeout)):
        with pytest.raises(EPValueError, match="timeout=.*positive number of seconds, at most 1e"):
            make()


@pytest.mark.parametrize("timeout", [1e9, 1, np.float32(0.5)])
def test_a_long_time_is_a_time(timeout):
    parallel(config(), timeout=timeout).close()


@pytest.mark.parametrize(
    "world, says",
    [
        (LocalWorld, r"is the class LocalWorld; make a world of it: LocalWorld\(2\)"),
        (MPIWorld, r"is the class MPIWorld; make a world of it: MPIWorld\(\)"),
        (3, "must be a LocalWorld, MPIWorld or ShmemWorld, not int; for a process group of torch, give"),
    ],
)
def test_a_class_is_no_world(world, says):
    for call in (lambda: ExpertParallel(config(), world), lambda: fused_a2a.get_buffer(world, 0)):
        with pytest.raises(EPValueError, match=says):
            call()


@pytest.mark.parametrize("field", ["fused_shared_expert", "skip_a2a", "use_shmem", "fuse_a_scale_preshuffle"])
@pytest.mark.parametrize("value", [np.array([True, False]), np.ones((2, 2)), np.array([True]), "yes", None, 2])
def test_an_array_is_no_truth_value(field, value):
    with pytest.raises(EPValueError, match=f"(?s){field}=.*must be True or False"):
        EPConfig(2, 4, 2, 16, 4, **{field: value})


@pytest.mark.parametrize("fused", [np.ones(2), "no", None])
def test_fused_is_a_truth_value(fused):
    with pytest.raises(EPValueError, match="(?s)fused=.*must be True or False"):
        parallel(config(), fused=fused)


@pytest.mark.parametrize(
    "cfg, kernels, said",
    [
        (EPConfig(16, 16, 1, 8, 1, p2p_world_size=16), None, "p2p_world_size=16 must be at most 8 .*use_shmem=True"),
        (EPConfig(1, 40, 33, 8, 1), "fast", "top_k=33 must be at most 32 for the fast kernels"),
    ],
)
def test_limits_of_the_kernels_are_checked_before_memory_is_asked_for(cfg, kernels, said):
    with pytest.raises(EPValueError, match=said):
        ExpertParallel(cfg, LocalWorld(cfg.n_ranks), kernels=kernels)


def test_memory_that_is_not_to_be_had_is_no_traceback():
    with pytest.raises(UnavailableError, match=r"\d+ bytes for nothing of rank 0 cannot be allocated"):
        LocalWorld(1).machine.alloc(2**60, "nothing")


@pytest.mark.parametrize("call", ["dispatch", "dispatch_wait", "region", "trace", "reset", "memory"])
def test_after_close_every_call_says_so(call, ep, x, ids):
    ep.close()
    ep.close()
    arguments = dict(dispatch=[x, ids], region=["status"]).get(call, [])
    with pytest.raises(EPStateError, match=f"{call}: this ExpertParallel is closed"):
        getattr(ep, call)(*arguments)
