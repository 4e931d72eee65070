"""Combine: every row returns to its (token, k), the sum is rounded once a step, and options act where they should."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from small_worlds import FORMAT_IDS, FORMATS, as_bytes, config, every_option, world

from epmoe_ref import add_rn, combine, dispatch, fma_rn, format_of, mul_rn, segments, shared_expert_share

DTYPES = {"bf16": bfloat16, "fp16": np.float16, "fp32": np.float32}


def dispatched_world(cfg, seed=0, **kwargs):
    x, ids = world(cfg, seed, **kwargs)
    return x, ids, dispatch(cfg, x, ids)


def random_outputs(cfg, d, seed=1):
    """Expert outputs that differ everywhere; rows that no one may read hold NaN."""
    rng = np.random.default_rng(seed)
    outputs = []
    for one in d:
        y = rng.standard_normal((len(one.src_info), cfg.hidden)) * np.exp2(rng.integers(-9, 9, (len(one.src_info), 1)))
        shared = np.zeros(len(y), bool)
        if cfg.fused_shared_expert:
            shared[: one.row_offsets[1]] = True
        y[(one.src_info[:, 0] < 0) & ~shared] = np.nan
        outputs.append(y.astype(DTYPES[cfg.combine_dtype]))
    return outputs


def random_weights(cfg, d, seed=2):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((one.num_tokens, cfg.top_k)).astype(np.float32) for one in d]


def row_of_pair(cfg, d, rank, token, slot):
    """(owner, row) of a pair, found by looking through src_info; None if the pair takes no part."""
    expert = int(d[rank].topk_ids[token, slot])
    if expert < 0 or (cfg.skip_a2a and expert // 4 != rank):
        return None
    owner, src = expert // 4, 0 if cfg.skip_a2a else rank
    for s in segments(d[owner]):
        if (s.local_expert, s.src_rank) == (expert % 4, src):
            at = np.flatnonzero((d[owner].src_info[s.start : s.end] == (token, slot)).all(axis=1))
            return owner, s.start + int(at[0])
    raise AssertionError("the pair was not dispatched")


def expected(cfg, y, d, rank, token, weights, epilogue=None):
    """One combined row, one k at a time, from the specification."""
    dtype = DTYPES[cfg.combine_dtype]
    acc = np.zeros(cfg.hidden, np.float32)
    for k in range(cfg.top_k):
        place = row_of_pair(cfg, d, rank, token, k)
        if place is not None:
            acc = fma_rn(weights[rank][token, k], y[place[0]][place[1]].astype(np.float32), acc)
    value = acc.astype(dtype)
    if cfg.fused_shared_expert:
        first, n_rows = shared_expert_share(cfg, rank, d[rank].num_tokens)
        mine = first <= token < first + n_rows
        value = value + (y[rank][token - first] if mine else np.zeros(cfg.hidden, dtype))
    if epilogue is not None:
        value = epilogue(np.int32(token), np.arange(cfg.hidden, dtype=np.int32), value.astype(np.float32)).astype(dtype)
    return value


@pytest.mark.parametrize("name, slots, hidden", FORMATS, ids=FORMAT_IDS)
def test_round_trip_without_weights_gives_each_slot_its_row(name, slots, hidden):
    for skip_a2a in (False, True):
        cfg = config(name, slots, hidden, skip_a2a=skip_a2a)
        x, ids, d = dispatched_world(cfg)
        y = random_outputs(cfg, d)
        for rank, out in enumerate(combine(cfg, y, d)):
            assert out.shape == (d[rank].num_tokens, 4, hidden) and out.dtype == bfloat16
            for token in range(0, d[rank].num_tokens, 7):
                for slot in range(4):
                    place = row_of_pair(cfg, d, rank, token, slot)
                    want = np.zeros(hidden, bfloat16) if place is None else y[place[0]][place[1]]
                    assert np.array_equal(as_bytes(out[token, slot]), as_bytes(want))


def test_identity_experts_return_every_bit_pattern():
    cfg = config(hidden=64, max_tokens=1024)
    rows = np.arange(65536, dtype=np.uint16).view(bfloat16).reshape(1024, 64)
    ids = np.argsort(np.random.default_rng(0).random((1024, 16)), axis=1)[:, :4]
    d = dispatch(cfg, [rows] * 4, [ids] * 4)
    for out in combine(cfg, [one.output_tokens for one in d], d):
        assert np.array_equal(as_bytes(out), as_bytes(np.repeat(rows[:, None], 4, axis=1)))


@pytest.mark.parametrize("combine_dtype", DTYPES)
def test_weighted_sum_is_k_ascending_with_one_rounding_a_step(combine_dtype):
    for base in every_option("bf16", False, 24):
        options = {name: getattr(base, name) for name in ("fused_shared_expert", "skip_a2a", "allreduce_world_size")}
        cfg = config(combine_dtype=combine_dtype, **options)
        _, _, d = dispatched_world(cfg)
        y, w = random_outputs(cfg, d), random_weights(cfg, d)
        for rank, out in enumerate(combine(cfg, y, d, router_weights=w)):
            assert out.shape == (d[rank].num_tokens, 24) and out.dtype == DTYPES[combine_dtype]
            for token in range(d[rank].num_tokens):
                want = expected(cfg, y, d, rank, token, w)
                assert np.array_equal(as_bytes(out[token]), as_bytes(want)), (rank, token)


def test_another_order_of_slots_gives_other_bits():
    """So the law above tests the order, not only the terms."""
    cfg = config(combine_dtype="fp32")
    x, ids, d = dispatched_world(cfg)
    y, w = random_outputs(cfg, d), random_weights(cfg, d)
    turned = dispatch(cfg, x, [i[:, ::-1] for i in ids])
    rows = [np.empty_like(one) for one in y]
    for rank in range(4):
        for s, t in zip(segments(turned[rank]), segments(d[rank])):
            rows[rank][s.start : s.end] = y[rank][t.start : t.end]
    other = combine(cfg, rows, turned, router_weights=[i[:, ::-1].copy() for i in w])
    mine = combine(cfg, y, d, router_weights=w)
    assert np.allclose(mine[3], other[3], rtol=1e-3, atol=1e-3) and not np.array_equal(mine[3], other[3])


@pytest.mark.parametrize("name, slots, hidden", FORMATS[:3], ids=FORMAT_IDS[:3])
def test_the_order_of_rows_inside_segments_does_not_matter(name, slots, hidden):
    cfg = config(name, slots, hidden, fused_shared_expert=True)
    _, _, d = dispatched_world(cfg)
    y, w = random_outputs(cfg, d), random_weights(cfg, d)
    want = combine(cfg, y, d, router_weights=w)
    rng = np.random.default_rng(4)
    for one, rows in zip(d, y):
        for s in segments(one):
            order = s.start + rng.permutation(s.end - s.start)
            one.src_info[s.start : s.end], rows[s.start : s.end] = one.src_info[order], rows[order]
    for got, out in zip(combine(cfg, y, d, router_weights=w), want):
        assert np.array_equal(as_bytes(got), as_bytes(out))


def test_skipped_slots_add_nothing_whatever_their_weight():
    for skip_a2a in (False, True):
        cfg = config(skip_a2a=skip_a2a)
        _, _, d = dispatched_world(cfg)
        y, w = random_outputs(cfg, d), random_weights(cfg, d)
        want = combine(cfg, y, d, router_weights=w)
        for rank in range(4):
            skipped = d[rank].topk_ids < 0
            if skip_a2a:
                skipped |= d[rank].topk_ids // 4 != rank
            assert skipped.any() or not len(skipped)
            w[rank][skipped] = np.nan
        for got, out in zip(combine(cfg, y, d, router_weights=w), want):
            assert np.array_equal(as_bytes(got), as_bytes(out))
            assert not np.isnan(got.astype(np.float32)).any()


def test_a_token_without_experts_becomes_plus_zero():
    cfg = config(top_k=2, n_ranks=1, n_experts=2, hidden=8)
    d = dispatch(cfg, [np.ones((2, 8), bfloat16)], [[[-1, -1], [-1, 1]]])
    out = combine(cfg, [np.full((1, 8), 3, bfloat16)], d, router_weights=[np.full((2, 2), -2, np.float32)])[0]
    assert not as_bytes(out[0]).any() and (out[1] == -6).all()


def test_rows_with_src_info_outside_are_not_sent():
    cfg = config(n_ranks=1, n_experts=2, top_k=1, hidden=8)
    d = dispatch(cfg, [np.ones((5, 8), bfloat16)], [[[0], [0], [0], [1], [1]]])
    y = [np.arange(1, 6).astype(bfloat16)[:, None].repeat(8, axis=1)]
    d[0].src_info[:] = [[-1, 0], [0, 1], [150, 0], [1, -1], [3, 0]]
    for weights in (None, [np.ones((5, 1), np.float32)]):
        out = combine(cfg, y, d, router_weights=weights)[0].reshape(5, 8)
        assert out[:, 0].tolist() == [0, 0, 0, 5, 0]


def test_src_info_that_points_at_another_experts_slot_is_followed():
    """Only (token, k) counts; the expert id there is not read again."""
    cfg = config(n_ranks=2, n_experts=2, top_k=1, hidden=8)
    d = dispatch(cfg, [np.ones((2, 8), bfloat16), np.ones((0, 8), bfloat16)], [[[0], [1]], np.empty((0, 1), int)])
    d[0].src_info[0], d[1].src_info[0] = (1, 0), (0, 0)
    out = combine(cfg, [np.full((1, 8), 5, bfloat16), np.full((1, 8), 7, bfloat16)], d)
    assert out[0][:, 0, 0].tolist() == [7, 5]


def test_spare_rows_of_expert_outputs_are_not_read():
    cfg = config("fp8_blockwise", False, 128, fused_shared_expert=True)
    _, _, d = dispatched_world(cfg)
    y, w = random_outputs(cfg, d), random_weights(cfg, d)
    want = combine(cfg, y, d, router_weights=w)
    more = [np.concatenate([rows, np.full((9, 128), np.nan, bfloat16)]) for rows in y]
    for got, out in zip(combine(cfg, more, d, router_weights=w), want):
        assert np.array_equal(as_bytes(got), as_bytes(out))
        assert not np.isnan(got.astype(np.float32)).any()


def test_weights_as_a_function_equal_the_array_it_fills():
    cfg = config()
    _, _, d = dispatched_world(cfg)
    y = random_outputs(cfg, d)
    tables = [np.random.default_rng(rank).random((one.num_tokens, 4)).astype(np.float32) for rank, one in enumerate(d)]

    def weight(token, k, table, factor):
        return mul_rn(table[token, k], factor)

    got = combine(cfg, y, d, router_weights=weight, router_weights_args=(tables, 0.3))
    want = combine(cfg, y, d, router_weights=[mul_rn(table, 0.3) for table in tables])
    assert all(np.array_equal(as_bytes(a), as_bytes(b)) for a, b in zip(got, want))
    ones = combine(cfg, y, d, router_weights=lambda token, k: 1.0)
    assert np.array_equal(ones[3], combine(cfg, y, d, router_weights=[np.ones_like(t) for t in tables])[3])


@pytest.mark.parametrize("combine_dtype", DTYPES)
def test_the_epilogue_gets_the_rounded_value_after_the_shared_expert_and_is_rounded_once(combine_dtype):
    for skip_a2a in (False, True):
        cfg = config(combine_dtype=combine_dtype, fused_shared_expert=True, skip_a2a=skip_a2a, allreduce_world_size=4)
        _, _, d = dispatched_world(cfg)
        y, w = random_outputs(cfg, d), random_weights(cfg, d)
        bias = [np.linspace(rank, 1, 24).astype(np.float32) for rank in range(4)]

        def epilogue(token, col, value, bias, factor):
            assert value.dtype == np.float32
            assert np.array_equal(value, value.astype(DTYPES[combine_dtype]).astype(np.float32))
            return add_rn(fma_rn(value, factor, bias[col]), token)

        got = combine(cfg, y, d, router_weights=w, epilogue=epilogue, epilogue_args=(bias, 1.1))
        for rank, out in enumerate(got):
            for token in range(0, d[rank].num_tokens, 3):
                want = expected(cfg, y, d, rank, token, w, lambda t, c, v: epilogue(t, c, v, bias[rank], 1.1))
                assert np.array_equal(as_bytes(out[token]), as_bytes(want)), (rank, token)


def test_an_output_lambda_stores_what_the_epilogue_would_and_nothing_else_is_stored():
    cfg = config(combine_dtype="fp16", fused_shared_expert=True)
    _, _, d = dispatched_world(cfg)
    y, w = random_outputs(cfg, d), random_weights(cfg, d)
    bias = [np.linspace(rank, 1, 24).astype(np.float32) for rank in range(4)]
    stored = [np.full((r.num_tokens, 24), 7, np.float16) for r in d]

    def store(token, col, value, out, bias):
        out[token, col] = add_rn(value, bias[col])

    stores = dict(elementwise_lambda_fn=store, epilogue_args=(stored, bias))
    assert combine(cfg, y, d, router_weights=w, **stores) == [None] * 4
    adds = dict(epilogue=lambda t, c, v, b: add_rn(v, b[c]), epilogue_args=(bias,))
    want = combine(cfg, y, d, router_weights=w, **adds)
    assert all(np.array_equal(as_bytes(a), as_bytes(b)) for a, b in zip(stored, want))


def test_an_epilogue_may_ignore_the_value():
    cfg = config()
    _, _, d = dispatched_world(cfg)
    y, w = random_outputs(cfg, d), random_weights(cfg, d)
    out = combine(cfg, y, d, router_weights=w, epilogue=lambda token, col, value: col)[2]
    assert out.shape == (40, 24) and (out.astype(int) == np.arange(24)).all()


def test_shared_expert_is_added_in_the_output_type():
    """257 + 1: in bf16 the routed sum becomes 256, and so does 256 + 1; in float32 it would have become 258."""
    cfg = config(n_ranks=1, n_experts=1, top_k=1, hidden=8, fused_shared_expert=True)
    d = dispatch(cfg, [np.ones((1, 8), bfloat16)], [[[0]]])
    y = np.array([[1] * 8, [256] * 8]).astype(bfloat16)
    out = combine(cfg, [y], d, router_weights=[np.float32([[257 / 256]])])[0]
    assert (out == 256).all()


def test_a_share_of_one_token_or_none_is_added_where_it_belongs():
    cfg = config(n_experts=4, top_k=1, hidden=8, fused_shared_expert=True, skip_a2a=True, allreduce_world_size=4)
    d = dispatch(cfg, [np.ones((3, 8), bfloat16)] * 4, [[[-1]] * 3] * 4)
    y = [np.full((len(one.src_info), 8), 10 + rank, bfloat16) for rank, one in enumerate(d)]
    out = combine(cfg, y, d, router_weights=[np.ones((3, 1), np.float32)] * 4)
    assert [one[:, 0].tolist() for one in out] == [[10, 0, 0], [0, 11, 0], [0, 0, 12], [0, 0, 0]]


def test_under_skip_a2a_the_sum_over_ranks_is_the_whole_layer():
    cfg = config(skip_a2a=True, combine_dtype="fp32")
    whole = config(n_ranks=1, combine_dtype="fp32")
    x, ids, d = dispatched_world(cfg)
    one = dispatch(whole, x[:1], ids[:1])
    w = [np.ones((one[0].num_tokens, 4), np.float32)]
    integers = [d_.output_tokens.astype(np.float32).round() for d_ in (*d, *one)]
    got = combine(cfg, integers[:4], d, router_weights=w * 4)
    assert np.array_equal(sum(got), combine(whole, integers[4:], one, router_weights=w)[0])


def test_more_tokens_than_one_block():
    cfg = config(hidden=2048, n_ranks=2, n_experts=8, max_tokens=150)
    x, ids, d = dispatched_world(cfg, num_tokens=[150, 37])
    y, w = [one.output_tokens for one in d], random_weights(cfg, d)
    out = combine(cfg, y, d, router_weights=w)
    for rank in range(2):
        acc = np.zeros((len(x[rank]), 2048), np.float32)
        for k in range(4):
            there = ids[rank][:, k] >= 0
            acc[there] = fma_rn(w[rank][there, k, None], x[rank][there].astype(np.float32), acc[there])
        assert np.array_equal(as_bytes(out[rank]), as_bytes(acc.astype(bfloat16)))
    assert format_of(cfg).token_size() == 4096
