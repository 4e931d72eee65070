"""The state machine of the protocol gives the results of dispatch and combine, in every legal order, round after round."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_rounds import expert_outputs, run
from small_worlds import FORMAT_IDS, FORMATS, as_bytes, assert_same, config, every_option, world

from epmoe_ref import EPConfig, add_rn, canonical, combine, dispatch, fma_rn, mul_rn, strategies
from epmoe_ref.protocol import World


def assert_equal(got, want):
    assert got.shape == want.shape and got.dtype == want.dtype
    assert np.array_equal(as_bytes(got), as_bytes(want))


def weight(token, k, table, factor):
    return mul_rn(table[token, k], factor)


def epilogue(token, col, value, bias):
    return add_rn(fma_rn(value, np.float32(1.25), bias[col]), token)


def options_of(kind, cfg, world, rank):
    """The options of combine for all ranks (rank None), or for one: router weights in three ways, and an epilogue."""

    def own(of_ranks):
        return of_ranks if rank is None else of_ranks[rank]

    bias = np.linspace(-2, 2, cfg.hidden, dtype=np.float32)
    return {
        "unreduced": dict(router_weights=None),
        "array": dict(router_weights=own(world.router_weights)),
        "function": dict(router_weights=weight, router_weights_args=(own(world.router_weights), 0.5)),
        "epilogue": dict(router_weights=own(world.router_weights), epilogue=epilogue, epilogue_args=(bias,)),
    }[kind]


def assert_rounds(cfg, rounds, seed, kind="array", scales=None):
    results, returned = run(
        cfg, rounds, seed, options=lambda world, rank: options_of(kind, cfg, world, rank), scales=scales, fill=0xA5
    )
    for one, (dispatched, combined), tables in zip(rounds, results, returned):
        want = dispatch(cfg, one.input_tokens, one.topk_ids, input_scale=scales or 1.0)
        for got, wanted in zip(dispatched, want):
            assert_same(canonical(got), wanted)
        outputs = [expert_outputs(cfg, d, rank, tables) for rank, d in enumerate(want)]
        wanted = combine(cfg, outputs, want, **options_of(kind, cfg, one, None))
        for got, value in zip(combined, wanted):
            assert_equal(got, value)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_worlds_of_all_formats_and_options(data):
    cfg = data.draw(strategies.configs())
    one_round = strategies.worlds(cfg, kinds=("integers", "normal"))
    rounds = [data.draw(one_round) for _ in range(data.draw(st.integers(1, 3)))]
    kinds = ["array", "function", "epilogue"] + ["unreduced"] * (not cfg.fused_shared_expert)
    scales = [data.draw(st.sampled_from([0.25, 1.0, 3.0])) for _ in range(cfg.n_ranks)]
    assert_rounds(cfg, rounds, data.draw(st.integers(0, 2**31)), data.draw(st.sampled_from(kinds)), scales)


@pytest.mark.parametrize("form", FORMATS, ids=FORMAT_IDS)
def test_every_format_with_and_without_shared_expert_and_exchange(form):
    for seed, cfg in enumerate(every_option(*form)):
        cfg = replace(cfg, max_tokens_per_rank=7)
        x, ids = world(cfg, seed, num_tokens=[3, 0, 7, 5])
        weights = [np.linspace(-1, 1, i.size, dtype=np.float32).reshape(i.shape) for i in ids]
        assert_rounds(cfg, [strategies.World(cfg, x, ids, weights)] * 2, seed)


def test_several_p2p_worlds_and_input_scales_and_functions():
    cfg = EPConfig(4, 8, 2, 64, 6, token_format="nvfp4", p2p_world_size=2, use_shmem=True, combine_dtype="fp32")
    x, ids = world(cfg, 3, num_tokens=[6, 1, 0, 4])
    machine, scales = World(cfg), [0.5, 1.0, 2.0, 3.0]
    ways = [scales[0], scales, lambda i: np.float32(scales[2]), np.float32(scales[3])]
    for rank in range(4):
        machine.dispatch_async(rank, x[rank], ids[rank], input_scale=ways[rank])
    got = [machine.dispatch_wait(rank) for rank in range(4)]
    want = dispatch(cfg, x, ids, input_scale=scales)
    for a, b in zip(got, want):
        assert_same(a, b)  # in (token, k) order, since no other claims were asked for
    y = [np.full((len(d.src_info), 64), rank, np.float32) for rank, d in enumerate(got)]
    for rank in range(4):
        machine.combine_async(rank, y[rank], got[rank].src_info)

    def weight(token, k, scale):
        return np.float32(scale) * (token + k)

    def epilogue(token, col, value, bias):
        return value + bias[col]

    bias, stored = np.arange(64, dtype=np.float32), np.zeros((6, 64), np.float32)
    options = dict(router_weights=weight, router_weights_args=(0.5,), epilogue=epilogue, epilogue_args=(bias,))
    wanted = combine(cfg, y, want, **options)
    for rank in range(1, 4):
        assert_equal(machine.combine_wait(rank, **options), wanted[rank])

    def store(token, col, value, bias):
        stored[token, col] = value + bias[col]

    assert machine.combine_wait(0, **options | dict(epilogue=None, elementwise_lambda_fn=store)) is None
    assert_equal(stored, wanted[0])


def test_tokens_of_fp16_and_float32_are_rounded_once():
    cfg = config(n_ranks=2, n_experts=4, top_k=2, hidden=16, max_tokens=5)
    x, ids = world(cfg, 5, num_tokens=[5, 2])
    for dtype in (np.float16, np.float32):
        wide = [(tokens.astype(np.float32) * np.float32(1.003)).astype(dtype) for tokens in x]
        machine = World(cfg)
        for rank in range(2):
            machine.dispatch_async(rank, wide[rank], ids[rank])
        for rank, want in enumerate(dispatch(cfg, wide, ids)):
            assert_same(machine.dispatch_wait(rank), want)


def test_a_row_that_names_no_place_of_its_rank_is_not_sent_but_counted():
    cfg = config(n_ranks=1, n_experts=2, top_k=1, hidden=8, max_tokens=4)
    x, ids = world(cfg, 1, num_tokens=[4])
    ids = [np.zeros_like(ids[0])]
    machine = World(cfg, fill=0x11)
    machine.dispatch_async(0, x[0], ids[0])
    d = machine.dispatch_wait(0)
    d.src_info[1:] = [[4, 0], [-1, 0], [2, 1]]
    machine.combine_async(0, x[0], d.src_info)
    assert machine.ranks[0].combine_recv_count[0, 0] == 4
    out = machine.combine_wait(0)
    assert_equal(out[0, 0], x[0][0])
    assert (as_bytes(out[1:]) == 0x11).all()
