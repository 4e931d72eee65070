"""The cases that an implementation runs: sizes, routing and options, each with its reason.

A case's numbers come from `random_bits`, so they are the same on every machine and on every rank.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from epmoe.check import random_bits
from epmoe.check.edges import edge_nans, edge_outputs, edge_tokens, edge_weights
from epmoe_ref.config import MAX_EXPERTS, EPConfig

# The purpose of a stream of random words, part of its seed.
TOKENS, ROUTING, GAPS, WEIGHTS, OUTPUTS, OPPOSITES, SHARED, ABSORBING, EDGES = range(9)
MANY_ROWS = 136  # more than a 128-row tile of scales, or the threads of four warps
MANY_EXPERTS = 40  # local experts: more than a warp
OVER_A_BYTE = 264  # tokens of a rank, rows of an expert, or experts
# tokens of ranks 0 to 3 in each round; the next ranks repeat them
BATCHES = (8, 5, 1, 6), (0, 2, 8, 1), (6, 0, 0, 8)


class Batches:
    """A case of any layout with the fields n_tokens (over ranks) and later: n_tokens of the second round and so on, or
    () if all rounds have the same. In the second round of a case with `later` only the last rank's experts get rows."""

    def batch(self, round_):
        """The number of tokens of each rank in a round."""
        return self.later[round_ - 1] if self.later and round_ else self.n_tokens

    def idle(self, round_, experts):
        """bool like `experts`, global ids: which of them get no row in this round, because they are on other ranks."""
        n_ranks = len(self.n_tokens)
        return (experts // (self.n_experts // n_ranks) < n_ranks - 1) & bool(self.later and round_ == 1)


@dataclass(frozen=True)
class Case(Batches):
    """One world: the numbers of tokens, their routing, and the options.

    n_tokens: over ranks. routing: "spread" (distinct random experts), "gaps" (a third of the ids -1), "hot" (every
    token to expert 0 first), "dropped" (all ids -1), "one_rank" (experts of the last rank only).
    weighted: combine with router weights. epilogue: combine with the affine epilogue of `epilogue`.
    edges: tokens, outputs and weights are values for which number formats and arithmetic differ (see edges.py).
    nans: some tokens are NaN of other bits than the usual ones.
    rounds: number of rounds with new data on the same implementation. later: see Batches.
    """

    name: str
    cfg: EPConfig
    n_tokens: tuple
    routing: str = "spread"
    weighted: bool = True
    epilogue: bool = False
    edges: bool = False
    nans: bool = False
    input_scale: tuple | None = None
    rounds: int = 2
    later: tuple = ()
    seed: int = field(default=0, compare=False)

    @property
    def n_experts(self):
        """Experts of all ranks."""
        return self.cfg.n_experts

    def needs(self):
        """The options that an implementation must serve: a set of names."""
        cfg = self.cfg
        named = {
            "unweighted": not self.weighted,
            "epilogue": self.epilogue,
            "input_scale": self.input_scale is not None,
            "fused_shared_expert": cfg.fused_shared_expert,
            "skip_a2a": cfg.skip_a2a,
            "use_shmem": cfg.use_shmem,
            "fuse_a_scale_preshuffle": cfg.fuse_a_scale_preshuffle,
        }
        return {name for name, on in named.items() if on}

    def stream(self, round_, *key):
        """A random stream for the case's seed, a round and a key. It is the same on every rank."""
        return random_bits.stream(self.seed, round_, *key)

    def input_tokens(self, round_=0):
        """bf16 [T, hidden] of each rank. Under skip_a2a all ranks have the same."""
        return [self._tokens(round_, 0 if self.cfg.skip_a2a else rank, n) for rank, n in enumerate(self.batch(round_))]

    def _tokens(self, round_, rank, n):
        seeds = self.stream(round_, TOKENS, rank, np.arange(n))
        tokens = random_bits.floats("bf16", seeds, self.cfg.hidden, exponents=(-6, 5))
        tokens = edge_tokens(tokens, self.stream(round_, TOKENS, rank, -1)) if self.edges else tokens
        return edge_nans(tokens) if self.nans else tokens

    def topk_ids(self, round_=0):
        """int32 [T, top_k] of each rank. The ids of a token are distinct, or -1."""
        return [self._ids(round_, 0 if self.cfg.skip_a2a else rank, n) for rank, n in enumerate(self.batch(round_))]

    def _ids(self, round_, rank, n):
        cfg = self.cfg
        seed = self.stream(round_, ROUTING, rank)
        if self.routing == "one_rank":
            k = min(cfg.top_k, cfg.n_local_experts)
            ids = np.full((n, cfg.top_k), -1, np.int64)
            first = cfg.n_experts - cfg.n_local_experts
            ids[:, :k] = first + random_bits.permutations(seed, n, cfg.n_local_experts)[:, :k]
            return ids.astype(np.int32)
        ids = random_bits.permutations(seed, n, cfg.n_experts)
        if self.routing == "hot":
            ids = np.argsort(np.where(np.arange(cfg.n_experts) == 0, -1, ids), axis=1, kind="stable")
        ids = ids[:, : cfg.top_k].astype(np.int32)
        if self.routing == "gaps":
            gaps = random_bits.words(self.stream(round_, GAPS, rank), ids.size).reshape(ids.shape) % np.uint64(3) == 0
            ids[gaps] = -1
        ids[self.idle(round_, ids)] = -1
        return np.full_like(ids, -1) if self.routing == "dropped" else ids

    def router_weights(self, round_=0):
        """float32 [T, top_k] of each rank, or None unweighted. NaN where the id is -1, which must add nothing."""
        if not self.weighted:
            return None
        result = []
        for rank, ids in enumerate(self.topk_ids(round_)):
            source = 0 if self.cfg.skip_a2a else rank
            weights = random_bits.floats("fp32", self.stream(round_, WEIGHTS, source), ids.size, exponents=(-5, -1))
            weights = np.abs(weights).reshape(ids.shape)
            odd = np.arange(1, self.cfg.top_k, 2)
            # makes neighbouring k cancel: see pair_outputs
            weights[::2, odd] = weights[::2, odd - 1]
            weights[2::4] = weights[2::4, :1]  # the same for k that are two apart
            if self.edges:
                edge_weights(weights)
            result.append(np.where(ids >= 0, weights, np.float32("nan")))
        return result

    def pair_outputs(self, round_, rank, src_rank, token, k):
        """The outputs of the experts of `rank` for the given pairs: [n, hidden] in combine_dtype.

        This is a made-up function of (rank, src_rank, token, k), so the order of rows does not matter. In every fourth
        column the outputs of k = 2i and 2i + 1 are opposite. With equal weights only the rounding errors of their sum
        remain. These show every missing fused multiply-add and every change of order, even after a cast to bf16. In
        every eighth column k = 4i and 4i + 2 have opposite and large outputs, so the sum loses bits of 4i + 1.
        """
        token, k = np.asarray(token), np.asarray(k)
        seeds = self.stream(round_, OUTPUTS, rank, src_rank, token, k)
        outputs = random_bits.floats(self.cfg.combine_dtype, seeds, self.cfg.hidden)
        seeds = self.stream(round_, OPPOSITES, src_rank, token, k // 2)
        opposites = random_bits.floats(self.cfg.combine_dtype, seeds, len(range(0, self.cfg.hidden, 4)))
        outputs[..., ::4] = np.where(k[..., None] % 2 == 0, opposites, -opposites)
        seeds = self.stream(round_, ABSORBING, src_rank, token, k // 4)
        large = random_bits.floats(self.cfg.combine_dtype, seeds, len(range(2, self.cfg.hidden, 8)), exponents=(12, 14))
        place = k[..., None] % 4
        outputs[..., 2::8] = np.where(place == 0, large, np.where(place == 2, -large, outputs[..., 2::8]))
        if self.edges:
            edge_outputs(outputs, self.stream(round_, EDGES, src_rank, token), token, k)
        return outputs

    def shared_outputs(self, round_, rank, n):
        """The shared expert's outputs for the rank's first n shared rows: [n, hidden] in combine_dtype."""
        seeds = self.stream(round_, SHARED, rank, np.arange(n))
        return random_bits.floats(self.cfg.combine_dtype, seeds, self.cfg.hidden)


def cases(n_ranks=4, only_hidden=None):
    """The cases for a world of n_ranks: every format, every option, every routing that often goes wrong.

    only_hidden: replaces the cases' own hidden sizes; a multiple of 256.
    """
    L = 3
    n = L * n_ranks

    def cfg(**options):
        fixed = {"top_k": min(4, n), "hidden": 128, "max_tokens_per_rank": 8}
        options = fixed | {"p2p_world_size": n_ranks} | options
        return EPConfig(n_ranks, n, **options | ({"hidden": only_hidden} if only_hidden else {}))

    uneven = tuple((8, 5, 1, 6, 3, 7, 2, 4)[rank % 8] for rank in range(n_ranks))
    full = (8,) * n_ranks
    one_empty = tuple(0 if rank == n_ranks - 1 else count for rank, count in enumerate(uneven))
    listed = [
        Case("uneven ranks", cfg(), uneven, rounds=3),
        Case("slots without an expert", cfg(), uneven, "gaps", rounds=3),
        Case("a rank without tokens", cfg(), one_empty, "gaps"),
        Case("no tokens at all", cfg(), (0,) * n_ranks),
        Case("no slot has an expert", cfg(), full, "dropped"),
        Case("a hot expert", cfg(), full, "hot"),
        Case("all to the last rank", cfg(), full, "one_rank"),
        Case("one slot", cfg(top_k=1), uneven),
        Case("as many slots as experts", cfg(top_k=min(n, 32)), uneven),
        Case("hidden not a power of two", cfg(hidden=200), uneven, "gaps"),
        Case("without router weights", cfg(), uneven, "gaps", weighted=False),
        Case("combine in fp16", cfg(combine_dtype="fp16"), uneven, "gaps"),
        Case("combine in fp32", cfg(combine_dtype="fp32"), uneven, "gaps"),
        Case("an epilogue", cfg(), uneven, "gaps", epilogue=True),
    ]
    hidden_of = dict(fp8_blockwise=384, nvfp4=192, mxfp4=256, mxfp8=256, mxfp4_rows=160)
    for name, hidden in hidden_of.items():
        plain = cfg(token_format=name, hidden=hidden)
        with_shared = cfg(token_format=name, hidden=hidden, fused_shared_expert=True)
        listed += [
            Case(name, plain, uneven, "gaps"),
            Case(f"{name} at the edges of its numbers", plain, full, edges=True, rounds=1),
            Case(f"{name} with a shared expert", with_shared, uneven, "gaps"),
        ]
    slots = cfg(token_format="mxfp4_rows", hidden=256, fuse_a_scale_preshuffle=True)
    scales = tuple(0.5 + 0.375 * rank for rank in range(n_ranks))
    everybody = cfg(skip_a2a=True)
    everybody_shares = cfg(skip_a2a=True, fused_shared_expert=True, allreduce_world_size=n_ranks)
    listed += [
        Case("nvfp4 with an input scale", cfg(token_format="nvfp4", hidden=192), uneven, "gaps", input_scale=scales),
        Case("mxfp4_rows with scales in slots", slots, uneven, "gaps"),
        Case("a shared expert", cfg(fused_shared_expert=True), one_empty, "gaps"),
        Case("a shared expert and an epilogue", cfg(fused_shared_expert=True), uneven, epilogue=True),
        Case("no exchange (skip_a2a)", everybody, (7,) * n_ranks, "gaps"),
        Case("no exchange, without router weights", everybody, (7,) * n_ranks, "gaps", weighted=False),
        Case("no exchange, a shared expert", everybody_shares, (7,) * n_ranks, "gaps"),
        Case("messages aligned to 64 bytes", cfg(alignment=64, hidden=136), uneven, "gaps"),
    ]
    if n_ranks % 2 == 0:
        two = cfg(use_shmem=True, p2p_world_size=n_ranks // 2)
        listed.append(Case("two p2p worlds (use_shmem)", two, uneven, "gaps"))
    for name, combine_dtype in (("bf16", "bf16"), ("combine in fp16", "fp16"), ("combine in fp32", "fp32")):
        edges = cfg(combine_dtype=combine_dtype)
        listed.append(Case(f"{name} at the edges of its numbers", edges, full, edges=True, rounds=1))
    listed += _large(n_ranks, cfg)
    return [replace(case, seed=number) for number, case in enumerate(listed)]


def large_batch(n_ranks):
    """The number of tokens of each rank, one of which has many."""
    return ((MANY_ROWS, 33, 0, 5) + (1, 2) * n_ranks)[:n_ranks]


def batches(n_ranks):
    """BATCHES for n_ranks: over rounds, the number of tokens of each rank."""
    return tuple(tuple(of_round[rank % 4] for rank in range(n_ranks)) for of_round in BATCHES)


def _large(n_ranks, cfg):
    """Cases with more rows, experts or rounds than a tile, a warp, a block or a ring of buffers has; hidden is small."""
    tokens = -(-MANY_ROWS // n_ranks)
    for name, options in (
        ("fp8_blockwise", dict(hidden=128)),
        ("nvfp4", dict(hidden=128)),
        ("mxfp4", dict(hidden=256)),
        ("mxfp8", dict(hidden=256)),
        ("mxfp4_rows", dict(hidden=64)),
        ("mxfp4_rows in slots", dict(hidden=256, fuse_a_scale_preshuffle=True)),
    ):
        large = cfg(token_format=name.split()[0], top_k=2, max_tokens_per_rank=tokens, **options)
        yield Case(f"{name}, many rows", large, (tokens,) * n_ranks, "hot", rounds=1)
    experts = n_ranks * min(MANY_EXPERTS, MAX_EXPERTS // n_ranks)
    many = replace(cfg(max_tokens_per_rank=MANY_ROWS, top_k=2), n_experts=experts)
    yield Case("many local experts, a large batch", many, large_batch(n_ranks), rounds=1)
    yield Case("five rounds", cfg(top_k=2), (2,) * n_ranks, "gaps", rounds=5)
    first, *later = batches(n_ranks)
    yield Case("batch sizes that change", cfg(), first, "gaps", rounds=len(BATCHES), later=tuple(later))
    yield Case("bf16, NaN of any bits", cfg(), (8,) * n_ranks, edges=True, nans=True, rounds=1)
    many = cfg(max_tokens_per_rank=OVER_A_BYTE, top_k=2)
    tokens = (OVER_A_BYTE, *large_batch(n_ranks)[1:])
    yield Case("more than 256 rows of an expert", many, tokens, "hot", rounds=1)
    many = replace(cfg(), n_experts=-(-OVER_A_BYTE // n_ranks) * n_ranks)
    yield Case("more than 256 experts", many, first, rounds=1)


def epilogue(token, col, value, scale, bias):
    """The epilogue of the cases. scale is a power of two, so the product is exact even if a compiler contracts it."""
    return value * scale + bias


def epilogue_args(n_ranks):
    """One float32 a rank for scale and for bias."""
    return (
        [np.float32(0.5 if rank % 2 else 2.0) for rank in range(n_ranks)],
        [np.float32(0.3) + np.float32(rank) for rank in range(n_ranks)],
    )
