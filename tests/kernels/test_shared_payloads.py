"""A token's payload goes once to a rank, or once with each message: the same results, and what lies in recv_buf."""

import ml_dtypes
import numpy as np
import pytest
from epmoe import LocalWorld, layout, routing
from epmoe.kernels import LaunchConfig, dispatch_async_kernel, dispatch_kernel
from epmoe.verify.checked_rounds import Case, rounds_of
from epmoe_ref.config import TOKEN_FORMATS, EPConfig
from epmoe_ref.errors import EPValueError
from kernel_world import KernelWorld
from protocol_model import check_dispatch
from test_dispatch_combine_rounds import CASES, routing as case_routing, rows_of, run_round

OPTIONS = {
    "": {},
    "shared expert": dict(fused_shared_expert=True),
    "skip_a2a": dict(skip_a2a=True),
    "skip_a2a, shared expert": dict(skip_a2a=True, fused_shared_expert=True, allreduce_world_size=2),
}
CONFIGURATIONS = [(f, o) for f in TOKEN_FORMATS for o in OPTIONS if f == "bf16" or o.endswith("shared expert")]


def launch(shares):
    return LaunchConfig(n_sms=3, num_threads=64, shared_payloads=shares)


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("token_format, options", CONFIGURATIONS)
def test_both_agree_with_the_reference(token_format, options, shares):
    cfg = EPConfig(n_ranks=2, n_experts=6, top_k=4, hidden=128, max_tokens_per_rank=3, token_format=token_format,
                   **OPTIONS[options])
    rounds = rounds_of(Case(cfg, fused=True), LocalWorld(2, seed=5), [routing.make(cfg, 8)],
                       launch=launch(shares))
    for r in rounds:
        assert not r.differences, r.differences[0]


@pytest.mark.parametrize("name", ["plain", "empty rank, three ranks", "many experts, wide rows", "top 32"])
@pytest.mark.parametrize("fused, shares", [(True, False), (False, True)], ids=["fused plain", "split shared"])
def test_forced_either_way(name, fused, shares):
    world = KernelWorld(EPConfig(**CASES[name]["cfg"]), fused=fused, launch=launch(shares), seed=2, racecheck=True)
    rng = np.random.default_rng(8)
    for _ in range(2):
        run_round(world, CASES[name], rng)


def test_a_signal_covers_the_payloads_of_other_experts():
    """All tokens want all experts: half of the receivers' rows are copies of payloads under another signal."""
    cfg = EPConfig(n_ranks=2, n_experts=6, top_k=6, hidden=16, max_tokens_per_rank=4)
    for seed in range(2):
        world = KernelWorld(cfg, fused=True, launch=launch(None), seed=seed, racecheck=True, stale=seed > 0)
        for tokens in ([4, 4], [4, 1]):
            run_round(world, dict(tokens=tokens), np.random.default_rng(seed))


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("shares", [None, True, False])
def test_what_lies_in_recv_buf(fused, shares):
    """One payload a (token, rank), in the message to the lowest expert there; the others say where. Or in each one."""
    case = dict(cfg=dict(n_ranks=2, n_experts=8, top_k=5, hidden=16, max_tokens_per_rank=10), tokens=[9, 10])  # not few
    cfg = EPConfig(**case["cfg"])
    world = KernelWorld(cfg, fused=fused, launch=launch(shares), seed=4)
    rng = np.random.default_rng(2)
    ids = case_routing(case, cfg, rng)
    tokens = [rows_of(rng, len(i), cfg) for i in ids]
    expects_shared = shares is not False
    sizes = layout.message(cfg)
    for rank, d in enumerate(world.dispatch(tokens, ids)):
        check_dispatch(cfg, rank, ids, d)
        recv_buf = world.read(rank, "dispatch_recv_buf")
        rows = recv_buf.reshape(-1, sizes.msg_bytes)
        n_own = n_references = 0
        for local_expert, source in np.ndindex(d["counts"].shape):
            for held in recv_buf[local_expert, source, :d["counts"][local_expert, source]]:
                token, reference, *rest = held[sizes.src_info_offset:sizes.topk_info_offset].view(np.int32)
                assert rest == [0, 0]
                chosen, n = ids[source][token], cfg.n_local_experts
                wants = [e % n for e in chosen if e >= 0 and e // n == rank]
                topk_info = held[sizes.topk_info_offset:].view(np.uint16)[:cfg.top_k]
                assert (topk_info == chosen.astype(np.uint16)).all()
                payload = held[:sizes.token_size]
                if reference:
                    n_references += 1
                    assert (payload == 0xFF).all(), "a payload that nobody reads was sent"
                    carrier = np.unravel_index(reference - 1, recv_buf.shape[:3])
                    assert carrier[0] == min(wants) and carrier[1] == source
                    assert rows[reference - 1, sizes.src_info_offset:].view(np.int32)[:2].tolist() == [token, 0]
                    payload = rows[reference - 1, :sizes.token_size]
                else:
                    n_own += 1
                    assert local_expert == min(wants) or not expects_shared
                assert (payload.view(ml_dtypes.bfloat16) == tokens[source][token]).all()
        assert (n_references > 0) == expects_shared and n_own > 0


def test_messages_to_other_p2p_worlds_carry_their_payloads():
    cfg = EPConfig(n_ranks=4, n_experts=4, top_k=2, hidden=16, max_tokens_per_rank=2, p2p_world_size=2, use_shmem=True)
    for factory in (dispatch_kernel, dispatch_async_kernel):
        with pytest.raises(EPValueError, match="shared_payloads=True: messages to other p2p worlds"):
            factory(cfg, launch(True))
