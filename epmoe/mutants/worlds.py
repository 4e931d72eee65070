"""The small worlds in which mutants are hunted: each makes lines of the kernels run that the others leave out.

All are tiny, and uneven: a rank with fewer tokens, an expert without any, -1 slots, more rows than warps, several
rounds without a reset, all of them in flight at once, so that one rank may be a round ahead of another.
"""

from dataclasses import dataclass, field

from epmoe_ref.config import EPConfig


@dataclass(frozen=True, eq=False)
class World:
    """One world.

    tokens: for each round, the tokens of each rank. shape: blocks, threads. constants: of the kernel package, made
    small ({"signaller.WINDOW": 3}). few: tokens go the way of few_tokens.py, without `reserved` and send_buf.
    unreduced: combine without router weights. swiglu: its kernel runs too. bad_ids: ids out of range and repeated ones
    in device memory. absent: ranks that never launch anything, so that the others' waits must expire. stuck: before
    this half of the first round ("dispatch", "combine") a word of `finished` is spoilt on rank 0, so that rank 1 waits
    for its signal in vain (expired.py). slow: ranks that are far slower than the others. from_expert:
    a rank's experts below it get nothing.
    """

    name: str
    sizes: dict
    tokens: tuple
    fused: bool = False
    shape: tuple = (3, 64)
    constants: dict = field(default_factory=dict)
    few: bool = False
    unreduced: bool = False
    swiglu: bool = False
    bad_ids: bool = False
    elsewhere: bool = False
    absent: tuple = ()
    stuck: str = ""
    slow: tuple = ()
    from_expert: int = 0

    @property
    def fails(self):
        """Whether waits are to expire in this world."""
        return bool(self.absent or self.stuck)

    @property
    def cfg(self):
        """The EPConfig."""
        return EPConfig(**self.sizes)


@dataclass(frozen=True, eq=False)
class RowsWorld:
    """One world of the rows kernels (rows_run.py).

    kind: "rows" (FusedDispatch, FusedCombine), "hybrid" (HybridEP). tokens: of each rank. limit: rows of a rank in
    HybridEP; pad: to which each expert's are rounded up; fp8: they travel as blockwise FP8. local: experts of a rank.
    combines: further ones in a row, and cached dispatches. on_device: further dispatches, counted on the device, in
    flight too. slow: ranks that are far slower than the others. full_heap: ranks that have no memory left for results.
    asks: as where ranks are processes, nobody knows before the first call how much room the others' tokens take.
    bad_ids: ids of rows that are no expert's, and repeated ones, as only device memory may hold them. absent: as in
    World. pairs: tokens are pairs of e4m3 values and scales. dtype: of what is summed first. from_expert: a rank's
    experts below it get nothing. trace: with stamps. stale: strong loads give older values, as long as they may. brief:
    a call of each kind, and no more. between: combines, and dispatches of few tokens between them.
    """

    name: str
    kind: str
    tokens: tuple = (5, 3)
    hidden: int = 16
    shape: tuple = (3, 64)
    limit: int = 0
    pad: int = 0
    fp8: bool = False
    top_k: int = 2
    local: int = 2
    p2p_world_size: int | None = None
    combines: int = 0
    on_device: bool = False
    slow: tuple = ()
    constants: dict = field(default_factory=dict)
    full_heap: tuple = ()
    asks: bool = False
    bad_ids: bool = False
    absent: tuple = ()
    pairs: bool = False
    dtype: str = "bfloat16"
    from_expert: int = 0
    id_dtype: str = "int64"
    trace: bool = False
    stale: bool = False
    brief: bool = False
    between: bool = False

    @property
    def n_ranks(self):
        """Ranks."""
        return len(self.tokens)

    @property
    def n_experts(self):
        """Experts of all ranks."""
        return self.local * self.n_ranks


@dataclass(frozen=True, eq=False)
class PublicWorld:
    """One world of ExpertParallel (public_run.py): what other worlds leave at its default.

    tokens, shape, fused: as in World. launch: further options of LaunchConfig. weights: "array", "function" or "none";
    epilogue: with one. edges: tokens at which number formats differ. scaled: with an input scale. to_one: every token
    goes to the last expert alone.
    """

    name: str
    sizes: dict
    tokens: tuple
    fused: bool = True
    shape: tuple = (3, 64)
    launch: dict = field(default_factory=dict)
    weights: str = "array"
    epilogue: bool = False
    edges: bool = False
    scaled: bool = False
    to_one: bool = False
    constants: dict = field(default_factory=dict)

    @property
    def cfg(self):
        """The EPConfig."""
        return EPConfig(**self.sizes)


@dataclass(frozen=True, eq=False)
class SwigluWorld:
    """One world of the SwiGLU kernel (swiglu_run.py). groups: rows of each. limit: of the clamped variant."""

    name: str
    groups: tuple = (4, 0, 5)
    width: int = 40
    fp8: bool = False
    limit: float | None = None
    shared: bool = False
    shape: tuple = (2, 64)
    constants: dict = field(default_factory=dict)


PLAIN = dict(n_ranks=2, n_experts=4, top_k=2, hidden=16, max_tokens_per_rank=5)
THREE = dict(n_ranks=3, n_experts=9, top_k=3, hidden=8, max_tokens_per_rank=4)
SHARED = dict(n_ranks=2, n_experts=6, top_k=2, hidden=64, max_tokens_per_rank=6, fused_shared_expert=True)
PIECES = dict(n_ranks=2, n_experts=4, top_k=1, hidden=512, max_tokens_per_rank=3)
WINDOWS = {"signaller.WINDOW": 3, "offsets.MAX_COUNTS": 5, "returners.WINDOW": 4, "senders.MAX_MESSAGES": 6,
           "watchers.MAX_FLAGS": 5, "watchers.POLLS_PER_LOOK": 1}
EDGES = dict(n_ranks=2, n_experts=4, top_k=2, hidden=256, max_tokens_per_rank=8)
ONE = dict(n_ranks=2, n_experts=4, top_k=1)
FAR = dict(n_ranks=2, n_experts=4, top_k=3, hidden=16, max_tokens_per_rank=5, p2p_world_size=1, use_shmem=True)
FAR_AND_NEAR = FAR | dict(n_ranks=4, n_experts=8, p2p_world_size=2)
ROUNDS = ((5, 3), (0, 5), (4, 4))
SIX = ((1, 2), (0, 1), (2, 0), (0, 0), (3, 1), (1, 2))

WORLDS = {w.name: w for w in (
    World("split", PLAIN, ROUNDS, swiglu=True),
    World("fused", PLAIN, ROUNDS, fused=True),
    World("three ranks, split", THREE, ((4, 0, 3), (2, 4, 1)), shape=(4, 32)),
    World("three ranks, fused", THREE, ((4, 0, 3), (2, 4, 1)), fused=True, shape=(4, 32)),
    World("unreduced", PLAIN, ((5, 3), (2, 5)), fused=True, unreduced=True),
    World("nvfp4, shared expert, split", SHARED | dict(token_format="nvfp4"), ((6, 3), (1, 5))),
    World("nvfp4, shared expert, fused", SHARED | dict(token_format="nvfp4"), ((6, 3), (1, 5)), fused=True),
    World("shared expert of tokens that go elsewhere",          # encoding takes longer than what comes before its wait
          SHARED | dict(token_format="nvfp4", hidden=1024, n_experts=2, top_k=1), ((6, 6),), fused=True, elsewhere=True,
          shape=(4, 32)),
    World("shared expert", SHARED | dict(hidden=16), ((6, 3), (1, 5)), fused=True, swiglu=True),
    World("fp8, skip_a2a, shared expert", SHARED | dict(hidden=128, token_format="fp8_blockwise", skip_a2a=True,
                                                        p2p_world_size=1, allreduce_world_size=2), ((6, 6), (5, 5)),
          fused=True),
    World("skip_a2a, shared expert, three uneven shares",
          SHARED | dict(n_ranks=3, top_k=1, hidden=8, skip_a2a=True, p2p_world_size=1, allreduce_world_size=3),
          ((4, 4, 4), (5, 5, 5)), fused=True),
    World("skip_a2a in one p2p world", PLAIN | dict(skip_a2a=True), ((5, 5), (4, 4)), fused=True),
    World("idle blocks", PLAIN, ((1, 0), (0, 1)), fused=True, shape=(8, 32)),
    World("mxfp4_rows", PLAIN | dict(hidden=64, token_format="mxfp4_rows"), ((5, 3),)),
    World("wide rows", PLAIN | dict(hidden=256), ((5, 3),), swiglu=True),
    World("windows, split", dict(n_ranks=2, n_experts=14, top_k=3, hidden=64, max_tokens_per_rank=7,
                                 token_format="nvfp4", alignment=64), ((7, 5), (2, 7)), constants=WINDOWS),
    World("windows, fused", dict(n_ranks=2, n_experts=14, top_k=3, hidden=16, max_tokens_per_rank=7), ((7, 5), (2, 7)),
          fused=True, constants=WINDOWS),
    World("announced when some are written", dict(n_ranks=2, n_experts=2, top_k=1, hidden=16, max_tokens_per_rank=9),
          ((9, 8),), fused=True, shape=(8, 32),
          constants={"signaller.WINDOW": 1, "senders.MAX_MESSAGES": 1, "few_tokens.MOST_TOKENS": 0}),
    World("few tokens", PLAIN | dict(hidden=64), ROUNDS, fused=True, shape=(5, 64), few=True),
    World("few tokens of fp8", PIECES | dict(token_format="fp8_blockwise", top_k=2), ((2, 3), (3, 1)), fused=True,
          shape=(4, 128), few=True),
    World("few tokens, shared expert", PLAIN | dict(hidden=64, fused_shared_expert=True), ROUNDS, fused=True,
          shape=(5, 64), few=True),
    World("few tokens, windows of counts", dict(n_ranks=2, n_experts=10, top_k=3, hidden=16, max_tokens_per_rank=3),
          ((2, 3), (3, 1)), fused=True, shape=(4, 64), few=True, constants={"offsets.MAX_COUNTS": 4}),
    World("few tokens and one more", PLAIN | dict(max_tokens_per_rank=9), ((8, 9), (9, 8), (3, 2)), fused=True,
          shape=(6, 32), few=True),
    World("few tokens, a block for several ranks", dict(n_ranks=3, n_experts=6, top_k=2, hidden=40,
                                                        max_tokens_per_rank=6),
          ((3, 6, 1), (0, 2, 5)), fused=True, shape=(2, 64), few=True,
          constants={"few_tokens.are_all": lambda cfg, shares, launch: True}),
    World("few tokens, a block for several ranks of many experts", dict(n_ranks=3, n_experts=102, top_k=2, hidden=8,
                                                                        max_tokens_per_rank=3),
          ((3, 2, 1),), fused=True, shape=(2, 64), few=True,
          constants={"few_tokens.are_all": lambda cfg, shares, launch: True}),
    World("few tokens, more words than are remembered", dict(n_ranks=2, n_experts=6, top_k=3, hidden=16,
                                                             max_tokens_per_rank=3),
          ((2, 3), (3, 1)), fused=True, shape=(6, 64), few=True, constants={"offsets.MOST_KNOWN": 4}),
    World("seventeen slots, 33 segments", dict(n_ranks=3, n_experts=33, top_k=17, hidden=8, max_tokens_per_rank=5),
          ((5, 0, 1),), fused=True, shape=(2, 32), constants={"few_tokens.MOST_TOKENS": 0}),
    World("more experts than lanes", dict(n_ranks=2, n_experts=36, top_k=2, hidden=8, max_tokens_per_rank=3),
          ((3, 2), (2, 3)), fused=True, shape=(3, 32)),
    World("signals watched by two warps", dict(n_ranks=2, n_experts=66, top_k=2, hidden=8, max_tokens_per_rank=2),
          ((2, 1),), fused=True, shape=(2, 256)),
    World("ten slots", dict(n_ranks=2, n_experts=12, top_k=10, hidden=8, max_tokens_per_rank=2), ((2, 1),), fused=True),
    World("rows in pieces, split", PIECES, ((2, 3), (3, 1)), shape=(3, 128)),
    World("rows in pieces, fused", PIECES | dict(token_format="fp8_blockwise", fused_shared_expert=True),
          ((2, 3), (3, 1)), fused=True, shape=(4, 128)),
    World("rows in pieces, uneven shares", PIECES | dict(hidden=1024, max_tokens_per_rank=5), ((5, 4), (4, 5)),
          shape=(3, 128)),
    World("two rows of three steps, two warps a row",
          PIECES | dict(hidden=1152, token_format="fp8_blockwise", max_tokens_per_rank=4), ((4, 1),), shape=(2, 192)),
    World("whole entries", PLAIN | dict(n_experts=6), ((5, 4), (4, 5)), fused=True, shape=(3, 224)),
    World("an entry too large to go whole", PLAIN | dict(n_experts=6), ((5, 4),), fused=True, shape=(3, 224),
          constants={"whole_entries.MOST_ROWS": 2}),
    World("tiles of rows", PLAIN | dict(hidden=8, max_tokens_per_rank=17), ((17, 12),), fused=True, shape=(4, 32)),
    World("bad ids", PLAIN, ((5, 5),), bad_ids=True),
    World("absent peer, split", PLAIN, ((5, 3), (5, 3)), absent=(1,)),
    World("absent peer, fused", PLAIN, ((5, 3), (5, 3)), fused=True, absent=(1,)),
    World("absent peer, few tokens", PLAIN, ((5, 3), (5, 3)), fused=True, shape=(6, 32), few=True,
          absent=(1,)),
    World("stuck sender", PLAIN, ((5, 3),), fused=True, stuck="dispatch"),
    World("stuck return", PLAIN, ((5, 3),), fused=True, shape=(12, 32), stuck="combine"),   # a row a block
    World("p2p worlds, split", FAR | dict(hidden=520), ((5, 3), (2, 5)), shape=(3, 32)),
    World("p2p worlds, fused", FAR_AND_NEAR, ((5, 3, 0, 2), (2, 5, 4, 1)), fused=True, shape=(3, 32)),
    World("p2p worlds, nvfp4", FAR | dict(token_format="nvfp4", hidden=64), ((5, 3), (2, 5))),
    RowsWorld("rows", "rows"),
    RowsWorld("rows, more blocks than tokens", "rows", tokens=(2, 0), shape=(5, 32)),
    RowsWorld("rows, more tokens than a block looks at", "rows", tokens=(7, 5), hidden=8, shape=(3, 32)),
    RowsWorld("rows of four ranks", "rows", tokens=(5, 0, 3, 2), top_k=6, hidden=264, shape=(2, 64)),
    RowsWorld("rows of five ranks", "rows", tokens=(2, 0, 1, 0, 1), top_k=9, hidden=8, shape=(2, 32)),
    RowsWorld("rows, results through the staging area", "rows", full_heap=(1,)),
    RowsWorld("rows, combines in a row", "rows", tokens=(0, 4), shape=(2, 32), combines=3, slow=(1,)),   # 0 awaits none
    RowsWorld("few rows, combines in a row", "rows", tokens=(0, 2), shape=(2, 32), combines=3, slow=(1,)),
    RowsWorld("rows, counted on the device", "rows", on_device=True),
    RowsWorld("rows, bad ids", "rows", tokens=(9, 4), top_k=4, local=3, bad_ids=True),
    RowsWorld("rows, absent peer", "rows", absent=(1,)),
    RowsWorld("hybrid", "hybrid", limit=16, pad=4),             # what rank 0 receives just fits
    RowsWorld("hybrid, several sending blocks", "hybrid", tokens=(5, 4), limit=20, shape=(6, 32)),
    RowsWorld("hybrid, two p2p worlds", "hybrid", tokens=(4, 0, 3, 2), top_k=6, limit=24, shape=(2, 64),
              p2p_world_size=2),
    RowsWorld("hybrid, many experts of a rank", "hybrid", tokens=(2, 1), top_k=9, local=5, limit=16, hidden=8,
              shape=(2, 32)),
    RowsWorld("rows in parts", "rows", tokens=(3, 2), hidden=1536),
    RowsWorld("rows in parts, more than a window holds", "rows", tokens=(7, 1), hidden=1032, top_k=3),
    RowsWorld("rows, a token sent by several blocks", "rows", tokens=(2, 1), hidden=1200, shape=(12, 32)),
    RowsWorld("hybrid fp8, rows in parts", "hybrid", tokens=(2, 1), hidden=1280, limit=8, fp8=True),
    RowsWorld("hybrid, rows in parts", "hybrid", tokens=(3, 2), hidden=2112, limit=10),
    RowsWorld("hybrid, more experts of a token than lanes", "hybrid", tokens=(1, 1), top_k=87, local=44, limit=90,
              hidden=8, shape=(2, 32)),
    RowsWorld("rows, ranks with more blocks than others", "rows", tokens=(9, 3), local=10, hidden=8, shape=(12, 32)),
    RowsWorld("rows, no room at first", "rows", tokens=(4, 3), shape=(8, 32), asks=True),
    RowsWorld("hybrid, no room at first", "hybrid", tokens=(4, 3), limit=16, asks=True),
    RowsWorld("hybrid, more experts than two windows", "hybrid", tokens=(1, 1), top_k=110, local=70, limit=112,
              hidden=8, shape=(2, 32)),
    RowsWorld("rows, more tokens than lanes", "rows", tokens=(40, 33), top_k=1, hidden=8, shape=(2, 32)),
    RowsWorld("rows, all looked at by every block", "rows", tokens=(130, 2), top_k=1, hidden=8, shape=(2, 32),
              constants={"rows.roles.FEW": 136}),
    RowsWorld("hybrid fp8, too little room", "hybrid", hidden=128, limit=9, fp8=True, shape=(2, 64)),
    RowsWorld("few rows, again in a row", "rows", tokens=(2, 0), shape=(2, 32), combines=3, slow=(1,)),
    RowsWorld("rows, fewer parts of more rows", "rows", tokens=(7, 5), hidden=1032, shape=(4, 32), brief=True,
              constants={"rows.row_flags.UNITS": 10, "rows.combine.FEWEST_PARTS": 1}),
    RowsWorld("rows of ten ranks", "rows", tokens=(4, *[0] * 8, 1), top_k=9, local=1, hidden=8,
              shape=(2, 32), brief=True),
    RowsWorld("rows in two parts, more blocks", "rows", tokens=(4, 3), hidden=1536, shape=(6, 32), dtype="float16",
              brief=True),
    RowsWorld("hybrid, late experts and wide rows", "hybrid", tokens=(1, 1), top_k=4, local=70, limit=12, hidden=1032,
              shape=(2, 32), from_expert=64, constants={"rows.row_flags.UNITS": 1, "rows.dispatch.FEWEST_PARTS": 1}),
    RowsWorld("few wide rows, few warps", "rows", tokens=(1, 2), hidden=1032, shape=(2, 32)),
    RowsWorld("pairs of rows and scales", "rows", tokens=(5, 2), hidden=128, pairs=True, on_device=True),
    RowsWorld("few pairs, no memory left", "rows", tokens=(2, 1), hidden=128, pairs=True, on_device=True,
              full_heap=(1,)),
    RowsWorld("rows, three slots", "rows", tokens=(24, 13), top_k=3, hidden=8, shape=(3, 32), dtype="float16",
              brief=True),
    RowsWorld("few pairs of a late rank", "rows", tokens=(2, 1), hidden=128, pairs=True, on_device=True, slow=(0,)),
    RowsWorld("few pairs, stale loads", "rows", tokens=(1, 2), hidden=256, pairs=True, on_device=True, stale=True),
    RowsWorld("few rows, stale loads", "rows", tokens=(2, 1), stale=True),
    RowsWorld("rows, stale loads", "rows", stale=True),
    RowsWorld("hybrid, stale loads", "hybrid", limit=16, pad=4, stale=True),
    RowsWorld("rows with stamps", "rows", id_dtype="int32", trace=True),
    RowsWorld("few rows with stamps, late", "rows", tokens=(2, 1), shape=(3, 64), id_dtype="int32", trace=True,
              slow=(0,)),
    RowsWorld("hybrid, absent peer", "hybrid", limit=16, absent=(1,)),
    RowsWorld("hybrid with stamps, late", "hybrid", tokens=(4, 3), limit=18, trace=True, slow=(1,), dtype="float16"),
    RowsWorld("rows in parts, late", "rows", tokens=(5, 2), hidden=1032, slow=(0,)),
    RowsWorld("few rows, absent peer", "rows", tokens=(2, 1), absent=(1,)),
    RowsWorld("rows, 32 slots", "rows", tokens=(7, 1), top_k=32, local=17, hidden=8, shape=(3, 32)),
    World("six rounds, a late rank, split", PLAIN, SIX, slow=(0,)),
    World("six rounds, a late rank, fused", PLAIN, SIX, fused=True, shape=(4, 64), slow=(1,)),
    World("few tokens, six rounds, a late rank", PLAIN, SIX, fused=True, shape=(5, 64), few=True, slow=(1,)),
    World("eight ranks", dict(n_ranks=8, n_experts=16, top_k=3, hidden=8, max_tokens_per_rank=3),
          ((1, 0, 3, 2, 0, 1, 0, 2), (0, 1, 2, 0, 0, 3, 1, 1)), fused=True, shape=(4, 32),
          constants={"few_tokens.MOST_TOKENS": 0}),
    World("unreduced, wide rows", PLAIN | dict(hidden=520), ((5, 3), (2, 5)), fused=True, unreduced=True),
    World("few tokens, late experts", dict(n_ranks=2, n_experts=72, top_k=3, hidden=8, max_tokens_per_rank=3),
          ((3, 2), (2, 3)), fused=True, shape=(6, 64), few=True, from_expert=30),
    RowsWorld("rows, many experts, two warps", "rows", tokens=(4, 3), top_k=9, local=20, hidden=8),
    RowsWorld("hybrid, many experts, two warps", "hybrid", tokens=(3, 2), top_k=9, local=20, limit=40, hidden=8),
    RowsWorld("rows, few dispatched between combines", "rows", tokens=(4, 3), shape=(3, 64), slow=(1,), between=True),
    RowsWorld("rows of three slots, no memory left", "rows", tokens=(3, 3), top_k=3, full_heap=(0,), on_device=True),
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
    PublicWorld("scales in slots of many rows", ONE | dict(token_format="mxfp4_rows", fuse_a_scale_preshuffle=True,
                                                           hidden=256, max_tokens_per_rank=20), ((20, 16),),
                to_one=True),
    PublicWorld("a tile that is nearly full", ONE | dict(token_format="nvfp4", hidden=64, max_tokens_per_rank=64),
                ((62, 50),), to_one=True, fused=False),
    PublicWorld("more tokens than lanes, one slot", ONE | dict(n_experts=6, hidden=8, max_tokens_per_rank=40),
                ((40, 33),), shape=(3, 32)),
    PublicWorld("eight tokens to one expert", ONE | dict(hidden=8, max_tokens_per_rank=8), ((8, 8),), to_one=True,
                shape=(4, 64)),
    PublicWorld("very wide rows", ONE | dict(hidden=3592, max_tokens_per_rank=3), ((3, 2),), shape=(2, 32),
                fused=False),
    PublicWorld("rows in pieces, few tokens", PIECES | dict(top_k=2), ((2, 3), (3, 1)), shape=(4, 128)),
    PublicWorld("three runs in two pieces, few tokens", PIECES | dict(hidden=768, top_k=2), ((1, 0), (1, 1)),
                shape=(4, 64)),
    PublicWorld("five runs in three pieces", PIECES | dict(hidden=1288), ((2, 1), (1, 1)), shape=(3, 96),
                fused=False),
    PublicWorld("five runs in three pieces of fp8", PIECES | dict(hidden=2432, token_format="fp8_blockwise"),
                ((2, 1), (1, 1)), shape=(4, 96)),
    PublicWorld("with stamps, fused", PLAIN, ((5, 3),), launch=dict(trace=True)),
    PublicWorld("with stamps, split", PLAIN, ((5, 3),), launch=dict(trace=True), fused=False),
    PublicWorld("whole messages, fused", PLAIN, ROUNDS, launch=dict(shared_payloads=False)),
    PublicWorld("shared payloads, split", PLAIN, ROUNDS, launch=dict(shared_payloads=True), fused=False),
    PublicWorld("nothing for some ranks, split", PLAIN, ((0, 0), (1, 0), (0, 0), (5, 0)), fused=False, shape=(5, 32)),
)}
