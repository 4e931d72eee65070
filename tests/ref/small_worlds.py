"""Seeded worlds for the laws of the reference: uneven and empty ranks, ids of -1, hot experts."""

import numpy as np
from ml_dtypes import bfloat16

from epmoe_ref import EPConfig

# (token_format, fuse_a_scale_preshuffle, hidden)
FORMATS = [
    ("bf16", False, 24),
    ("fp8_blockwise", False, 256),
    ("nvfp4", False, 128),
    ("mxfp4", False, 256),
    ("mxfp8", False, 128),
    ("mxfp4_rows", False, 96),
    ("mxfp4_rows", True, 512),
]
FORMAT_IDS = [name + "_slots" * slots for name, slots, _ in FORMATS]
NUM_TOKENS = [13, 0, 40, 150]


def config(token_format="bf16", slots=False, hidden=24, *, n_ranks=4, n_experts=16, top_k=4, max_tokens=150, **options):
    return EPConfig(
        n_ranks,
        n_experts,
        top_k,
        hidden,
        max_tokens,
        token_format=token_format,
        fuse_a_scale_preshuffle=slots,
        **options,
    )


def every_option(token_format, slots, hidden):
    """The configurations of one format: shared expert on/off x all-to-all or skipped."""
    for shared in (False, True):
        for skip_a2a in (False, True):
            yield config(
                token_format, slots, hidden, fused_shared_expert=shared, skip_a2a=skip_a2a, allreduce_world_size=4
            )


def topk_ids(cfg, num_tokens, rng, *, empty_slots=0.2, hot=None):
    """Distinct ids in each token; a share of the ids is -1; `hot` is an expert that every token selects."""
    weights = rng.random((num_tokens, cfg.n_experts))
    if hot is not None:
        weights[:, hot] = 2
    ids = np.argsort(-weights, axis=1)[:, : cfg.top_k]
    ids = rng.permuted(ids, axis=1) if num_tokens else ids
    ids[rng.random(ids.shape) < empty_slots] = -1
    return ids


def tokens(cfg, num_tokens, rng):
    """Random bf16 of very different magnitudes, with zeros."""
    x = rng.standard_normal((num_tokens, cfg.hidden)) * np.exp2(rng.integers(-12, 12, (num_tokens, cfg.hidden)))
    x[rng.random(x.shape) < 0.05] = 0
    return x.astype(bfloat16)


def world(cfg, seed=0, *, hot=None, num_tokens=NUM_TOKENS):
    """(input_tokens, topk_ids), lists over ranks; under skip_a2a all ranks hold the same."""
    rng = np.random.default_rng(seed)
    counts = [num_tokens[-1]] if cfg.skip_a2a else num_tokens
    x = [tokens(cfg, n, rng) for n in counts]
    ids = [topk_ids(cfg, n, rng, hot=hot) for n in counts]
    return (x * cfg.n_ranks, ids * cfg.n_ranks) if cfg.skip_a2a else (x, ids)


def as_bytes(array):
    """The bytes of an array, for comparisons in which NaN equals itself and -0 differs from 0."""
    return np.ascontiguousarray(array).view(np.uint8)


def assert_same(got, want, where=""):
    """Two Dispatched are equal to the bit, field by field."""
    for name, value in vars(want).items():
        other = getattr(got, name)
        if value is None or isinstance(value, int):
            assert other == value, f"{where} {name}: {other} instead of {value}"
            continue
        assert other.shape == value.shape and other.dtype == value.dtype, f"{where} {name}"
        if other.size and not np.array_equal(as_bytes(other), as_bytes(value)):
            raise AssertionError(f"{where} {name} differs at {np.argwhere(as_bytes(other) != as_bytes(value))[0]}")
