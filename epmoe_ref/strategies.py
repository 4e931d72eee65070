"""Random worlds for property tests: Hypothesis strategies that draw configurations, routings and data.

They are public, so you can test your own implementation with them. Hypothesis draws and shrinks the structure (sizes,
patterns, options), and the data comes from a drawn seed. Sizes are small on purpose: most bugs of expert-parallel
routing show with 3 ranks and 5 tokens. With large=True one world in four has up to 136 tokens a rank and 40 local experts:
more than a tile of scales has rows, a warp lanes, or a small batch tokens.

`configs`, `worlds`: the per-expert layout (dispatch, combine). `rows_worlds`, `hybrid_worlds`: fused_a2a. `topk_ids`,
`garbage_topk_ids`, `routing_maps`, `matrices`: their parts. This is the only module of the reference that imports
hypothesis; install it with `pip install hypothesis`.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("epmoe_ref.strategies needs hypothesis: pip install hypothesis") from error

from .config import TOKEN_FORMATS, EPConfig

BF16 = np.dtype(ml_dtypes.bfloat16)
KINDS = ("integers", "coordinates", "normal", "cancelling", "special")
PATTERNS = ("uniform", "hot_expert", "one_rank", "few_experts")
DROPS = (0.0, 0.0, 0.3, 1.0)
LARGE_TOKENS, LARGE_LOCAL_EXPERTS = 136, 40


@dataclass(frozen=True)
class World:
    """One round of the per-expert layout. Lists are over ranks. Under skip_a2a all ranks hold the same tokens."""

    cfg: EPConfig
    input_tokens: list  # bfloat16 [num_tokens, hidden]
    topk_ids: list  # int32 [num_tokens, top_k], -1: no expert
    router_weights: list  # float32 [num_tokens, top_k]; NaN where there is no expert


@dataclass(frozen=True)
class RowsWorld:
    """The arguments of fused_a2a.dispatch_forward, by name. Lists are over ranks."""

    x: list
    token_indices: list  # int64 [T, K]
    token_probs: list  # float32 [T, K]
    num_experts: int


@dataclass(frozen=True)
class HybridWorld:
    """The arguments of fused_a2a.hybrid_dispatch_forward, by name. Lists are over ranks."""

    x: list
    routing_map: list  # bool [T, E]
    probs: list | None  # float32 [T, E]; NaN where not routed
    num_local_experts: int
    num_permuted_tokens: int | None
    pad_multiple: int | None
    fp8_dispatch: bool
    p2p_world_size: int | None


def seeds():
    """Seeds of NumPy generators."""
    return st.integers(0, 2**32 - 1)


def num_tokens(n_ranks: int, most: int = 12):
    """The number of tokens of each rank: uneven, often 0."""
    return st.lists(st.one_of(st.just(0), st.integers(0, most)), min_size=n_ranks, max_size=n_ranks)


def _most(draw, large, tokens, local_experts):
    """(tokens, local experts) at most; with `large` now and then more. A failure shrinks to the small ones."""
    if large and draw(st.sampled_from((False, False, False, True))):
        return LARGE_TOKENS, LARGE_LOCAL_EXPERTS
    return tokens, local_experts


@st.composite
def matrices(draw, num_rows, columns: int, dtype=BF16, kinds=KINDS):
    """Data over ranks: a matrix [num_rows[rank], columns] for each rank.

    kinds: "integers" (-4..4: sums are exact), "coordinates" (small integers that identify rank, row and column),
    "normal" (of very different sizes), "cancelling" (so large and so small that any other order of a float32 sum gives
    a different result), "special" (as normal, with some NaN, Inf, -0.0, subnormals and the largest numbers).
    """
    kind, rng = draw(st.sampled_from(kinds)), np.random.default_rng(draw(seeds()))
    return [_matrix(rng, kind, rank, rows, columns, np.dtype(dtype)) for rank, rows in enumerate(num_rows)]


def _matrix(rng, kind, rank, rows, columns, dtype):
    if kind == "coordinates":
        row, column = np.indices((rows, columns))
        return np.choose(column % 3, (np.full_like(row, rank + 1), row % 128 + 1, column % 128)).astype(dtype)
    if kind == "integers":
        return rng.integers(-4, 5, (rows, columns)).astype(dtype)
    if kind == "cancelling":
        return rng.choice([2.0**14, -(2.0**14), 2.0**-12, -3 * 2.0**-12], (rows, columns)).astype(dtype)
    values = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-12, 13, (rows, columns))
    if kind == "special":
        limits = ml_dtypes.finfo(dtype)
        odd = np.array([np.nan, np.inf, -np.inf, -0.0, limits.smallest_subnormal, -limits.tiny, limits.max, limits.min])
        values = np.where(rng.random(values.shape) < 0.2, rng.choice(odd.astype(np.float64), values.shape), values)
    return values.astype(dtype)


def _finite(kinds):
    """The kinds that suit probabilities and weights; "normal" if there is none."""
    return tuple(kind for kind in kinds if kind in ("integers", "normal")) or ("normal",)


@st.composite
def topk_ids(draw, num_tokens: int, n_experts: int, top_k: int, n_ranks: int = 1, dtype=np.int32):
    """Routing of one rank: [num_tokens, top_k] of distinct ids.

    The ids are uniform, or one expert is chosen by every token, or most ids are on one rank or on few experts. Some or
    all ids may be -1.
    """
    pattern, drop = draw(st.sampled_from(PATTERNS)), draw(st.sampled_from(DROPS))
    chosen, rng = draw(st.integers(0, n_experts - 1)), np.random.default_rng(draw(seeds()))
    return _ids(rng, pattern, drop, chosen, num_tokens, n_experts, top_k, n_ranks).astype(dtype)


def _ids(rng, pattern, drop, chosen, num_tokens, n_experts, top_k, n_ranks):
    cost = rng.random((num_tokens, n_experts))  # a token chooses its cheapest experts
    if pattern == "hot_expert":
        cost[:, chosen] -= 1
    elif pattern == "one_rank":
        n_local = n_experts // n_ranks
        first = chosen // n_local * n_local
        cost[:, first : first + n_local] -= 1
    elif pattern == "few_experts":
        cost[:, rng.permutation(n_experts)[: top_k + 1]] -= 1
    ids = rng.permuted(np.argsort(cost, axis=1)[:, :top_k], axis=1)
    return np.where(rng.random(ids.shape) < drop, -1, ids)


@st.composite
def garbage_topk_ids(draw, num_tokens: int, n_experts: int, top_k: int, n_ranks: int = 1, dtype=np.int32):
    """Invalid routing, as a broken router may produce it: ids far out of range, negative, or twice in a token."""
    ids = draw(topk_ids(num_tokens, n_experts, top_k, n_ranks, dtype))
    rng = np.random.default_rng(draw(seeds()))
    limits = np.iinfo(dtype)
    wild = np.array([n_experts, n_experts, n_experts + 1, -2, limits.min, limits.max, 65535, 65536], np.int64)
    wild = wild[(wild >= limits.min) & (wild <= limits.max)]
    ids = np.where(rng.random(ids.shape) < 0.15, rng.choice(wild, ids.shape), ids)
    twice = rng.random(ids.shape) < 0.15
    return np.where(twice, np.roll(ids, 1, axis=1), ids).astype(dtype)


@st.composite
def routing_maps(draw, num_tokens: int, n_experts: int, n_ranks: int = 1):
    """Routing of one rank as a map: bool [num_tokens, n_experts], with none to all experts for a token."""
    if draw(st.booleans()):
        share, rng = draw(st.sampled_from((0.1, 0.5, 1.0))), np.random.default_rng(draw(seeds()))
        return rng.random((num_tokens, n_experts)) < share
    ids = draw(topk_ids(num_tokens, n_experts, draw(st.integers(1, n_experts)), n_ranks))
    return (ids[:, :, None] == np.arange(n_experts)).any(axis=1)


@st.composite
def configs(draw, *, max_ranks=4, max_local_experts=4, max_top_k=8, max_tokens=12, large=False, **fixed):
    """Valid configurations. Fields of EPConfig given by name are fixed. The others are drawn to match.

    large: now and then more tokens and experts, as above. use_shmem is False and p2p_world_size the default unless given.
    """
    max_tokens, max_local_experts = _most(draw, large, max_tokens, max_local_experts)
    least_tokens = max_tokens if max_tokens == LARGE_TOKENS else 1

    def pick(name, strategy):
        return fixed[name] if name in fixed else draw(strategy)

    n_ranks = pick("n_ranks", st.integers(1, max_ranks))
    n_experts = pick("n_experts", st.integers(1, max_local_experts).map(lambda n: n * n_ranks))
    token_format = pick("token_format", st.sampled_from(tuple(TOKEN_FORMATS)))
    preshuffle = pick("fuse_a_scale_preshuffle", st.booleans() if token_format == "mxfp4_rows" else st.just(False))
    multiple = 256 if preshuffle else TOKEN_FORMATS[token_format].hidden_multiple
    shared, skip = pick("fused_shared_expert", st.booleans()), pick("skip_a2a", st.booleans())
    chosen = dict(
        n_ranks=n_ranks,
        n_experts=n_experts,
        top_k=pick("top_k", st.integers(1, min(n_experts, max_top_k))),
        hidden=pick("hidden", st.integers(1, 2).map(lambda n: n * multiple)),
        max_tokens_per_rank=pick("max_tokens_per_rank", st.integers(least_tokens, max_tokens)),
        token_format=token_format,
        alignment=pick("alignment", st.sampled_from((16, 16, 32, 128))),
        fuse_a_scale_preshuffle=preshuffle,
        combine_dtype=pick("combine_dtype", st.sampled_from(("bf16", "fp16", "fp32"))),
        fused_shared_expert=shared,
        skip_a2a=skip,
        allreduce_world_size=pick("allreduce_world_size", st.sampled_from([None, None, 1, 2 * n_ranks])),
    )
    return EPConfig(**{**chosen, **fixed})


@st.composite
def worlds(draw, cfgs=None, *, garbage=False, kinds=KINDS):
    """Configurations with data and routing for each rank.

    cfgs: an EPConfig, or a strategy for them; None: `configs()`. garbage: ids as in `garbage_topk_ids`, and at least
    one token on each rank.
    """
    cfg = draw(configs() if cfgs is None else st.just(cfgs) if isinstance(cfgs, EPConfig) else cfgs)
    n_sets = 1 if cfg.skip_a2a else cfg.n_ranks
    some = st.lists(st.integers(1, cfg.max_tokens_per_rank), min_size=n_sets, max_size=n_sets)
    tokens = draw(some if garbage else num_tokens(n_sets, cfg.max_tokens_per_rank))
    routing = garbage_topk_ids if garbage else topk_ids
    ids = [draw(routing(n, cfg.n_experts, cfg.top_k, cfg.n_ranks)) for n in tokens]
    weights = draw(matrices(tokens, cfg.top_k, np.float32, _finite(kinds)))
    weights = [np.where(own_ids < 0, np.float32(np.nan), own) for own, own_ids in zip(weights, ids)]
    data = draw(matrices(tokens, cfg.hidden, BF16, kinds))
    copies = cfg.n_ranks // n_sets
    return World(cfg, *([array.copy() for _ in range(copies) for array in arrays] for arrays in (data, ids, weights)))


@st.composite
def rows_worlds(
    draw,
    *,
    dtypes=(BF16, np.dtype(np.float16), np.dtype(np.float32)),
    kinds=KINDS,
    max_ranks=4,
    max_local_experts=4,
    max_tokens=12,
    large=False,
):
    """Arguments of fused_a2a.dispatch_forward. large: as in configs."""
    max_tokens, max_local_experts = _most(draw, large, max_tokens, max_local_experts)
    n_ranks = draw(st.integers(1, max_ranks))
    num_experts = n_ranks * draw(st.integers(1, max_local_experts))
    tokens = draw(num_tokens(n_ranks, max_tokens))
    top_k = draw(st.one_of(st.integers(1, num_experts), st.just(num_experts)))
    ids = [draw(topk_ids(n, num_experts, top_k, n_ranks, np.int64)) for n in tokens]
    probs = draw(matrices(tokens, top_k, np.float32, _finite(kinds)))
    x = draw(matrices(tokens, 8 * draw(st.integers(1, 3)), draw(st.sampled_from(dtypes)), kinds))
    return RowsWorld(x, ids, probs, num_experts)


@st.composite
def hybrid_worlds(
    draw,
    *,
    dtypes=(BF16, np.dtype(np.float16)),
    kinds=KINDS,
    max_ranks=4,
    max_local_experts=4,
    max_tokens=12,
    overflow=True,
    large=False,
):
    """Arguments of fused_a2a.hybrid_dispatch_forward. overflow=False: every budget has room for the rows. large: as in
    configs."""
    max_tokens, max_local_experts = _most(draw, large, max_tokens, max_local_experts)
    n_ranks = draw(st.integers(1, max_ranks))
    num_local_experts = draw(st.integers(1, max_local_experts))
    num_experts = n_ranks * num_local_experts
    tokens = draw(num_tokens(n_ranks, max_tokens))
    routing_map = [draw(routing_maps(n, num_experts, n_ranks)) for n in tokens]
    probs = draw(st.one_of(st.none(), matrices(tokens, num_experts, np.float32, _finite(kinds))))
    if probs is not None:
        probs = [np.where(routed, own, np.float32(np.nan)) for own, routed in zip(probs, routing_map)]
    pad = draw(st.sampled_from((None, 0, 1, 3, 16, 128)))
    enough = num_local_experts * (sum(tokens) + (pad or 0))
    budget = draw(st.one_of(st.none(), st.integers(0 if overflow else enough, enough + 8)))
    fp8 = draw(st.booleans()) if BF16 in dtypes else False
    dtype, columns = (BF16, 128) if fp8 else (draw(st.sampled_from(dtypes)), 8 * draw(st.integers(1, 3)))
    x = draw(matrices(tokens, columns, dtype, kinds))
    divisors = [size for size in range(1, n_ranks + 1) if n_ranks % size == 0]
    world_size = draw(st.sampled_from([None, *divisors]))
    return HybridWorld(x, routing_map, probs, num_local_experts, budget, pad, fp8, world_size)
