"""Rounds whose messages cross p2p worlds, over a network that delays and reorders: exact, and free of races."""

from dataclasses import replace

import numpy as np
import pytest

from epmoe import EPConfig, ExpertParallel, LocalWorld, PeerTimeout, layout, routing
from epmoe.verify.checked_rounds import Case, rounds_of

PLAIN = dict(n_ranks=4, n_experts=8, top_k=3, hidden=64, max_tokens_per_rank=3, use_shmem=True)
TWO_RANKS = PLAIN | dict(n_ranks=2, n_experts=4, p2p_world_size=1)
FORMATS = {
    "bf16": {},
    "fp8_blockwise": dict(hidden=128),
    "nvfp4": {},
    "mxfp4": dict(hidden=128),
    "mxfp8": dict(hidden=128),
    "mxfp4_rows": {},
}


def differences(case, seed, racecheck=None, rounds=2):
    """The differences of some rounds in the simulator, as text; even seeds run the plain kernels."""
    case = replace(case, kernels=case.kernels or ("fast" if seed is None or seed % 2 else "plain"))
    world = LocalWorld(case.cfg.n_ranks, seed=seed, racecheck=racecheck)
    routed = [routing.make(case.cfg, [7, n]) for n in range(rounds)]
    return [str(d) for r in rounds_of(case, world, routed) for d in r.differences]


@pytest.mark.by_day
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("n_ranks, world_size", [(2, 1), (4, 2), pytest.param(4, 1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("seed", [None, 0, pytest.param(1, marks=pytest.mark.nightly)])
def test_rounds_between_worlds_are_exact(n_ranks, world_size, fused, seed):
    sizes = dict(n_ranks=n_ranks, n_experts=2 * n_ranks, p2p_world_size=world_size)
    case = Case(EPConfig(**PLAIN | sizes), fused=fused)
    assert not differences(case, seed, racecheck=True)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.by_day(1)
def test_rounds_are_exact_whatever_the_network_delays(seed):
    case = Case(EPConfig(**PLAIN, p2p_world_size=1 + seed % 2), fused=seed % 4 > 1)
    assert not differences(case, seed, racecheck=False)


@pytest.mark.by_day(3)
@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared expert"])
@pytest.mark.parametrize("kernels", ["plain", "fast"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_crosses_worlds(name, kernels, shared):
    cfg = EPConfig(**PLAIN | FORMATS[name], p2p_world_size=2, token_format=name, fused_shared_expert=shared)
    assert not differences(Case(cfg, fused=shared, kernels=kernels), seed=3, rounds=1)


@pytest.mark.parametrize(
    "options",
    [
        dict(top_k=8),
        dict(combine_dtype="fp32"),
        dict(alignment=64),
        dict(hidden=8),
        dict(n_experts=40, top_k=32, max_tokens_per_rank=2),
        dict(n_ranks=6, n_experts=6, p2p_world_size=3),
        dict(hidden=1288),
    ],
    ids=str,
)
@pytest.mark.by_day(3)
def test_shapes_and_sizes(options):
    assert not differences(Case(EPConfig(**PLAIN | dict(p2p_world_size=2) | options)), seed=4, rounds=1)


def test_unreduced_output_and_functions_cross_worlds():
    cfg = EPConfig(**TWO_RANKS)
    assert not differences(Case(cfg, weights="none"), seed=5, rounds=1)
    assert not differences(Case(cfg, weights="function", epilogue=True, fused=True), seed=5, rounds=1)


def test_a_world_of_all_ranks_needs_no_network(monkeypatch):
    cfg = EPConfig(**TWO_RANKS | dict(p2p_world_size=2))

    def refuse(*args):
        raise AssertionError("something was sent through the network")

    monkeypatch.setattr("epmoe.device.sim.network.Delivery.__init__", refuse)
    assert not differences(Case(cfg), seed=0, rounds=1)


def test_direct_stores_reach_only_the_own_world():
    """A kernel gets no address outside its p2p world, so all other data went through the network."""
    cfg = EPConfig(**PLAIN, p2p_world_size=2)
    with ExpertParallel(cfg, LocalWorld(4)) as ep:
        ranks = ep._engine.ranks
        for r in ranks:
            first = r.rank // 2 * 2
            expected = [ranks[first + i].address("dispatch_recv_buf") for i in range(2)]
            assert r.peers("dispatch_recv_buf") == expected


def test_counters_are_as_before_after_a_round():
    cfg = EPConfig(**TWO_RANKS)
    routed = routing.make(cfg, 1)
    with ExpertParallel(cfg, LocalWorld(2)) as ep:
        d = ep.dispatch(routed.x, routed.topk_ids)
        ep.combine([np.zeros((x.n_rows, cfg.hidden), x.numpy().output_tokens.dtype) for x in d], d, routed.topk_weights)
        for rank in range(2):
            for name in ("dispatch_recv_count", "combine_recv_count"):
                assert (ep.region(name, rank) == layout.MAX_FINITE).all()
            for name in ("reserved", "finished", "A", "status"):
                assert not ep.region(name, rank).any()


def test_a_rank_that_stays_away_is_named():
    cfg = EPConfig(**PLAIN, p2p_world_size=2)
    routed = routing.make(cfg, 1)
    world = LocalWorld(4, expire_waits=True)
    with pytest.raises(PeerTimeout, match="src_rank 3"), ExpertParallel(cfg, world, timeout=0.01) as ep:
        ep._engine.ranks.pop()
        ep._engine.world.ranks = range(3)
        ep.dispatch(routed.x[:3], routed.topk_ids[:3])
