"""Worlds of ExpertParallel and of the SwiGLU kernel: edge values of formats, dtypes, options, widths."""

from epmoe.mutants.page_worlds import PIECES, PLAIN, SHARED
from epmoe.mutants.world_kinds import PublicWorld, SwigluWorld

EDGES = dict(n_ranks=2, n_experts=4, top_k=2, hidden=256, max_tokens_per_rank=8)
ONE = dict(n_ranks=2, n_experts=4, top_k=1)

PUBLIC_WORLDS = (
    PublicWorld("32 slots of few tokens", dict(n_ranks=2, n_experts=34, top_k=32, hidden=8, max_tokens_per_rank=2),
                ((2, 1),), shape=(6, 64)),
    PublicWorld("32 slots", dict(n_ranks=2, n_experts=34, top_k=32, hidden=8, max_tokens_per_rank=3), ((3, 1),)),
    PublicWorld("rows in pieces, fp32", PIECES | dict(combine_dtype="fp32", top_k=3), ((3, 2),), shape=(3, 128)),
    PublicWorld("skip_a2a, unreduced fp16", PLAIN | dict(skip_a2a=True, combine_dtype="fp16"), ((4, 4),),
                weights="none", fused=False),
    PublicWorld("shared expert of fp32 by functions", SHARED | dict(combine_dtype="fp32", token_format="mxfp4_rows"),
                ((6, 2),), weights="array", epilogue=True),
    SwigluWorld("swiglu"),
    SwigluWorld("swiglu, clamped, shared expert", limit=7.0, shared=True, width=264),
    SwigluWorld("swiglu to fp8", fp8=True, width=640),
    SwigluWorld("swiglu to fp8, clamped", fp8=True, width=128, limit=7.0),
    PublicWorld("fp32 by functions", PLAIN | dict(combine_dtype="fp32"), ((5, 3),), weights="function", epilogue=True,
                fused=False),
    PublicWorld("fp16 and an epilogue", PLAIN | dict(combine_dtype="fp16", top_k=4), ((5, 3),), epilogue=True),
    PublicWorld("unreduced fp32", PLAIN | dict(combine_dtype="fp32", hidden=40), ((5, 3),), weights="none"),
    PublicWorld("fp8_blockwise at edges", EDGES | dict(token_format="fp8_blockwise"), ((8, 5),), edges=True),
    PublicWorld("nvfp4 at edges, scaled", EDGES | dict(token_format="nvfp4", hidden=192), ((8, 5),), edges=True,
                scaled=True, fused=False),
    PublicWorld("mxfp4 at edges", EDGES | dict(token_format="mxfp4"), ((8, 5),), edges=True),
    PublicWorld("mxfp8 at edges", EDGES | dict(token_format="mxfp8"), ((8, 5),), edges=True),
    PublicWorld("mxfp4_rows at edges", EDGES | dict(token_format="mxfp4_rows", hidden=160), ((8, 5),), edges=True),
    PublicWorld("scales in slots of many rows",
                ONE | dict(token_format="mxfp4_rows", fuse_a_scale_preshuffle=True, hidden=256, max_tokens_per_rank=20),
                ((20, 16),), to_one=True),
    PublicWorld("tiles filled to each quarter", ONE | dict(token_format="nvfp4", hidden=64, max_tokens_per_rank=64),
                ((60, 38), (40, 26), (20, 14)), to_one=True, fused=False),
    PublicWorld("more tokens than lanes, one slot", ONE | dict(n_experts=6, hidden=8, max_tokens_per_rank=40),
                ((40, 33),), shape=(3, 32)),
    PublicWorld("eight tokens to one expert", ONE | dict(hidden=8, max_tokens_per_rank=8), ((8, 8),), to_one=True,
                shape=(4, 64)),
    PublicWorld("very wide rows", ONE | dict(hidden=3592, max_tokens_per_rank=3), ((3, 2),), shape=(2, 32),
                fused=False),
    PublicWorld("rows in pieces, few tokens", PIECES | dict(top_k=2), ((2, 3), (3, 1)), shape=(4, 128)),
    PublicWorld("three runs in two pieces, few tokens", PIECES | dict(hidden=768, top_k=2), ((1, 0), (1, 1)),
                shape=(4, 64)),
    PublicWorld("five runs in three pieces", PIECES | dict(hidden=1288), ((2, 1), (1, 1)), shape=(3, 96), fused=False),
    PublicWorld("five runs in three pieces of fp8", PIECES | dict(hidden=2432, token_format="fp8_blockwise"),
                ((2, 1), (1, 1)), shape=(4, 96)),
    PublicWorld("with stamps, fused", PLAIN, ((5, 3),), trace=True),
    PublicWorld("with stamps, split", PLAIN, ((5, 3),), trace=True, fused=False),
    PublicWorld("nothing for some ranks, split", PLAIN, ((0, 0), (1, 0), (0, 0), (5, 0)), fused=False, shape=(5, 32)),
)
