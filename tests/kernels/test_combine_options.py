"""Options of combine, by fast and plain kernels: weights as function or none, epilogues with arguments, output types."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_world import FastWorld
from plain_world import PlainWorld
from rounds import assert_after_combine, assert_same, expert_outputs, normal, routing, run_round

import epmoe_ref
from epmoe.device import add_rn, mul_rn
from epmoe.kernels import combine_kernel, combine_wait_kernel, plain
from epmoe.kernels.plain.arguments import DTYPES
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

CFG = EPConfig(n_ranks=2, n_experts=6, top_k=3, hidden=24, max_tokens_per_rank=5, alignment=64)
TOKENS = [5, 4]


def made(kernels, cfg, weights, epilogue=None, **options):
    """A world of fast or plain kernels, with these functions."""
    if kernels == "fast":
        return FastWorld(cfg, router_weights=weights, epilogue=epilogue, racecheck=True, **options)
    return PlainWorld(cfg, reducing=dict(router_weights_wrapper=weights, epilogue_fn=epilogue), **options)


def every_kind(test):
    """Cases of a test: output types, split and fused, kernels; by day some of them."""
    for name, values in (("dtype", DTYPES), ("fused", [False, True]), ("kernels", ["fast", "plain"])):
        test = pytest.mark.parametrize(name, values)(test)
    return pytest.mark.by_day(4)(test)


@every_kind
def test_without_weights_rows_are_moved(dtype, fused, kernels):
    cfg = replace(CFG, combine_dtype=dtype)
    run_round(made(kernels, cfg, None, fused=fused), np.random.default_rng(3), TOKENS)


def scaled_bias(token, col, value, scale, bias, token_bias, step):
    return add_rn(add_rn(mul_rn(value, scale), bias[col]), token_bias[token, step])


def table_weight(token, k, table, scale):
    return mul_rn(table[token, k], scale)


def stored(token, col, value, bias, out):
    out[token, col] = mul_rn(value, bias[col])


def rows_back(world, rng):
    """(outputs, dispatched) of a world after one dispatch."""
    ids = routing(world.cfg, rng, TOKENS)
    got = world.dispatch([normal(rng, len(i), world.cfg.hidden) for i in ids], ids)
    return expert_outputs(world, rng, got), got


def functions_agree(world):
    """Router weights and an epilogue as functions with arguments, which travel with each launch."""
    cfg, rng, factor = world.cfg, np.random.default_rng(5), np.float32(0.3)
    for scale in (np.float32(1.7), np.float32(-2)):
        outputs, d = rows_back(world, rng)
        tables = [normal(rng, n, cfg.top_k, dtype=np.float32) for n in TOKENS]
        bias, of_tokens = (
            normal(rng, cfg.hidden, dtype=np.float32),
            [normal(rng, n, 2, dtype=np.float32) for n in TOKENS],
        )
        of_ranks = [(scale, bias, b, 1) for b in of_tokens]
        got = world.combine(outputs, d, [(t, factor) for t in tables], of_ranks)
        right = epmoe_ref.combine(
            cfg,
            outputs,
            d,
            router_weights=table_weight,
            router_weights_args=(tables, factor),
            epilogue=scaled_bias,
            epilogue_args=(scale, bias, of_tokens, 1),
        )
        for rank in range(2):
            assert_same(got[rank], right[rank], f"combined of rank {rank}")
        assert_after_combine(world)


@every_kind
def test_weights_and_epilogue_by_functions(dtype, fused, kernels):
    cfg = replace(CFG, combine_dtype=dtype)
    functions_agree(made(kernels, cfg, table_weight, scaled_bias, fused=fused))


def output_lambda_stores(**options):
    """What an output lambda stores is the epilogue's result; nothing else is stored."""
    rng, world = np.random.default_rng(6), PlainWorld(CFG, reducing=dict(elementwise_lambda_fn=stored), **options)
    outputs, d = rows_back(world, rng)
    weights = [normal(rng, n, CFG.top_k, dtype=np.float32) for n in TOKENS]
    bias, own = normal(rng, CFG.hidden, dtype=np.float32), np.zeros((5, CFG.hidden), np.float32)
    got = world.combine(outputs, d, [(w,) for w in weights], [(bias, own)] * 2)
    right = epmoe_ref.combine(CFG, outputs, d, router_weights=weights)
    for rank in range(2):
        assert (got[rank].view(np.uint16) == 0xFFFF).all(), "output_tokens was written"
        by_it = world.buffers["epilogue_args1", rank].read(np.float32, own.shape)[: TOKENS[rank]]
        assert_same(by_it, mul_rn(right[rank].astype(np.float32), bias[None]), f"stored on rank {rank}")


def test_an_output_lambda_stores_its_results_itself():
    output_lambda_stores()


@pytest.mark.parametrize("input_type, dtype", [("fp16", np.float16), ("fp32", np.float32)])
def test_tokens_of_other_types_are_rounded_once_to_bf16(input_type, dtype):
    world = PlainWorld(CFG, sending=dict(input_type=input_type))
    run_round(world, np.random.default_rng(4), TOKENS, input_dtype=dtype)


def test_missing_weights_and_pointers_and_differing_names_are_refused():
    world = PlainWorld(CFG)
    outputs, d = rows_back(world, np.random.default_rng(7))
    with pytest.raises(EPValueError, match="router_weights_args"):
        world.combine(outputs, d)
    world.peers = lambda rank, name: (world.at(rank, name),)
    with pytest.raises(EPValueError, match="has 1 entries; p2p_world_size=2"):
        rows_back(world, np.random.default_rng(7))
    with pytest.raises(EPValueError, match="n_experts=5 differs from 6"):
        plain.dispatch_kernel(CFG, n_experts=5)
    with pytest.raises(EPValueError, match="router_weights_wrapper=None returns the rows unreduced"):
        plain.combine_wait_kernel(CFG, epilogue_fn=scaled_bias)


@pytest.mark.parametrize("factory", [combine_wait_kernel, combine_kernel])
def test_combinations_without_meaning_are_refused(factory):
    with pytest.raises(EPValueError, match="an epilogue needs router_weights"):
        factory(CFG, router_weights=None, epilogue=scaled_bias)
    with pytest.raises(EPValueError, match="fused_shared_expert needs router_weights"):
        factory(replace(CFG, fused_shared_expert=True), router_weights=None)
    with pytest.raises(EPValueError, match="router_weights=0.5"):
        factory(CFG, router_weights=0.5)
