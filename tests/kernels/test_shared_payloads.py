"""The fast kernels send a token's payload to a rank once: what lies in recv_buf."""

import ml_dtypes
import numpy as np
import pytest
from kernel_world import FastWorld
from rounds import normal, routing

from epmoe import layout
from epmoe_ref.config import EPConfig


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_what_lies_in_recv_buf(fused):
    """One payload a (token, rank), in the message to the lowest expert there; the others say where."""
    cfg = EPConfig(n_ranks=2, n_experts=8, top_k=5, hidden=16, max_tokens_per_rank=10)
    world, rng = FastWorld(cfg, fused=fused, seed=4), np.random.default_rng(2)
    ids = routing(cfg, rng, [9, 10])  # not few
    tokens = [normal(rng, len(i), cfg.hidden) for i in ids]
    sizes = layout.message(cfg)
    for rank, d in enumerate(world.dispatch(tokens, ids)):
        recv_buf = world.read(rank, "dispatch_recv_buf")
        rows = recv_buf.reshape(-1, sizes.msg_bytes)
        n_own = n_references = 0
        for local_expert, source in np.ndindex(d.recv_count.shape):
            for held in recv_buf[local_expert, source, : d.recv_count[local_expert, source]]:
                token, reference, *rest = held[sizes.src_info_offset : sizes.topk_info_offset].view(np.int32)
                assert rest == [0, 0]
                chosen, n = ids[source][token], cfg.n_local_experts
                wants = [e % n for e in chosen if e >= 0 and e // n == rank]
                topk_info = held[sizes.topk_info_offset :].view(np.uint16)[: cfg.top_k]
                assert (topk_info == chosen.astype(np.uint16)).all()
                payload = held[: sizes.token_size]
                if reference:
                    n_references += 1
                    assert (payload == 0xFF).all(), "a payload that nobody reads was sent"
                    carrier = np.unravel_index(reference - 1, recv_buf.shape[:3])
                    assert carrier[0] == min(wants) and carrier[1] == source
                    assert rows[reference - 1, sizes.src_info_offset :].view(np.int32)[:2].tolist() == [token, 0]
                    payload = rows[reference - 1, : sizes.token_size]
                else:
                    n_own += 1
                    assert local_expert == min(wants)
                assert (payload.view(ml_dtypes.bfloat16) == tokens[source][token]).all()
        assert n_references > 0 and n_own > 0
