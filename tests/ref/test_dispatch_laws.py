"""Dispatch: which rows a rank gets, in which order, with which payload."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from small_worlds import FORMAT_IDS, FORMATS, as_bytes, assert_same, config, every_option, topk_ids, world

from epmoe_ref import EPValueError, dispatch, format_of, segments, shared_expert_share

formats = pytest.mark.parametrize("name, slots, hidden", FORMATS, ids=FORMAT_IDS)


def expected_rows(cfg, ids, rank):
    """(group, src_rank, token, k) of each row of a rank, by going through all pairs one at a time; None pads."""
    sources = [rank] if cfg.skip_a2a else range(cfg.n_ranks)
    multiple = format_of(cfg).pad_rows
    groups = []
    if cfg.fused_shared_expert:
        first, n_rows = shared_expert_share(cfg, rank, len(ids[rank]))
        groups.append([(0, rank, first + i, None) for i in range(n_rows)])
    for local in range(cfg.n_local_experts):
        expert = rank * cfg.n_local_experts + local
        groups.append(
            [
                (len(groups), src, t, k)
                for src in sources
                for t in range(len(ids[src]))
                for k in range(cfg.top_k)
                if ids[src][t, k] == expert
            ]
        )
    return [rows + [None] * (-len(rows) % multiple) for rows in groups]


@formats
def test_every_pair_arrives_once_in_the_order_expert_source_token_slot(name, slots, hidden):
    for cfg in every_option(name, slots, hidden):
        x, ids = world(cfg, hot=5)
        for rank, d in enumerate(dispatch(cfg, x, ids)):
            groups = expected_rows(cfg, ids, rank)
            rows = [row for group in groups for row in group]
            assert d.row_offsets.tolist() == [0, *np.cumsum([len(group) for group in groups])]
            assert d.row_offsets.dtype == np.uint32
            assert d.expert_ids.tolist() == list(range(cfg.n_groups))
            assert d.expert_ids.dtype == np.int32
            want = [[-1, -1] if row is None or row[3] is None else [*row[2:]] for row in rows]
            assert d.src_info.tolist() == want and d.src_info.dtype == np.int32
            assert len(d.output_tokens) == len(rows) == d.row_offsets[-1]
            assert np.array_equal(d.topk_ids, ids[rank]) and d.topk_ids.dtype == np.int32
            assert d.num_tokens == len(ids[rank])


@formats
def test_a_row_is_what_the_format_decodes_of_its_token(name, slots, hidden):
    for cfg in every_option(name, slots, hidden):
        x, ids = world(cfg, hot=5)
        fmt = format_of(cfg)
        sent = [fmt.decode(fmt.encode(tokens)) for tokens in x]
        for rank, d in enumerate(dispatch(cfg, x, ids)):
            for group, rows in enumerate(expected_rows(cfg, ids, rank)):
                for i, row in enumerate(rows):
                    at = int(d.row_offsets[group]) + i
                    if row is None:
                        assert not as_bytes(d.output_tokens[at]).any()
                        continue
                    values, scales = sent[row[1]]
                    assert np.array_equal(as_bytes(d.output_tokens[at]), as_bytes(values[row[2]]))
                    if scales is not None:
                        assert np.array_equal(as_bytes(scales_of_row(cfg, d, group, i)), as_bytes(scales[row[2]]))


def scales_of_row(cfg, d, group, r):
    """The scales of row r of a group, by the formulas of the layouts."""
    scales, row = d.output_scales, int(d.row_offsets[group]) + r
    k = np.arange(format_of(cfg).n_scales())
    if cfg.token_format == "fp8_blockwise":
        return scales[:, row]
    if cfg.token_format != "mxfp4_rows":
        tile = int(d.row_offsets[group]) // 128 + int(d.scales_offset[group]) + r // 128
        return scales[tile, k // 4, r % 32, (r % 128) // 32, k % 4]
    if not cfg.fuse_a_scale_preshuffle:
        return scales[row]
    n, m_pad = len(k), -(-cfg.n_ranks * cfg.max_tokens_per_rank // 32) * 32
    return scales.ravel()[
        group * m_pad * n
        + (r // 16) % 2
        + 2 * ((k // 4) % 2)
        + 4 * (r % 16)
        + 64 * (k % 4)
        + 256 * (k // 8)
        + 32 * n * (r // 32)
    ]


@formats
def test_scales_that_belong_to_no_row_are_zero(name, slots, hidden):
    for cfg in every_option(name, slots, hidden):
        x, ids = world(cfg)
        # so every scale byte that is used is not 0
        x = [np.full(tokens.shape, 3, bfloat16) for tokens in x]
        for rank, d in enumerate(dispatch(cfg, x, ids)):
            if d.output_scales is not None:
                groups = expected_rows(cfg, ids, rank)
                used = sum(row is not None for group in groups for row in group)
                of_scales = as_bytes(d.output_scales).reshape(d.output_scales.size, -1)
                assert of_scales.any(axis=1).sum() == used * format_of(cfg).n_scales()


@formats
def test_fields_have_the_types_and_shapes_of_the_format(name, slots, hidden):
    cfg = config(name, slots, hidden)
    d = dispatch(cfg, *world(cfg))[0]
    rows = int(d.row_offsets[-1])
    fp4 = (np.uint8, (rows, hidden // 2))
    tokens = {"bf16": (bfloat16, (rows, hidden)), "nvfp4": fp4, "mxfp4": fp4, "mxfp4_rows": fp4}
    dtype, shape = tokens.get(name, ("float8_e4m3fn", (rows, hidden)))
    assert d.output_tokens.dtype == dtype and d.output_tokens.shape == shape
    if name == "bf16":
        assert d.output_scales is None
    n_tiles = sum(-(-int(n) // 128) for n in d.recv_count.sum(axis=1))
    scales = {
        "fp8_blockwise": (np.float32, (hidden // 128, rows)),
        "mxfp4_rows": ("float8_e8m0fnu", (4, 19, hidden // 256, 256) if slots else (rows, hidden // 32)),
        "nvfp4": ("float8_e4m3fn", (n_tiles, hidden // 64, 32, 4, 4)),
        "mxfp4": ("float8_e8m0fnu", (n_tiles, hidden // 128, 32, 4, 4)),
        "mxfp8": ("float8_e8m0fnu", (n_tiles, hidden // 128, 32, 4, 4)),
    }
    if name in scales:
        assert (d.output_scales.dtype, d.output_scales.shape) == scales[name]
    assert (d.scales_offset is not None) == (name in ("nvfp4", "mxfp4", "mxfp8"))


@formats
def test_recv_count_counts_segments(name, slots, hidden):
    for cfg in every_option(name, slots, hidden):
        x, ids = world(cfg)
        for rank, d in enumerate(dispatch(cfg, x, ids)):
            assert d.recv_count.shape == (4, cfg.n_src_ranks) and d.recv_count.dtype == np.int32
            for local in range(4):
                for index, src in enumerate([rank] if cfg.skip_a2a else range(4)):
                    assert d.recv_count[local, index] == np.count_nonzero(ids[src] == 4 * rank + local)
            rows = [i for s in segments(d) for i in range(s.start, s.end)]
            assert rows == np.flatnonzero(d.src_info[:, 0] >= 0).tolist()


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
