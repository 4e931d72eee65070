"""Random worlds, tried after the worlds of worlds.py, for cases that nobody thought of.

A number gives the same world everywhere. The world's name is "random 17", for instance.
"""

from functools import lru_cache

import numpy as np

from epmoe.mutants.world_kinds import PublicWorld, RowsWorld, World
from epmoe.mutants.worlds import WORLDS
from epmoe_ref.config import TOKEN_FORMATS

PREFIX = "random "
WORK = 6_000  # elements of a round's messages
PAIRS = 48  # of a rank's tokens and ids
THREADS = 32, 32, 64, 64, 96, 128, 224
BLOCKS = 2, 3, 4, 5, 6, 8
MOST_THREADS = 320  # of a rank
LOCAL = 1, 1, 2, 3, 5, 17, 34, 66


def named(name):
    """The world with this name: one of worlds.py, or a random one."""
    return WORLDS[name] if name in WORLDS else _world(int(name.removeprefix(PREFIX)))


def is_random(name):
    """Whether the world with this name is a random one."""
    return name.startswith(PREFIX)


def names(n):
    """Names of the first n random worlds."""
    return [f"{PREFIX}{number}" for number in range(n)]


@lru_cache(None)
def _world(number):
    rng = np.random.default_rng([number, 8])
    return (_page, _public, _rows, _hybrid)[number % 4](f"{PREFIX}{number}", rng)


def _sizes(rng, most_ranks):
    """(ranks, local experts, top_k, most tokens)."""
    n_ranks, local = int(min(most_ranks, rng.choice((2, 2, 2, 3, 4, 5)))), int(rng.choice(LOCAL))
    top_k = int(min(rng.choice((1, 2, 2, 3, 4, 8, 9, 17, 32)), n_ranks * local))
    return (n_ranks, local, top_k, int(min(max(1, PAIRS // top_k), rng.choice((1, 2, 3, 5, 8, 9, 20, 34)))))


def _tokens(rng, n_ranks, most):
    """Each rank's number of tokens: often none, often the most."""
    return tuple(int(rng.choice((0, most, *rng.integers(0, most + 1, 2)))) for _ in range(n_ranks))


def _hidden(rng, multiple, pairs):
    """A hidden size for this many pairs, within the limit on work."""
    most = max(1, WORK // max(1, pairs) // multiple)
    return multiple * int(min(most, rng.choice((1, 2, 3, 5, 33, 66, 129, 200))))


def _launch(rng):
    threads = int(rng.choice(THREADS))
    return int(max(2, min(rng.choice(BLOCKS), MOST_THREADS // threads))), threads


def _some(rng, n_ranks):
    """Slow ranks: mostly one or none."""
    return (int(rng.integers(n_ranks)),) if rng.random() < 0.4 else ()


def _config(rng, most_ranks=4):
    n_ranks, local, top_k, most = _sizes(rng, most_ranks)
    token_format = str(rng.choice(["bf16", "bf16", *TOKEN_FORMATS]))
    sizes = dict(
        n_ranks=n_ranks,
        n_experts=n_ranks * local,
        top_k=top_k,
        max_tokens_per_rank=most,
        token_format=token_format,
        fused_shared_expert=bool(rng.random() < 0.2),
        alignment=int(rng.choice((16, 16, 16, 32, 128))),
    )
    return sizes | dict(hidden=_hidden(rng, TOKEN_FORMATS[token_format].hidden_multiple, n_ranks * most * top_k))


def _page(name, rng):
    sizes, fused = _config(rng), bool(rng.random() < 0.6)
    tokens = tuple(_tokens(rng, sizes["n_ranks"], sizes["max_tokens_per_rank"]) for _ in range(int(rng.integers(1, 5))))
    local = sizes["n_experts"] // sizes["n_ranks"]
    late = local - 4 if local > 8 and rng.random() < 0.5 and sizes["top_k"] <= 4 else 0
    unreduced = bool(rng.random() < 0.2) and not sizes["fused_shared_expert"]
    if sizes["n_experts"] < 2 * sizes["n_ranks"] or sizes["top_k"] == sizes["n_experts"]:
        return _public(name, rng)  # in a World one expert gets no tokens
    return World(
        name,
        sizes,
        tokens,
        fused=fused,
        shape=_launch(rng),
        unreduced=unreduced,
        slow=_some(rng, sizes["n_ranks"]),
        from_expert=late,
    )


def _public(name, rng):
    sizes = _config(rng, most_ranks=3) | dict(combine_dtype=str(rng.choice(("bf16", "fp16", "fp32"))))
    tokens = tuple(_tokens(rng, sizes["n_ranks"], sizes["max_tokens_per_rank"]) for _ in range(2))
    weights = str(rng.choice(("array", "array", "function", "none")))
    if sizes["fused_shared_expert"] and weights == "none":
        weights = "array"
    return PublicWorld(
        name,
        sizes,
        tokens,
        fused=bool(rng.random() < 0.6),
        shape=_launch(rng),
        weights=weights,
        trace=bool(rng.random() < 0.1),
        edges=bool(rng.random() < 0.5),
        epilogue=weights != "none" and bool(rng.random() < 0.3),
        to_one=sizes["top_k"] == 1,
    )


def _rows(name, rng):
    n_ranks, local, top_k, most = _sizes(rng, 5)
    pairs, tokens = bool(rng.random() < 0.15), _tokens(rng, n_ranks, min(most, 20))
    top_k = min(top_k, max(1, n_ranks * local - 1))
    hidden = _hidden(rng, 128 if pairs else 8, 2 * n_ranks * max(1, sum(tokens)))
    late = local - 4 if local > 8 and rng.random() < 0.5 and top_k <= 4 else 0
    return RowsWorld(
        name,
        "rows",
        tokens=tokens,
        hidden=hidden,
        shape=_launch(rng),
        top_k=top_k,
        local=local,
        on_device=bool(rng.random() < 0.5),
        between=bool(rng.random() < 0.4),
        pairs=pairs,
        combines=int(rng.choice((0, 0, 2))),
        slow=_some(rng, n_ranks),
        from_expert=late,
        dtype=str(rng.choice(("bfloat16", "float16"))),
        id_dtype=str(rng.choice(("int64", "int32"))),
        full_heap=_some(rng, n_ranks),
        asks=bool(rng.random() < 0.2),
    )


def _hybrid(name, rng):
    n_ranks, local, top_k, most = _sizes(rng, 4)
    tokens, fp8 = _tokens(rng, n_ranks, min(most, 9)), bool(rng.random() < 0.3)
    top_k = min(top_k, max(1, n_ranks * local - 1))
    pad = int(rng.choice((0, 4, 8)))
    limit = int(sum(tokens) * min(top_k, local) + pad * local + 1)
    if rng.random() < 0.4:
        limit = max(1, limit // 3)
    hidden = _hidden(rng, 128 if fp8 else 8, 2 * n_ranks * max(1, sum(tokens)) * min(top_k, 4))
    late = local - 4 if local > 8 and rng.random() < 0.5 and top_k <= 4 else 0
    return RowsWorld(
        name,
        "hybrid",
        tokens=tokens,
        hidden=hidden,
        shape=_launch(rng),
        limit=limit,
        pad=pad,
        fp8=fp8,
        top_k=top_k,
        local=local,
        slow=_some(rng, n_ranks),
        from_expert=late,
        dtype=str(rng.choice(("bfloat16", "float16"))),
        asks=bool(rng.random() < 0.2),
        p2p_world_size=2 if n_ranks == 4 and rng.random() < 0.5 else None,
    )
