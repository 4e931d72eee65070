"""Every token format, combine type and option of the plain kernels, against the reference."""

import numpy as np
import pytest
from plain_world import PlainWorld, assert_same
from rounds import routing, run_round

import epmoe_ref
from epmoe.device import add_rn, f32, mul_rn
from epmoe.kernels import plain
from epmoe.kernels.plain.arguments import DTYPES, capacity
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

TWO = dict(n_ranks=2, n_experts=4, top_k=2, max_tokens_per_rank=4)
FORMATS = {
    "fp8_blockwise": dict(hidden=128),
    "nvfp4": dict(hidden=64),
    "mxfp4": dict(hidden=128),
    "mxfp8": dict(hidden=128),
    "mxfp4_rows": dict(hidden=32),
    "mxfp4_rows, shuffled scales": dict(hidden=256, fuse_a_scale_preshuffle=True),
}
OPTIONS = {
    "fp32": (dict(combine_dtype="fp32", hidden=8), [4, 3]),
    "fp16": (dict(combine_dtype="fp16", hidden=8), [4, 3]),
    "wide alignment": (dict(alignment=64, hidden=24), [4, 3]),
    "shared expert": (dict(fused_shared_expert=True, hidden=8), [4, 3]),
    "shared expert, padded rows": (dict(fused_shared_expert=True, hidden=128, token_format="fp8_blockwise"), [3, 2]),
    "shared expert, tiles": (dict(fused_shared_expert=True, hidden=64, token_format="nvfp4"), [3, 2]),
    "skip_a2a": (dict(skip_a2a=True, p2p_world_size=1, hidden=8), [4, 4]),
    "skip_a2a, shared expert": (
        dict(skip_a2a=True, fused_shared_expert=True, allreduce_world_size=2, hidden=8),
        [3, 3],
    ),
    "skip_a2a with use_shmem": (dict(skip_a2a=True, use_shmem=True, p2p_world_size=1, hidden=8), [4, 4]),
    "a shared expert shared by twice as many ranks": (
        dict(skip_a2a=True, fused_shared_expert=True, hidden=8, allreduce_world_size=4),
        [3, 3],
    ),
    "a shared expert that every rank has whole": (
        dict(skip_a2a=True, fused_shared_expert=True, hidden=8, allreduce_world_size=1),
        [3, 3],
    ),
    "top_k above 32": (dict(n_experts=34, top_k=33, hidden=8), [1, 1]),
    "two p2p worlds": (dict(use_shmem=True, p2p_world_size=1, hidden=8), [4, 3]),
    "two p2p worlds of two": (dict(n_ranks=4, n_experts=8, use_shmem=True, p2p_world_size=2, hidden=8), [2, 1, 0, 2]),
}


@pytest.mark.by_day
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_exact(name, fused):
    cfg = EPConfig(**TWO, **FORMATS[name], token_format=name.partition(",")[0])
    run_round(
        PlainWorld(cfg, fused=fused), np.random.default_rng(1), [4, 3], input_scale=0.375 if name == "nvfp4" else None
    )


@pytest.mark.by_day(9)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_exact(name, fused):
    options, counts = OPTIONS[name]
    run_round(PlainWorld(EPConfig(**{**TWO, **options}), fused=fused), np.random.default_rng(2), counts)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_without_router_weights_rows_come_back_unreduced(fused):
    cfg = EPConfig(**TWO, hidden=8)
    world = PlainWorld(cfg, fused=fused, reducing=dict(router_weights_wrapper=None))
    run_round(world, np.random.default_rng(3), [4, 3])


@pytest.mark.parametrize("input_type, dtype", [("fp16", np.float16), ("fp32", np.float32)])
def test_tokens_of_other_types_are_rounded_once_to_bf16(input_type, dtype):
    cfg = EPConfig(**TWO, hidden=24, alignment=64)
    world = PlainWorld(cfg, sending=dict(input_type=input_type))
    run_round(world, np.random.default_rng(4), [4, 3], input_dtype=dtype)


def token_weights(token, k, table, factor):
    return mul_rn(table[token, k], factor)


def scaled(token, col, value, bias, offset):
    return add_rn(mul_rn(value, bias[col]), f32(token + offset))


def stored(token, col, value, bias, out):
    out[token, col] = mul_rn(value, bias[col])


def rows_back(world, rng):
    """(outputs, dispatched) of a world after one dispatch."""
    cfg = world.cfg
    ids = routing(cfg, rng, [4, 3])
    tokens = [rng.normal(size=(len(i), cfg.hidden)).astype("bfloat16") for i in ids]
    got = world.dispatch(tokens, ids)
    return [rng.normal(size=(capacity(cfg), cfg.hidden)).astype(DTYPES[cfg.combine_dtype]) for _ in ids], got


def functions_agree(**options):
    """Router weights and an epilogue as functions with arguments, against the reference."""
    cfg, rng = EPConfig(**TWO, hidden=8), np.random.default_rng(5)
    reducing = dict(router_weights_wrapper=token_weights, epilogue_fn=scaled)
    world = PlainWorld(cfg, reducing=reducing, **options)
    outputs, d = rows_back(world, rng)
    tables = [rng.normal(size=(x.num_tokens, 2)).astype(np.float32) for x in d]
    bias = rng.normal(size=8).astype(np.float32)
    got = world.combine(outputs, d, [(t, 0.75) for t in tables], [(bias, 3)] * 2)
    right = epmoe_ref.combine(
        cfg,
        outputs,
        d,
        router_weights=[mul_rn(t, np.float32(0.75)) for t in tables],
        epilogue=lambda token, col, value, bias, offset: add_rn(
            mul_rn(value, bias[col]), (token + offset).astype(np.float32)
        ),
        epilogue_args=(bias, 3),
    )
    for rank in range(2):
        assert_same(got[rank], right[rank], f"combined of rank {rank}")


def output_lambda_stores(**options):
    """What an output lambda stores is the epilogue's result; nothing else is stored."""
    cfg, rng = EPConfig(**TWO, hidden=8), np.random.default_rng(6)
    world = PlainWorld(cfg, reducing=dict(elementwise_lambda_fn=stored), **options)
    outputs, d = rows_back(world, rng)
    weights = [rng.normal(size=(x.num_tokens, 2)).astype(np.float32) for x in d]
    bias, own = rng.normal(size=8).astype(np.float32), np.zeros((4, 8), np.float32)
    got = world.combine(outputs, d, [(w,) for w in weights], [(bias, own)] * 2)
    right = epmoe_ref.combine(cfg, outputs, d, router_weights=weights)
    for rank in range(2):
        assert (got[rank].view(np.uint16) == 0xFFFF).all(), "output_tokens was written"
        by_it = world.buffers[rank, "epilogue_args1"].read(np.float32, (4, 8))[: d[rank].num_tokens]
        product = mul_rn(right[rank].astype(np.float32), bias[None])
        assert_same(by_it, product, f"stored on rank {rank}")


def test_router_weights_and_epilogue_may_be_functions_with_arguments():
    functions_agree()


def test_an_output_lambda_stores_its_results_itself():
    output_lambda_stores()


def test_missing_weights_and_pointers_and_differing_names_are_refused():
    cfg = EPConfig(**TWO, hidden=8)
    world = PlainWorld(cfg)
    outputs, d = rows_back(world, np.random.default_rng(7))
    with pytest.raises(EPValueError, match="router_weights_args"):
        world.combine(outputs, d)
    world.peers = lambda rank, name: (world.at(rank, name),)
    with pytest.raises(EPValueError, match="has 1 entries; p2p_world_size=2"):
        rows_back(world, np.random.default_rng(7))
    with pytest.raises(EPValueError, match="n_experts=5 differs from 4"):
        plain.dispatch_kernel(cfg, n_experts=5)
    with pytest.raises(EPValueError, match="router_weights_wrapper=None returns the rows unreduced"):
        plain.combine_wait_kernel(cfg, epilogue_fn=scaled)
