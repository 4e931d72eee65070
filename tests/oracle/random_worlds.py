"""Random worlds from a seed: sizes, routing and numbers, with unlikely cases made likely.

`random_world(seed)` always gives the same world. It uses no machine floats: numbers are drawn as bit patterns.
"""

import random
from dataclasses import dataclass

import exact_float32 as f32
import numpy as np
from exact_formats import FACTS
from record_model import World

SMALL_WORK = 6_000  # multiply-adds of combine in a typical world; now and then one is larger


@dataclass(frozen=True)
class Limits:
    """The largest sizes drawn."""

    ranks: int = 4
    local_experts: int = 16
    top_k: int = 8
    hidden: int = 512
    tokens: int = 40
    large_share: float = 0.02  # how many worlds may have any size within the limits
    work: int = SMALL_WORK


def bits_of(rng, kind, shape, exponent_bits, mantissa_bits):
    """Bit patterns of a floating-point type, drawn by `kind`."""
    bias = (1 << (exponent_bits - 1)) - 1
    top = (1 << exponent_bits) - 1
    sign = rng.integers(0, 2, shape)
    mantissa = rng.integers(0, 1 << mantissa_bits, shape)
    if kind == "anything":  # NaN, infinities and subnormals as often as their patterns
        exponent = rng.integers(0, top + 1, shape)
    elif kind == "tiny":  # zeros, subnormals and what underflows
        exponent = rng.integers(0, 4, shape)
        mantissa = np.where(rng.random(shape) < 0.3, 0, mantissa)
    elif kind == "huge":
        exponent = rng.integers(top - 4, top, shape)
    elif kind == "coarse":  # few significant bits: sums and quotients fall on ties
        exponent = rng.integers(bias - 3, bias + 4, shape)
        mantissa &= 0b110 << (mantissa_bits - 3)
        zero = rng.random(shape) < 0.2
        exponent, mantissa = np.where(zero, 0, exponent), np.where(zero, 0, mantissa)
    else:
        exponent = rng.integers(bias - 6, bias + 3, shape)
    bits = (sign << (exponent_bits + mantissa_bits)) | (exponent << mantissa_bits) | mantissa
    if kind == "salted":  # ordinary numbers and a few special values
        inf = top << mantissa_bits
        salt = np.array([0, 1 << (exponent_bits + mantissa_bits), inf, inf | 1 << (mantissa_bits - 1), 1, inf - 1])
        bits = np.where(rng.random(shape) < 0.02, rng.choice(salt, shape), bits)
    return bits.astype(np.uint32)


DTYPE_BITS = {"bf16": (8, 7), "fp16": (5, 10), "fp32": (8, 23)}
VALUE_KINDS = ("ordinary", "ordinary", "ordinary", "coarse", "salted", "tiny", "huge", "anything")


def numbers(rng, dtype, shape, kind=None):
    """Nested lists of bit patterns of dtype."""
    return bits_of(rng, kind or str(rng.choice(VALUE_KINDS)), shape, *DTYPE_BITS[dtype]).tolist()


def draw_hidden(draw, token_format, preshuffle, limit):
    unit = 256 if preshuffle else FACTS[token_format].hidden_unit
    most = max(limit // unit, 1)
    return unit * (draw.randint(1, most) if draw.random() < 0.3 else min(most, draw.choice((1, 1, 2, 3, 4))))


def draw_topk_ids(draw, tokens, top_k, n_experts, missing, hot):
    """Distinct ids a token, some -1; `hot` experts are preferred."""
    ids = []
    for _ in range(tokens):
        row = draw.sample(range(n_experts), top_k)
        if hot:
            wanted = [e for e in hot if draw.random() < 0.9][:top_k]
            row = wanted + [e for e in row if e not in wanted][: top_k - len(wanted)]
            draw.shuffle(row)
        ids.append([-1 if draw.random() < missing else e for e in row])
    return ids


def draw_tokens(draw, n_ranks, most):
    shape = draw.choice(("any", "any", "equal", "one rank", "none"))
    if shape == "equal":
        return [draw.randint(0, most)] * n_ranks
    if shape == "one rank":
        busy = draw.randrange(n_ranks)
        return [draw.randint(1, most) if r == busy else 0 for r in range(n_ranks)]
    if shape == "none" and draw.random() < 0.3:
        return [0] * n_ranks
    return [draw.randint(0, most) for _ in range(n_ranks)]


def exact_epilogue(gain, bias):
    """The epilogue value * gain[col] + bias[token] (two roundings) in exact arithmetic; lists over ranks of bits."""

    def epilogue(rank, token, column, value):
        scaled = f32.mul(value, f32.from_bits(gain[rank][column]))
        return f32.add(scaled, f32.from_bits(bias[rank][token]))

    return epilogue


def random_world(seed, limits=Limits(), **fixed):
    """The world of this seed; `fixed` names fields (token_format, skip_a2a, weights="none" ...) that are not drawn.

    Besides World's fields: `weights` is "array" or "none", `epilogue` True or False.
    """
    draw = random.Random(seed)
    rng = np.random.default_rng(seed)

    def choose(name, *options):
        drawn = draw.choice(options)
        return fixed[name] if name in fixed else drawn

    token_format = choose("token_format", *FACTS)
    preshuffle = choose("fuse_a_scale_preshuffle", token_format == "mxfp4_rows" and draw.random() < 0.5)
    skip_a2a = choose("skip_a2a", False, False, True)
    shared = choose("fused_shared_expert", False, False, True)
    weighted = shared or choose("weights", "array", "array", "none") != "none"
    with_epilogue = weighted and choose("epilogue", False, True)
    dtype = choose("combine_dtype", "bf16", "bf16", "bf16", "fp16", "fp32")

    size = draw.random()
    alignment = choose("alignment", 16, 16, 16, 32, 64, 128)
    large = size < limits.large_share
    tall = (
        limits.large_share <= size < 2 * limits.large_share
        and limits.tokens >= 40
        # experts of several scale tiles
        and not fixed.keys() & {"n_local_experts", "top_k", "max_tokens_per_rank"}
    )
    n_ranks = choose("n_ranks", *range(1, limits.ranks + 1))
    n_local = choose("n_local_experts", *range(1, limits.local_experts + 1), 1, 2, 3, 4)
    n_experts = n_ranks * n_local
    top_k = choose("top_k", draw.randint(1, min(limits.top_k, n_experts)))
    hidden = choose("hidden", draw_hidden(draw, token_format, preshuffle, limits.hidden))
    if tall:
        n_local, n_experts, top_k = 1, n_ranks, 1
        hidden = fixed.get("hidden", 256 if preshuffle else FACTS[token_format].hidden_unit)
    affordable = 2 * max(1, limits.work // (n_ranks * top_k * hidden))
    most = 150 if tall else limits.tokens if large else min(limits.tokens, affordable)
    most = min(most, fixed.get("max_tokens_per_rank", most))
    counts = draw_tokens(draw, n_ranks, most)
    if skip_a2a:
        counts = [counts[0]] * n_ranks
    hot = draw.sample(range(n_experts), draw.randint(1, min(2, n_experts))) if draw.random() < 0.4 else []
    missing = draw.choice((0.0, 0.0, 0.2, 0.7, 1.0 if draw.random() < 0.1 else 0.1))
    topk_ids = [draw_topk_ids(draw, n, top_k, n_experts, missing, hot) for n in counts]
    tokens = [numbers(rng, "bf16", (n, hidden)) for n in counts]
    if skip_a2a:  # tensor-parallel attention: all ranks hold the same tokens
        topk_ids, tokens = [topk_ids[0]] * n_ranks, [tokens[0]] * n_ranks

    outputs_kind = str(rng.choice(VALUE_KINDS))
    weights_kind = str(rng.choice(("ordinary", "coarse", "salted", "ordinary", "tiny", "anything")))
    world = World(
        n_ranks=n_ranks,
        n_local_experts=n_local,
        top_k=top_k,
        hidden=hidden,
        max_tokens_per_rank=fixed.get("max_tokens_per_rank", max(1, max(counts) + draw.choice((0, 0, 1, 3)))),
        token_format=token_format,
        tokens=tokens,
        topk_ids=topk_ids,
        fused_shared_expert=shared,
        skip_a2a=skip_a2a,
        allreduce_world_size=n_ranks if skip_a2a and shared else 1,
        fuse_a_scale_preshuffle=preshuffle,
        combine_dtype=dtype,
        alignment=alignment,
        routed_outputs=[numbers(rng, dtype, (n, top_k, hidden), outputs_kind) for n in counts],
        name=f"seed {seed}",
    )
    if token_format == "nvfp4" and draw.random() < 0.7:
        world.input_scale = [to_positive(b) for b in numbers(rng, "fp32", (n_ranks,), "ordinary")]
    if shared:
        world.shared_outputs = [numbers(rng, dtype, (n, hidden), outputs_kind) for n in counts]
    if weighted:
        world.weights = [numbers(rng, "fp32", (n, top_k), weights_kind) for n in counts]
        # the weight of an id of -1 must not matter
        for ids, weights in zip(topk_ids, world.weights):
            for row, w in zip(ids, weights):
                for k, expert in enumerate(row):
                    if expert == -1 and draw.random() < 0.5:
                        w[k] = 0x7FC00000
    if with_epilogue:
        world.gain = [numbers(rng, "fp32", (hidden,), "coarse") for _ in counts]
        world.bias = [numbers(rng, "fp32", (max(n, 1),), "coarse") for n in counts]
        world.epilogue = exact_epilogue(world.gain, world.bias)
    return world


SAME_CONFIGURATION = (
    "n_ranks",
    "n_local_experts",
    "top_k",
    "hidden",
    "max_tokens_per_rank",
    "token_format",
    "fused_shared_expert",
    "skip_a2a",
    "fuse_a_scale_preshuffle",
    "combine_dtype",
    "alignment",
)


def next_round(world, seed, limits=Limits()):
    """Another world of the same configuration: other tokens, routing, weights and epilogue."""
    return random_world(seed, limits, **{name: getattr(world, name) for name in SAME_CONFIGURATION})


def to_positive(bits):
    return bits & 0x7FFFFFFF


def describe(world):
    """One line that rebuilds the world: its seed and configuration."""
    options = [name for name in ("fused_shared_expert", "skip_a2a", "fuse_a_scale_preshuffle") if getattr(world, name)]
    return (
        f"{world.name}: n_ranks={world.n_ranks} n_experts={world.n_experts} top_k={world.top_k} "
        f"hidden={world.hidden} max_tokens_per_rank={world.max_tokens_per_rank} "
        f"num_tokens={[len(t) for t in world.tokens]} token_format={world.token_format} "
        f"combine_dtype={world.combine_dtype} alignment={world.alignment} "
        f"weights={'array' if world.weights else 'none'} "
        f"epilogue={'yes' if world.epilogue else 'none'} {' '.join(options)}"
    )
