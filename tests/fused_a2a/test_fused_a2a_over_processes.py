"""One rank a process, under mpirun: rounds with uneven ranks equal the reference on every rank."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from of_one_rank import hybrid_received, order_tells, receiving, returning, rows_received
from rows_group import assert_same, law

from epmoe_ref import fused_a2a as reference
from epmoe_ref import strategies

sys.path.append(str(Path(__file__).parents[1] / "processes"))
from mpirun import mpirun

HERE, HIDDEN = Path(__file__).parent, 16


def equal_on(n_ranks, *arguments, limit):
    """Run rows_program.py on n_ranks ranks, and look for the line of each."""
    job = mpirun(n_ranks, HERE / "rows_program.py", *arguments, limit=limit)
    assert job.status == 0 and job.output.count(f"of {n_ranks}: equal") == n_ranks, job.output


@pytest.mark.parametrize(
    "n_ranks, world",
    [
        pytest.param(1, "MPIWorld", marks=pytest.mark.nightly),
        pytest.param(3, "MPIWorld", marks=pytest.mark.nightly),
        (2, "MPIWorld"),
        pytest.param(2, "ShmemWorld", marks=pytest.mark.nightly),
    ],
)
def test_every_rank_has_the_references_results(n_ranks, world):
    equal_on(n_ranks, 5, 16, 2, 2 if n_ranks > 2 else 1, world, limit=60)


def test_ranks_that_grow_by_different_numbers_of_tokens_agree():
    job = mpirun(2, HERE / "growing_program.py", limit=100)
    of_ranks = job.said(r"right sums, (at most 12 tokens, PoolLayout\(.*?\))")
    assert job.status == 0 and len(of_ranks) == 2 and len(set(of_ranks)) == 1, job.output


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks_a_gpu", [1, 2])
def test_every_rank_has_the_references_results_on_the_gpus(ranks_a_gpu):
    """One round of 4096 tokens a rank and many of few, with 256 experts; two ranks on a GPU take turns by time slices.

    With one GPU, few tokens.
    """
    from epmoe.worlds.ipc_memory import gpu_count

    n_ranks = max(2, min(ranks_a_gpu * gpu_count(), 8))
    equal_on(n_ranks, 4096 if gpu_count() > 1 else 40, 7168, 256 // n_ranks, 10 // ranks_a_gpu, limit=280)


@pytest.mark.gpu
@pytest.mark.timeout(200)
@pytest.mark.skipif(find_spec("nvshmem") is None, reason="a ShmemWorld on GPUs needs nvshmem4py: not installed")
def test_every_rank_has_the_references_results_in_nvshmems_memory():
    from epmoe.worlds.ipc_memory import gpu_count

    n_ranks = min(gpu_count(), 8)
    if n_ranks < 2:
        pytest.skip("NVSHMEM wants a GPU for each rank, and there is one")
    equal_on(n_ranks, 40, 7168, 256 // n_ranks, 2, "ShmemWorld", limit=180)


def assert_part(same, known, rank, rng, of_kind, probs):
    """What a cut handle gives one rank is that rank's part. of_kind: "" or "hybrid_", of reference's functions."""
    combine, combine_back, dispatch_back = (
        getattr(reference, of_kind + name) for name in ("combine_forward", "combine_backward", "dispatch_backward")
    )
    here, mine = receiving(same, rank), returning(same, rank)
    rows, grad = (order_tells(rng, n, HIDDEN) for n in (known.num_rows, known.num_tokens))
    assert_same(combine(rows, mine)[0], combine(rows, known)[rank], "combine")
    assert_same(combine_back(here, grad)[0], combine_back(known, grad)[rank], "rows")
    parts = dispatch_back(mine, rows, probs), dispatch_back(known, rows, probs)
    for part, of_all in zip(*parts):
        assert_same(part[0], of_all[rank], "gradients")


@law
@given(strategies.rows_worlds(), strategies.seeds())
def test_a_cut_handle_gives_one_ranks_part_of_rows(world, seed):
    """What the programs above expect is the reference's."""
    rng = np.random.default_rng(seed)
    *whole, known = reference.dispatch_forward(**vars(world))
    probs = [rng.random(a.shape, np.float32) for a in whole[2]]
    for rank in range(len(world.x)):
        part, same = rows_received(*vars(world).values(), rank)
        assert_same(part, [of_all[rank] for of_all in whole], "dispatch")
        assert_part(same, known, rank, rng, "", probs)


@law
@given(strategies.hybrid_worlds(), strategies.seeds())
def test_a_cut_handle_gives_one_ranks_part_of_rows_by_expert(world, seed):
    rng = np.random.default_rng(seed)
    sizes = "num_permuted_tokens", "pad_multiple", "p2p_world_size"
    options = {name: getattr(world, name) for name in sizes}
    data = world.x, world.routing_map, world.probs, world.num_local_experts
    *whole, known = reference.hybrid_dispatch_forward(*data, **options)
    probs = [rng.random(n, np.float32) for n in known.num_rows]
    for rank in range(len(world.x)):
        part, same = hybrid_received(*data, rank, **options)
        assert_same(part, [of_all[rank] for of_all in whole], "dispatch")
        assert_part(same, known, rank, rng, "hybrid_", probs)
