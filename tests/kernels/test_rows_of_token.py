"""Many tokens: payloads that come once are read once; and blocks that have several batches send first, then receive."""

import numpy as np
import pytest
from kernel_world import KernelWorld
from protocol_model import check_dispatch
from test_dispatch_combine_rounds import CASES, rows_of, run_round
from test_dispatch_combine_rounds import routing as case_routing

from epmoe import layout
from epmoe.kernels import LaunchConfig, dispatch, rows_of_token, senders
from epmoe_ref.config import EPConfig


@pytest.fixture
def many(monkeypatch):
    """All tokens are many: lists for each, and a batch is a token or two."""
    compiled = dispatch._compile_async, dispatch._compile_wait, dispatch._compile_fused
    monkeypatch.setattr(rows_of_token, "LEAST_TOKENS", 1)
    monkeypatch.setattr(senders, "MAX_MESSAGES", 4)
    monkeypatch.setattr(dispatch, "TURNS_FROM", 1)
    monkeypatch.setattr(senders, "DEALT_FROM", 1)
    monkeypatch.setattr(senders, "DEALT", 1)
    for kernels in compiled:
        kernels.cache_clear()
    yield
    for kernels in compiled:
        kernels.cache_clear()


@pytest.mark.by_day(3)
@pytest.mark.parametrize(
    "name", ["plain", "empty rank, three ranks", "nobody has a token", "shared expert", "top 32"]
)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_rounds_are_exact(name, fused, many):
    case = CASES[name]
    world = KernelWorld(
        EPConfig(**case["cfg"]),
        fused=fused,
        launch=LaunchConfig(n_sms=3, num_threads=64),
        seed=1,
        racecheck=True,
        stale=True,
    )
    rng = np.random.default_rng(8)
    for _ in range(2):
        run_round(world, case, rng)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize(
    "n_sms, num_threads",
    [
        pytest.param(3, 32, id="fewer threads than experts"),
        pytest.param(6, 96, id="beside few tokens"),
    ],
)
def test_other_ways_are_right_beside_it(fused, n_sms, num_threads, many):
    cfg = EPConfig(n_ranks=2, n_experts=68, top_k=4, hidden=40, max_tokens_per_rank=10)
    launch = LaunchConfig(n_sms=n_sms, num_threads=num_threads)
    world = KernelWorld(cfg, fused=fused, launch=launch, seed=2, racecheck=True)
    for tokens in ([10, 3], [2, 9]):
        run_round(world, dict(tokens=tokens), np.random.default_rng(5))


def test_a_carrier_has_a_list_of_its_tokens_messages(many):
    case = dict(
        cfg=dict(n_ranks=2, n_experts=8, top_k=5, hidden=16, max_tokens_per_rank=10), tokens=[9, 10]
    )
    cfg = EPConfig(**case["cfg"])
    world = KernelWorld(cfg, fused=True, launch=LaunchConfig(n_sms=3, num_threads=64), seed=4)
    rng = np.random.default_rng(2)
    ids = case_routing(case, cfg, rng)
    sizes, n_lists = layout.message(cfg), 0
    for rank, d in enumerate(world.dispatch([rows_of(rng, len(i), cfg) for i in ids], ids)):
        check_dispatch(cfg, rank, ids, d)
        recv_buf = world.read(rank, "dispatch_recv_buf")
        rows = recv_buf.reshape(-1, sizes.msg_bytes)
        for local_expert, source in np.ndindex(d["counts"].shape):
            for held in recv_buf[local_expert, source, : d["counts"][local_expert, source]]:
                token, reference = held[sizes.src_info_offset :].view(np.uint32)[:2]
                if reference < rows_of_token.LISTED:
                    continue
                n_lists += 1
                listed = rows[reference - rows_of_token.LISTED - 1].view(np.uint32)[: cfg.top_k]
                for expert, row in zip(ids[source][token], listed):
                    is_here = expert >= 0 and expert // cfg.n_local_experts == rank
                    assert (row != 0) == is_here
                    if is_here:
                        at = np.unravel_index(row - 1, recv_buf.shape[:3])
                        assert at[:2] == (expert % cfg.n_local_experts, source)
                        assert rows[row - 1, sizes.src_info_offset :].view(np.int32)[0] == token
    assert n_lists > 5
