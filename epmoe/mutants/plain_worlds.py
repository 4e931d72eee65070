"""Worlds of the plain kernels: rounds without a reset, all in flight at once."""

from epmoe.mutants.page_worlds import FAR, FAR_AND_NEAR, PLAIN, ROUNDS, SHARED, SIX, THREE
from epmoe.mutants.world_kinds import PlainWorld

TILES = {"plain.receive.TILE_ROWS": 3}
LOOKS = {"plain.waits.POLLS_PER_LOOK": 1}

PLAIN_WORLDS = (
    PlainWorld("plain, split", PLAIN, ROUNDS),
    PlainWorld("plain, fused", PLAIN, ROUNDS, fused=True),
    PlainWorld("plain, three ranks, split", THREE, ((4, 0, 3), (2, 4, 1)), shape=(4, 32), constants=TILES),
    PlainWorld("plain, three ranks, fused", THREE, ((4, 0, 3), (2, 4, 1)), fused=True, shape=(4, 32)),
    PlainWorld("plain, unreduced", PLAIN, ((5, 3), (2, 5)), fused=True, unreduced=True),
    PlainWorld("plain, tiles of three rows", PLAIN | dict(n_experts=2, top_k=1), ((5, 5), (5, 4)), fused=True,
               shape=(3, 32), constants=TILES),
    PlainWorld("plain, nvfp4, shared expert, split", SHARED | dict(token_format="nvfp4"), ((6, 3), (1, 5))),
    PlainWorld("plain, nvfp4, shared expert, fused", SHARED | dict(token_format="nvfp4"), ((6, 3), (1, 5)), fused=True),
    PlainWorld("plain, shared expert of tokens that go elsewhere",
               SHARED | dict(token_format="nvfp4", hidden=512, n_experts=2, top_k=1), ((6, 6),), fused=True,
               elsewhere=True, shape=(4, 32)),
    PlainWorld("plain, shared expert and no routed rows", SHARED | dict(n_experts=2, top_k=1, hidden=64),
               ((6, 0), (0, 5)), fused=True, elsewhere=True, shape=(3, 96)),
    PlainWorld("plain, fp8, shared expert", SHARED | dict(hidden=128, token_format="fp8_blockwise"), ((6, 3), (1, 5)),
               fused=True),
    PlainWorld("plain, skip_a2a, shared expert", SHARED | dict(hidden=16, skip_a2a=True, p2p_world_size=1),
               ((6, 6), (5, 5)), fused=True),
    PlainWorld("plain, skip_a2a, split", PLAIN | dict(skip_a2a=True, p2p_world_size=1), ((5, 5), (4, 4))),
    PlainWorld("plain, idle blocks", PLAIN, ((1, 0), (0, 1)), fused=True, shape=(8, 32)),
    PlainWorld("plain, one block", PLAIN, ((5, 3),), fused=True, shape=(1, 64)),
    PlainWorld("plain, more experts than lanes",
               dict(n_ranks=2, n_experts=72, top_k=2, hidden=8, max_tokens_per_rank=3), ((3, 2), (2, 3)), fused=True,
               shape=(3, 32)),
    PlainWorld("plain, more groups than warps",
               dict(n_ranks=2, n_experts=16, top_k=3, hidden=64, token_format="nvfp4", max_tokens_per_rank=4,
                    alignment=64),
               ((3, 4),), shape=(2, 32)),
    PlainWorld("plain, fp32 tokens", PLAIN, ((5, 3),), fused=True, input_type="fp32"),
    PlainWorld("plain, fp16 tokens", PLAIN | dict(alignment=64), ((5, 3),), input_type="fp16"),
    PlainWorld("plain, functions", PLAIN, ((5, 3),), fused=True, weights="function", epilogue="value"),
    PlainWorld("plain, an output lambda", PLAIN, ((5, 3), (2, 4)), epilogue="stores"),
    PlainWorld("plain, bad ids", PLAIN, ((5, 5),), bad_ids=True),
    PlainWorld("plain, absent peer, split", PLAIN, ((5, 3), (5, 3)), absent=(1,), constants=LOOKS),
    PlainWorld("plain, absent peer, fused", PLAIN, ((5, 3), (5, 3)), fused=True, absent=(1,), constants=LOOKS),
    PlainWorld("plain, stuck sender", PLAIN, ((5, 3),), fused=True, stuck="dispatch", constants=LOOKS),
    PlainWorld("plain, p2p worlds, split", FAR | dict(hidden=520), ((5, 3), (2, 5)), shape=(3, 32)),
    PlainWorld("plain, p2p worlds, fused", FAR_AND_NEAR, ((5, 3, 0, 2), (2, 5, 4, 1)), fused=True, shape=(3, 32)),
    PlainWorld("plain, six rounds, a late rank, split", PLAIN, SIX, slow=(0,)),
    PlainWorld("plain, six rounds, a late rank, fused", PLAIN, SIX, fused=True, shape=(4, 64), slow=(1,)),
)
