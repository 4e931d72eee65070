"""Combine: rows that are not read, forms of arguments, shares. Sums and their rounding: tests/oracle."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from small_worlds import FORMAT_IDS, FORMATS, as_bytes, config, world

from epmoe_ref import add_rn, combine, dispatch, fma_rn, mul_rn, segments

DTYPES = {"bf16": bfloat16, "fp16": np.float16, "fp32": np.float32}


def dispatched_world(cfg, **kwargs):
    x, ids = world(cfg, **kwargs)
    return x, ids, dispatch(cfg, x, ids)


def random_outputs(cfg, d):
    """Expert outputs that differ everywhere; rows that no one may read hold NaN."""
    rng = np.random.default_rng(1)
    outputs = []
    for one in d:
        y = rng.standard_normal((len(one.src_info), cfg.hidden)) * np.exp2(rng.integers(-9, 9, (len(one.src_info), 1)))
        shared = np.zeros(len(y), bool)
        if cfg.fused_shared_expert:
            shared[: one.row_offsets[1]] = True
        y[(one.src_info[:, 0] < 0) & ~shared] = np.nan
        outputs.append(y.astype(DTYPES[cfg.combine_dtype]))
    return outputs


def random_weights(cfg, d):
    rng = np.random.default_rng(2)
    return [rng.standard_normal((one.num_tokens, cfg.top_k)).astype(np.float32) for one in d]


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


def test_a_row_that_is_sent_to_a_skipped_pair_adds_nothing():
    cfg = config(n_ranks=1, n_experts=2, top_k=1, hidden=8)
    d = dispatch(cfg, [np.ones((2, 8), bfloat16)], [[[0], [-1]]])
    d[0].src_info[0] = (1, 0)
    for weights in (None, [np.ones((2, 1), np.float32)]):
        assert not combine(cfg, [np.full((1, 8), 5, bfloat16)], d, router_weights=weights)[0].any()


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


def test_an_output_lambda_stores_what_the_epilogue_would_and_nothing_else_is_stored():
    cfg = config(combine_dtype="fp16", fused_shared_expert=True)
    _, _, d = dispatched_world(cfg)
    y, w = random_outputs(cfg, d), random_weights(cfg, d)
    bias = [np.linspace(rank, 1, 24).astype(np.float32) for rank in range(4)]
    stored = [np.full((r.num_tokens, 24), 7, np.float16) for r in d]

    def store(token, col, value, out, bias):
        assert value.dtype == np.float32
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


def test_a_share_of_one_token_or_none_is_added_where_it_belongs():
    cfg = config(n_experts=4, top_k=1, hidden=8, fused_shared_expert=True, skip_a2a=True, allreduce_world_size=4)
    d = dispatch(cfg, [np.ones((3, 8), bfloat16)] * 4, [[[-1]] * 3] * 4)
    y = [np.full((len(one.src_info), 8), 10 + rank, bfloat16) for rank, one in enumerate(d)]
    out = combine(cfg, y, d, router_weights=[np.ones((3, 1), np.float32)] * 4)
    assert [one[:, 0].tolist() for one in out] == [[10, 0, 0], [0, 11, 0], [0, 0, 12], [0, 0, 0]]


def test_more_tokens_than_one_block():
    cfg = config(hidden=2048, n_ranks=2, n_experts=8, max_tokens=150)
    x, ids, d = dispatched_world(cfg, num_tokens=[150, 37])
    y, w = [one.output_tokens for one in d], random_weights(cfg, d)
    out = combine(cfg, y, d, router_weights=w, epilogue=lambda token, col, value: add_rn(value, token))
    for rank in range(2):
        acc = np.zeros((len(x[rank]), 2048), np.float32)
        for k in range(4):
            there = ids[rank][:, k] >= 0
            acc[there] = fma_rn(w[rank][there, k, None], x[rank][there].astype(np.float32), acc[there])
        want = add_rn(acc.astype(bfloat16), np.arange(len(acc))[:, None]).astype(bfloat16)
        assert np.array_equal(as_bytes(out[rank]), as_bytes(want))
