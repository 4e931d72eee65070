"""Options of combine: weights as array, function or none; epilogues with arguments; the three output types."""

import numpy as np
import pytest
from kernel_world import COMBINE, KernelWorld
from protocol_model import check_dispatch, combine
from test_dispatch_combine_rounds import assert_clean, rows_of

from epmoe.device import add_rn, mul_rn
from epmoe.kernels import combine_kernel, combine_wait_kernel
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

BASE = dict(n_ranks=2, n_experts=6, top_k=3, hidden=24, max_tokens_per_rank=5)
N = [5, 4]


def scaled_bias(token, col, value, scale, bias, token_bias, step):
    return add_rn(add_rn(mul_rn(value, scale), bias[col]), token_bias[token, step])


def table_weight(token, k, table, scale):
    return mul_rn(table[token, k], scale)


def run(cfg, fused, *, weights=None, weights_args=(), epilogue=None, epilogue_args=(), seed=1, **options):
    """One round with experts that scale by the expert's id + 2: (ids, rows of any token at any expert, output)."""
    dtype = COMBINE[cfg.combine_dtype]
    rng = np.random.default_rng(seed)
    world = KernelWorld(cfg, fused=fused, seed=seed, racecheck=True, epilogue=epilogue, **options)
    ids = [np.stack([rng.permutation(cfg.n_experts)[: cfg.top_k] for _ in range(n)]) for n in N]
    ids[0][1, 2] = -1
    tokens = [rows_of(rng, n, cfg) for n in N]

    def output(src, t, e):
        return (tokens[src][t].astype(np.float32) * np.float32(e + 2)).astype(dtype)

    rows = []
    for rank, d in enumerate(world.dispatch(tokens, ids)):
        block = np.full((world.capacity(), cfg.hidden), np.nan, dtype)
        for i, (src, t, group) in enumerate(check_dispatch(cfg, rank, ids, d)):
            block[i] = output(src, t, rank * cfg.n_local_experts + group)
        rows.append(block)
    out = world.combine(rows, N, weights, weights_args, epilogue_args)
    assert_clean(world)
    return ids, output, out


def assert_same(got, expected):
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    assert got.shape == expected.shape
    assert (got.view(unsigned) == expected.view(unsigned)).all()


@pytest.mark.by_day(3)
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("dtype", COMBINE)
def test_without_weights_rows_are_moved(dtype, fused):
    cfg = EPConfig(**BASE, combine_dtype=dtype)
    ids, output, out = run(cfg, fused, router_weights=None)
    for rank in range(2):
        assert_same(out[rank], combine(cfg, rank, ids, output, None, COMBINE[dtype]))
    assert (out[0][1, 2] == 0).all(), "the slot without an expert"


@pytest.mark.by_day(3)
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("dtype", COMBINE)
def test_epilogue_and_weights_by_functions(dtype, fused):
    cfg = EPConfig(**BASE, combine_dtype=dtype)
    rng = np.random.default_rng(9)
    tables = [rng.random((n, 3)).astype(np.float32) for n in N]
    bias = rng.random(24).astype(np.float32)
    token_bias = [rng.random((n, 2)).astype(np.float32) for n in N]
    ids, output, out = run(
        cfg,
        fused,
        router_weights=table_weight,
        weights_args=[(t, np.float32(0.3)) for t in tables],
        epilogue=scaled_bias,
        epilogue_args=[(np.float32(1.7), bias, b, 1) for b in token_bias],
    )
    for rank in range(2):
        weights = tables[rank] * np.float32(0.3)

        def epilogue(t, cols, values):
            return values * np.float32(1.7) + bias[cols] + token_bias[rank][t, 1]

        assert_same(out[rank], combine(cfg, rank, ids, output, weights, COMBINE[dtype], epilogue=epilogue))


def test_one_world_may_change_its_arguments():
    """Arguments of functions travel with each launch."""
    cfg = EPConfig(**BASE)
    world = KernelWorld(cfg, epilogue=lambda token, col, value, shift: add_rn(value, shift))
    tokens = [np.ones((n, cfg.hidden)).astype(COMBINE["bf16"]) for n in N]
    ids = [np.tile([0, 3, -1], (n, 1)) for n in N]
    weights = [np.full((n, 3), 0.5, np.float32) for n in N]
    for shift in (1.0, 2.0):
        world.dispatch(tokens, ids)
        rows = [np.ones((world.capacity(), cfg.hidden))] * 2
        out = world.combine(rows, N, weights, epilogue_args=[(np.float32(shift),)] * 2)
        assert all((o == 1 + shift).all() for o in out)


def test_combinations_without_meaning_are_refused():
    cfg = EPConfig(**BASE)
    for factory in (combine_wait_kernel, combine_kernel):
        with pytest.raises(EPValueError, match="an epilogue needs router_weights"):
            factory(cfg, router_weights=None, epilogue=scaled_bias)
        with pytest.raises(EPValueError, match="fused_shared_expert needs router_weights"):
            factory(EPConfig(**BASE, fused_shared_expert=True), router_weights=None)
        with pytest.raises(EPValueError, match="router_weights=0.5"):
            factory(cfg, router_weights=0.5)
