"""Dispatch: empty worlds, shares of the shared expert, forms of arguments. Which rows a rank gets: tests/oracle."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from small_worlds import as_bytes, assert_same, config, topk_ids, world

from epmoe_ref import EPValueError, dispatch, format_of, segments, shared_expert_share


def test_nothing_sent_is_an_empty_result():
    cfg = config(fused_shared_expert=True)
    for ids in ([np.empty((0, 4), int)] * 4, [np.full((3, 4), -1)] * 4):
        n = len(ids[0])
        for d in dispatch(cfg, [np.ones((n, 24), bfloat16)] * 4, ids):
            assert d.row_offsets.tolist() == [0, n, n, n, n, n] and not d.recv_count.any()
            assert d.output_tokens.shape == (n, 24) and d.topk_ids.shape == (n, 4)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 8, 11])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ranks_share_the_shared_expert_by_their_number_modulo_the_world_size(world, num_tokens):
    """The shares cover every token once: they are those of array_split."""
    cfg = config(skip_a2a=True, fused_shared_expert=True, allreduce_world_size=world)
    parts = [len(p) for p in np.array_split(np.arange(num_tokens), world)]
    for rank in range(cfg.n_ranks):
        share = sum(parts[: rank % world]), parts[rank % world]
        assert shared_expert_share(cfg, rank, num_tokens) == share
    assert shared_expert_share(config(fused_shared_expert=True), 3, num_tokens) == (0, num_tokens)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int64, np.uint64])
def test_any_integer_type_of_ids_and_any_strides(dtype):
    cfg = config()
    rng = np.random.default_rng(3)
    x, _ = world(cfg)
    ids = [topk_ids(cfg, len(tokens), rng, empty_slots=0) for tokens in x]
    want = dispatch(cfg, x, ids)
    got = dispatch(cfg, [np.asfortranarray(t) for t in x], [np.repeat(i, 2, axis=1)[:, ::2].astype(dtype) for i in ids])
    for rank in range(4):
        assert_same(got[rank], want[rank])


def test_inputs_are_left_alone_and_results_are_copies():
    cfg = config()
    x, ids = world(cfg)
    before = [as_bytes(t).copy() for t in x], [i.copy() for i in ids]
    for d in dispatch(cfg, x, ids):
        d.output_tokens[:] = 0
        d.topk_ids[:] = 0
    assert all(np.array_equal(as_bytes(t), b) for t, b in zip(x, before[0]))
    assert all(np.array_equal(i, b) for i, b in zip(ids, before[1]))


def test_one_rank_one_expert_one_token():
    cfg = config(n_ranks=1, n_experts=1, top_k=1, hidden=8, max_tokens=1)
    d = dispatch(cfg, [np.arange(8).astype(bfloat16)[None]], [[[0]]])[0]
    assert d.output_tokens.astype(int).tolist() == [list(range(8))] and d.src_info.tolist() == [[0, 0]]


def test_input_scale_is_a_number_a_list_or_a_function_read_at_zero():
    cfg = config("nvfp4", False, 128)
    x, ids = world(cfg)
    read = []

    def scale(i):
        read.append(i)
        return np.float32(32)

    same = [dispatch(cfg, x, ids, input_scale=s) for s in (32, [32.0] * 4, scale)]
    for rank in range(4):
        assert_same(same[1][rank], same[0][rank])
        assert_same(same[2][rank], same[0][rank])
    assert read == [0]
    per_rank = dispatch(cfg, x, ids, input_scale=[1, 2, 32, 4])
    fmt = format_of(cfg)
    for s in segments(per_rank[1]):
        token = per_rank[1].src_info[s.start : s.end, 0]
        values, _ = fmt.decode(fmt.encode(x[s.src_rank], [1, 2, 32, 4][s.src_rank]))
        assert np.array_equal(per_rank[1].output_tokens[s.start : s.end], values[token])


def test_other_formats_do_not_even_look_at_the_input_scale():
    cfg = config("mxfp8", False, 128)
    x, ids = world(cfg)
    assert_same(dispatch(cfg, x, ids, input_scale=lambda i: 1 / 0)[0], dispatch(cfg, x, ids)[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_tokens_of_other_types_are_rounded_once_to_bf16(dtype):
    cfg = config(n_experts=4, top_k=1, hidden=8)
    x = [np.linspace(-3, 300, 16).reshape(2, 8).astype(dtype) for _ in range(cfg.n_ranks)]
    ids = [np.array([[0], [3]])] * cfg.n_ranks
    got, right = dispatch(cfg, x, ids), dispatch(cfg, [a.astype(bfloat16) for a in x], ids)
    assert all(
        np.array_equal(g.output_tokens.view(np.uint16), r.output_tokens.view(np.uint16)) for g, r in zip(got, right)
    )
    with pytest.raises(EPValueError, match="for the bf16 format also float16 or float32"):
        dispatch(
            config(n_experts=4, top_k=1, hidden=128, token_format="mxfp8"),
            [np.zeros((1, 128), dtype)] * cfg.n_ranks,
            [np.array([[0]])] * cfg.n_ranks,
        )
