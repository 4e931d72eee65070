"""Worlds at the edges of the sizes, and arguments in every allowed form; both packages against the record model."""

import api_arrays
import exact_float32 as f32
import ml_dtypes
import numpy as np
import pytest
import record_model
from differences import combine_difference, dispatch_difference
from random_worlds import Limits, numbers, random_world
from runs import Different, one_round, reference_difference, require_none, simulator_difference

import epmoe_ref
from epmoe import ExpertParallel, LaunchConfig, LocalWorld, add_rn, mul_rn

SMALL = Limits(hidden=1, tokens=3, large_share=1.0)


def busy_world(limits=SMALL, **fixed):
    """The world of the first seed, with these fields, in which every rank has a token."""
    plain = dict(token_format="bf16", skip_a2a=False, fused_shared_expert=False)
    fixed = plain | dict(weights="array", hidden=8) | fixed
    worlds = (random_world(seed, limits, **fixed) for seed in range(500))
    return next(w for w in worlds if all(w.tokens))


TWO = dict(n_ranks=2, n_local_experts=2, top_k=2)
ONE = dict(n_ranks=1, n_local_experts=1, top_k=1)
SKIPPED = dict(skip_a2a=True, fused_shared_expert=True)
MXFP4_ROWS = dict(token_format="mxfp4_rows")
CORNERS = {
    "top_k 9: ids take two vectors": TWO | dict(n_local_experts=8, top_k=9),
    "top_k 32: every lane has a slot": TWO | dict(n_local_experts=16, top_k=32, max_tokens_per_rank=2),
    "top_k 17 of 34": TWO | dict(n_local_experts=17, top_k=17, max_tokens_per_rank=2),
    "5 ranks": dict(n_ranks=5, n_local_experts=2, top_k=3),
    "8 ranks, one expert each": dict(n_ranks=8, n_local_experts=1, top_k=4),
    "33 local experts": TWO | dict(n_local_experts=33, top_k=3),
    "130 local experts": dict(n_ranks=1, n_local_experts=130, top_k=5),
    "one of everything": ONE,
    "one of everything, skip_a2a": ONE | SKIPPED,
    "skip_a2a over 16 ranks": dict(n_ranks=16, n_local_experts=1, top_k=5) | SKIPPED,
    "hidden 8 in fp32": TWO | dict(combine_dtype="fp32"),
    "hidden 264": TWO | dict(hidden=264),
    "hidden 1032 in fp16": TWO | dict(hidden=1032, max_tokens_per_rank=2, combine_dtype="fp16"),
    "fp8_blockwise, shared, hidden 1152": TWO
    | dict(hidden=1152, token_format="fp8_blockwise", fused_shared_expert=True),
    "nvfp4, hidden 1088": TWO | dict(hidden=1088, token_format="nvfp4"),
    "mxfp4_rows, hidden 32": TWO | MXFP4_ROWS | dict(hidden=32, fuse_a_scale_preshuffle=False),
    "slots, hidden 1280": TWO | MXFP4_ROWS | dict(hidden=1280, fuse_a_scale_preshuffle=True),
}


@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.by_day(6)
def test_sizes_at_the_edges(name):
    world = busy_world(**CORNERS[name])
    assert reference_difference(world) is None
    # the smallest grid and blocks: the fewest threads for the most work
    difference = simulator_difference(world, fused=len(name) % 2 == 0, seed=7, launch=LaunchConfig(2, 32))
    assert difference is None, difference


def test_expert_ids_above_32767_travel_unsigned():
    world = busy_world(n_ranks=1, n_local_experts=65535, top_k=3)
    world.topk_ids[0] = [[65534, 32768, 0]] + [[32767, -1, 65533]] * (len(world.topk_ids[0]) - 1)
    difference = reference_difference(world)
    assert difference is None, difference


@pytest.mark.nightly
def test_expert_ids_above_32767_travel_unsigned_through_the_kernels():
    world = busy_world(n_ranks=1, n_local_experts=32770, top_k=3, max_tokens_per_rank=2)
    world.topk_ids[0] = [[32769, 32768, 0]] + [[32767, -1, 32769]] * (len(world.topk_ids[0]) - 1)
    # two blocks and no race detector: each walks the words of all experts
    difference = simulator_difference(
        world, fused=True, seed=None, racecheck=False, launch=LaunchConfig(2, 32), kernels="fast"
    )
    assert difference is None, difference


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("token_format", ["bf16", "fp8_blockwise", "nvfp4", "mxfp4_rows"])
def test_nothing_to_send(token_format, shared):
    """Tokens with only ids of -1 on rank 0, no token on rank 1."""
    hidden = {"bf16": 8, "fp8_blockwise": 128, "nvfp4": 64, "mxfp4_rows": 32}[token_format]
    options = dict(token_format=token_format, hidden=hidden, fused_shared_expert=shared)
    world = busy_world(**TWO, **options, fuse_a_scale_preshuffle=False)
    world.topk_ids[0] = [[-1, -1] for _ in world.topk_ids[0]]
    for name in ("tokens", "topk_ids", "weights", "routed_outputs"):
        getattr(world, name)[1] = []
    if shared:
        world.shared_outputs[1] = []
    world.epilogue = None
    assert reference_difference(world) is None
    for fused in (False, True):
        difference = simulator_difference(world, fused=fused, seed=3)
        assert difference is None, difference


def test_every_form_of_the_input_scale():
    world, pi = busy_world(**TWO, token_format="nvfp4", hidden=64), np.float32(np.pi)
    cfg, tokens, ids = api_arrays.config(world), api_arrays.input_tokens(world), api_arrays.topk_ids(world)
    for scale, of_rank_1 in ((float(pi), pi), (pi, pi), ([pi, 0.5], 0.5), (lambda i: np.float32(3.1415927), pi)):
        world.input_scale = np.array([pi, of_rank_1], np.float32).view(np.uint32).tolist()
        received, reference = record_model.dispatch(world), epmoe_ref.dispatch(cfg, tokens, ids, input_scale=scale)
        with ExpertParallel(cfg, LocalWorld(2), launch=LaunchConfig(2, 32)) as ep:
            kernel = [d.trimmed().numpy() for d in ep.dispatch(tokens, ids, input_scale=scale)]
        for rank in range(2):
            assert dispatch_difference(world, rank, received[rank], reference[rank], padding_is_zero=True) is None
            assert dispatch_difference(world, rank, received[rank], kernel[rank], padding_is_zero=False) is None


def by_place(token, col, value, shift, table, gain):
    """Uses the place as a number, a scalar, an int32 table and a bf16 table; exact intrinsics only."""
    return add_rn(mul_rn(value, gain[col]), mul_rn(shift, table[token, col % 2]))


def weight_by_place(token, k, table, bend):
    return mul_rn(table[k], bend[token])


def test_functions_with_scalars_and_tables_of_every_type():
    world = busy_world(**TWO, combine_dtype="bf16", epilogue=False)
    rng = np.random.default_rng(4)
    gain_bits = numbers(rng, "bf16", (2, 8), "ordinary")
    gain = [api_arrays.array(g, "bf16", (8,)) for g in gain_bits]
    table = [rng.integers(-5, 6, (len(t), 2)).astype(np.int32) for t in world.tokens]
    ks = np.array([3, -2], np.int32)
    bend_bits = [numbers(rng, "fp32", (len(t),), "ordinary") for t in world.tokens]
    bend = [api_arrays.array(b, "fp32", (len(b),)) for b in bend_bits]

    world.weights = [
        [[f32.to_bits(f32.mul(int(ks[k]) * f32.ONE, f32.from_bits(b))) for k in range(2)] for b in bits]
        for bits in bend_bits
    ]

    def exact(rank, token, column, value):
        scaled = f32.mul(value, f32.from_bits(gain_bits[rank][column] << 16))
        return f32.add(scaled, f32.mul(f32.from_bits(0x3FC00000), int(table[rank][token, column % 2]) * f32.ONE))

    world.epilogue = exact
    expected = record_model.combine(world)
    cfg, received = api_arrays.config(world), record_model.dispatch(world)
    keywords = dict(epilogue=by_place, epilogue_args=(1.5, table, gain), router_weights_args=(ks, bend))
    tokens, ids = api_arrays.input_tokens(world), api_arrays.topk_ids(world)
    reference = epmoe_ref.dispatch(cfg, tokens, ids)
    outputs = [api_arrays.expert_outputs(world, r, received[r], reference[r]) for r in range(2)]
    in_numpy = epmoe_ref.combine(cfg, outputs, reference, router_weights=weight_by_place, **keywords)
    with ExpertParallel(cfg, LocalWorld(2, seed=5)) as ep:
        dispatched = ep.dispatch(tokens, ids)
        outputs = [api_arrays.expert_outputs(world, r, received[r], dispatched[r].trimmed().numpy()) for r in range(2)]
        in_kernel = ep.combine(outputs, dispatched, weight_by_place, **keywords)
    for rank in range(2):
        for name, result in (("reference", in_numpy), ("kernels", in_kernel)):
            difference = combine_difference(world, rank, expected[rank], np.asarray(result[rank]))
            assert difference is None, f"{name}: {difference}"


@pytest.mark.parametrize("token_format", ["bf16", "fp8_blockwise"])
def test_expert_outputs_of_capacity_rows_and_results_in_the_callers_arrays(token_format):
    hidden = {"bf16": 8, "fp8_blockwise": 128}[token_format]
    options = dict(token_format=token_format, hidden=hidden, epilogue=False)
    world = busy_world(**TWO, **options, combine_dtype="bf16")
    cfg = api_arrays.config(world)
    received, expected = record_model.dispatch(world), record_model.combine(world)
    with ExpertParallel(cfg, LocalWorld(2)) as ep:
        dispatched = ep.dispatch(
            [np.repeat(t, 2, axis=1)[:, ::2] for t in api_arrays.input_tokens(world)],
            [np.asfortranarray(i) for i in api_arrays.topk_ids(world, np.int64)],
        )
        outputs = []
        for rank in range(2):
            exact = api_arrays.expert_outputs(world, rank, received[rank], dispatched[rank].trimmed().numpy())
            whole = np.full((ep.capacity, hidden), np.nan, ml_dtypes.bfloat16)
            whole[: len(exact)] = exact
            outputs.append(whole)
        mine = [np.full((len(t), hidden), np.nan, ml_dtypes.bfloat16) for t in world.tokens]
        ep.combine(outputs, dispatched, api_arrays.weights(world), out=mine)
    for rank in range(2):
        difference = combine_difference(world, rank, expected[rank], mine[rank])
        assert difference is None, difference


def test_a_used_round_is_left_behind_whole():
    """A large round, then a small one with ids of -1: no byte of the first may appear in the second."""
    fields = dict(n_ranks=2, n_local_experts=2, top_k=4, max_tokens_per_rank=4, hidden=8, combine_dtype="bf16")
    for weights in ("array", "none"):
        large = busy_world(weights=weights, **fields)
        small = busy_world(Limits(hidden=1, tokens=1, large_share=1.0), weights=weights, **fields)
        small.topk_ids = [[[-1, 0, -1, 3] for _ in ids] for ids in small.topk_ids]
        with ExpertParallel(api_arrays.config(large), LocalWorld(2)) as ep:
            for world in (large, small):
                expected = record_model.combine(world)
                combined = one_round(ep, world, fused=True)
                try:
                    require_none(combine_difference(world, r, expected[r], combined[r]) for r in range(2))
                except Different as e:
                    raise AssertionError(f"weights {weights}: {e}") from None
