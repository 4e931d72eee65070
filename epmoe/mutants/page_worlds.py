"""Worlds that call the pairs kernels directly: rounds without a reset, all in flight at once."""

from epmoe.mutants.world_kinds import World

PLAIN = dict(n_ranks=2, n_experts=4, top_k=2, hidden=16, max_tokens_per_rank=5)
THREE = dict(n_ranks=3, n_experts=9, top_k=3, hidden=8, max_tokens_per_rank=4)
SHARED = dict(
    n_ranks=2, n_experts=6, top_k=2, hidden=64, max_tokens_per_rank=6, fused_shared_expert=True
)
PIECES = dict(n_ranks=2, n_experts=4, top_k=1, hidden=512, max_tokens_per_rank=3)
WINDOWS = dict(
    tuning=dict(counted_experts=3, counts=5, returned_segments=4, batch_messages=6, flags=5),
    constants={"pairs.await_rows.POLLS_PER_LOOK": 1},
)
FAR = dict(
    n_ranks=2,
    n_experts=4,
    top_k=3,
    hidden=16,
    max_tokens_per_rank=5,
    p2p_world_size=1,
    use_shmem=True,
)
FAR_AND_NEAR = FAR | dict(n_ranks=4, n_experts=8, p2p_world_size=2)
ROUNDS = ((5, 3), (0, 5), (4, 4))
TURNS = dict(turns_from=1, batch_messages=4, few_tokens=0)
LAMPORT = dict(without_signals=True)
SIX = ((1, 2), (0, 1), (2, 0), (0, 0), (3, 1), (1, 2))

PAGE_WORLDS = (
    World("split", PLAIN, ROUNDS, swiglu=True),
    World("fused", PLAIN, ROUNDS, fused=True),
    World("three ranks, split", THREE, ((4, 0, 3), (2, 4, 1)), shape=(4, 32)),
    World("three ranks, fused", THREE, ((4, 0, 3), (2, 4, 1)), fused=True, shape=(4, 32)),
    World("unreduced", PLAIN, ((5, 3), (2, 5)), fused=True, unreduced=True),
    World("nvfp4, shared expert, split", SHARED | dict(token_format="nvfp4"), ((6, 3), (1, 5))),
    World(
        "nvfp4, shared expert, fused",
        SHARED | dict(token_format="nvfp4"),
        ((6, 3), (1, 5)),
        fused=True,
    ),
    World(
        "shared expert of tokens that go elsewhere",  # encoding takes longer than the work before its wait
        SHARED | dict(token_format="nvfp4", hidden=1024, n_experts=2, top_k=1),
        ((6, 6),),
        fused=True,
        elsewhere=True,
        shape=(4, 32),
    ),
    World("shared expert", SHARED | dict(hidden=16), ((6, 3), (1, 5)), fused=True, swiglu=True),
    World(
        "fp8, skip_a2a, shared expert",
        SHARED
        | dict(
            hidden=128,
            token_format="fp8_blockwise",
            skip_a2a=True,
            p2p_world_size=1,
            allreduce_world_size=2,
        ),
        ((6, 6), (5, 5)),
        fused=True,
    ),
    World(
        "skip_a2a, shared expert, three uneven shares",
        SHARED
        | dict(
            n_ranks=3, top_k=1, hidden=8, skip_a2a=True, p2p_world_size=1, allreduce_world_size=3
        ),
        ((4, 4, 4), (5, 5, 5)),
        fused=True,
    ),
    World("skip_a2a in one p2p world", PLAIN | dict(skip_a2a=True), ((5, 5), (4, 4)), fused=True),
    World("idle blocks", PLAIN, ((1, 0), (0, 1)), fused=True, shape=(8, 32)),
    World("mxfp4_rows", PLAIN | dict(hidden=64, token_format="mxfp4_rows"), ((5, 3),)),
    World("wide rows", PLAIN | dict(hidden=256), ((5, 3),), swiglu=True),
    World(
        "windows, split",
        dict(
            n_ranks=2,
            n_experts=14,
            top_k=3,
            hidden=64,
            max_tokens_per_rank=7,
            token_format="nvfp4",
            alignment=64,
        ),
        ((7, 5), (2, 7)),
        **WINDOWS,
    ),
    World(
        "windows, fused",
        dict(n_ranks=2, n_experts=14, top_k=3, hidden=16, max_tokens_per_rank=7),
        ((7, 5), (2, 7)),
        fused=True,
        **WINDOWS,
    ),
    World(
        "announced when some are written",
        dict(n_ranks=2, n_experts=2, top_k=1, hidden=16, max_tokens_per_rank=9),
        ((9, 8),),
        fused=True,
        shape=(8, 32),
        tuning=dict(counted_experts=1, batch_messages=1, few_tokens=0),
    ),
    World("few tokens", PLAIN | dict(hidden=64), ROUNDS, fused=True, shape=(5, 64)),
    World(
        "few tokens of fp8",
        PIECES | dict(token_format="fp8_blockwise", top_k=2),
        ((2, 3), (3, 1)),
        fused=True,
        shape=(4, 128),
    ),
    World(
        "few tokens, shared expert",
        PLAIN | dict(hidden=64, fused_shared_expert=True),
        ROUNDS,
        fused=True,
        shape=(5, 64),
    ),
    World(
        "few tokens, windows of counts",
        dict(n_ranks=2, n_experts=10, top_k=3, hidden=16, max_tokens_per_rank=3),
        ((2, 3), (3, 1)),
        fused=True,
        shape=(4, 64),
        tuning=dict(counts=4),
    ),
    World(
        "few tokens and one more",
        PLAIN | dict(max_tokens_per_rank=9),
        ((8, 9), (9, 8), (3, 2)),
        fused=True,
        shape=(6, 32),
    ),
    World(
        "few tokens, a block for several ranks",
        dict(n_ranks=3, n_experts=6, top_k=2, hidden=40, max_tokens_per_rank=6),
        ((3, 6, 1), (0, 2, 5)),
        fused=True,
        shape=(2, 64),
        tuning=dict(few_blocks_a_rank=0),
    ),
    World(
        "few tokens, a block for several ranks of many experts",
        dict(n_ranks=3, n_experts=102, top_k=2, hidden=8, max_tokens_per_rank=3),
        ((3, 2, 1),),
        fused=True,
        shape=(2, 64),
        tuning=dict(few_blocks_a_rank=0),
    ),
    World(
        "few tokens, more words than are remembered",
        dict(n_ranks=2, n_experts=6, top_k=3, hidden=16, max_tokens_per_rank=3),
        ((2, 3), (3, 1)),
        fused=True,
        shape=(6, 64),
        tuning=dict(known_words=4),
    ),
    World(
        "seventeen slots, 33 segments",
        dict(n_ranks=3, n_experts=33, top_k=17, hidden=8, max_tokens_per_rank=5),
        ((5, 0, 1),),
        fused=True,
        shape=(2, 32),
        tuning=dict(few_tokens=0),
    ),
    World(
        "more experts than lanes",
        dict(n_ranks=2, n_experts=36, top_k=2, hidden=8, max_tokens_per_rank=3),
        ((3, 2), (2, 3)),
        fused=True,
        shape=(3, 32),
    ),
    World(
        "signals watched by two warps",
        dict(n_ranks=2, n_experts=66, top_k=2, hidden=8, max_tokens_per_rank=2),
        ((2, 1),),
        fused=True,
        shape=(2, 256),
    ),
    World(
        "ten slots",
        dict(n_ranks=2, n_experts=12, top_k=10, hidden=8, max_tokens_per_rank=2),
        ((2, 1),),
        fused=True,
    ),
    World("rows in pieces, split", PIECES, ((2, 3), (3, 1)), shape=(3, 128)),
    World(
        "rows in pieces, fused",
        PIECES | dict(token_format="fp8_blockwise", fused_shared_expert=True),
        ((2, 3), (3, 1)),
        fused=True,
        shape=(4, 128),
    ),
    World(
        "rows in pieces, uneven shares",
        PIECES | dict(hidden=1024, max_tokens_per_rank=5),
        ((5, 4), (4, 5)),
        shape=(3, 128),
    ),
    World(
        "two rows of three steps, two warps a row",
        PIECES | dict(hidden=1152, token_format="fp8_blockwise", max_tokens_per_rank=4),
        ((4, 1),),
        shape=(2, 192),
    ),
    World(
        "all rows at once", PLAIN | dict(n_experts=6), ((5, 4), (4, 5)), fused=True, shape=(3, 224)
    ),
    World(
        "tiles of rows",
        PLAIN | dict(hidden=8, max_tokens_per_rank=17),
        ((17, 12),),
        fused=True,
        shape=(4, 32),
    ),
    World("bad ids", PLAIN, ((5, 5),), bad_ids=True),
    World("absent peer, split", PLAIN, ((5, 3), (5, 3)), absent=(1,)),
    World("absent peer, fused", PLAIN, ((5, 3), (5, 3)), fused=True, absent=(1,)),
    World(
        "absent peer, few tokens", PLAIN, ((5, 3), (5, 3)), fused=True, shape=(6, 32), absent=(1,)
    ),
    World("stuck sender", PLAIN, ((5, 3),), fused=True, stuck="dispatch"),
    World(
        "stuck return", PLAIN, ((5, 3),), fused=True, shape=(12, 32), stuck="combine"
    ),  # a row a block
    World("p2p worlds, split", FAR | dict(hidden=520), ((5, 3), (2, 5)), shape=(3, 32)),
    World(
        "p2p worlds, fused", FAR_AND_NEAR, ((5, 3, 0, 2), (2, 5, 4, 1)), fused=True, shape=(3, 32)
    ),
    World("p2p worlds, nvfp4", FAR | dict(token_format="nvfp4", hidden=64), ((5, 3), (2, 5))),
    World("six rounds, a late rank, split", PLAIN, SIX, slow=(0,)),
    World("six rounds, a late rank, fused", PLAIN, SIX, fused=True, shape=(4, 64), slow=(1,)),
    World("few tokens, six rounds, a late rank", PLAIN, SIX, fused=True, shape=(5, 64), slow=(1,)),
    World(
        "eight ranks",
        dict(n_ranks=8, n_experts=16, top_k=3, hidden=8, max_tokens_per_rank=3),
        ((1, 0, 3, 2, 0, 1, 0, 2), (0, 1, 2, 0, 0, 3, 1, 1)),
        fused=True,
        shape=(4, 32),
        tuning=dict(few_tokens=0),
    ),
    World(
        "unreduced, wide rows",
        PLAIN | dict(hidden=520),
        ((5, 3), (2, 5)),
        fused=True,
        unreduced=True,
    ),
    World(
        "few tokens, late experts",
        dict(n_ranks=2, n_experts=72, top_k=3, hidden=8, max_tokens_per_rank=3),
        ((3, 2), (2, 3)),
        fused=True,
        shape=(6, 64),
        from_expert=30,
    ),
    World("few tokens, split", PLAIN | dict(hidden=64), ROUNDS, shape=(5, 64)),
    World("few tokens, six rounds, a late rank, split", PLAIN, SIX, shape=(4, 64), slow=(1,)),
    World("few tokens, absent peer, split", PLAIN, ((5, 3), (5, 3)), shape=(4, 32), absent=(1,)),
    World("all blocks send, then receive", PLAIN, ROUNDS, fused=True, tuning=TURNS),
    World(
        "all blocks send, then receive, absent peer",
        PLAIN,
        ((5, 3), (5, 3)),
        fused=True,
        tuning=TURNS,
        absent=(1,),
    ),
    World("without signals", PLAIN, ROUNDS, fused=True, **LAMPORT),
    World(
        "without signals, three ranks, padded rows",
        THREE | dict(hidden=128, token_format="fp8_blockwise"),
        ((4, 0, 3), (2, 4, 1)),
        fused=True,
        shape=(4, 32),
        **LAMPORT,
    ),
    World(
        "without signals, six rounds, a late rank",
        PLAIN,
        SIX,
        fused=True,
        shape=(4, 64),
        slow=(1,),
        **LAMPORT,
    ),
    World(
        "without signals, few tokens, a late rank",
        PLAIN | dict(hidden=64),
        SIX,
        fused=True,
        shape=(5, 64),
        slow=(0,),
        **LAMPORT,
    ),
    World(
        "without signals, ten slots",
        dict(n_ranks=2, n_experts=12, top_k=10, hidden=8, max_tokens_per_rank=2),
        ((2, 1), (1, 2)),
        fused=True,
        **LAMPORT,
    ),
    World(
        "without signals, wide rows in pieces",
        PIECES | dict(hidden=1024, max_tokens_per_rank=5),
        ((5, 4), (4, 5)),
        fused=True,
        shape=(3, 128),
        **LAMPORT,
    ),
    World(
        "without signals, shared expert",
        SHARED | dict(hidden=16),
        ((6, 3), (1, 5)),
        fused=True,
        **LAMPORT,
    ),
    World(
        "without signals, stuck sender", PLAIN, ((5, 3),), fused=True, stuck="dispatch", **LAMPORT
    ),
)
