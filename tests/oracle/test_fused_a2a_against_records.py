"""epmoe_ref.fused_a2a against lists of records with exact sums, forward and backward, in random worlds.

EPMOE_A2A_WORLDS=3000 runs that many worlds instead of the sample.
"""

import os
import random

import numpy as np
import pytest
from api_arrays import BIT_TYPES, DTYPES, array
from exact_formats import encode_token
from fused_a2a_records import ExpertRows, RankRows, kind_of
from random_worlds import draw_tokens, draw_topk_ids, numbers

WORLDS = int(os.environ.get("EPMOE_A2A_WORLDS", "90"))
BATCHES = 6
POISON = {"bf16": 0xFFFF, "fp16": 0xFFFF, "fp32": 0xFFFFFFFF}


def fused_a2a():
    import epmoe_ref.fused_a2a

    return epmoe_ref.fused_a2a


def same_bits(what, actual, expected, dtype, shape):
    actual = np.asarray(actual)
    assert actual.shape == shape and actual.dtype == DTYPES[dtype], (what, actual.dtype, actual.shape, shape)
    wanted = np.array(expected, BIT_TYPES[dtype]).reshape(shape)
    bits = np.ascontiguousarray(actual).view(BIT_TYPES[dtype])
    nan = np.vectorize(kind_of(dtype).is_nan_bits, otypes=[bool])
    wrong = (bits != wanted) & ~(nan(bits) & nan(wanted)) if bits.size else bits != wanted
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(f"{what}{list(at)} is 0x{int(bits[at]):x}, expected 0x{int(wanted[at]):x}")


def same_numbers(what, actual, expected, dtype, shape):
    actual = np.asarray(actual)
    assert actual.dtype == dtype and actual.shape == shape, (what, actual.dtype, actual.shape, shape)
    assert actual.tolist() == np.array(expected, dtype).reshape(shape).tolist(), (what, actual.tolist(), expected)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_rows_of_ranks(batch):
    """FusedDispatch and FusedCombine."""
    for seed in range(batch, WORLDS, BATCHES):
        draw, rng = random.Random(seed), np.random.default_rng(seed)
        n_ranks, local = draw.randint(1, 4), draw.randint(1, 5)
        n_experts = n_ranks * local
        k = draw.randint(1, min(6, n_experts))
        hidden, dtype = draw.choice((8, 16, 40)), draw.choice(list(DTYPES))
        counts = draw_tokens(draw, n_ranks, 9)
        ids = [draw_topk_ids(draw, n, k, n_experts, draw.choice((0, 0.2, 0.8)), []) for n in counts]
        x = [numbers(rng, dtype, (n, hidden)) for n in counts]
        probs = [numbers(rng, "fp32", (n, k)) for n in counts]
        model, kind = RankRows(ids, n_experts), kind_of(dtype)
        ns = [len(rows) for rows in model.rows]
        arrays = [array(v, dtype, (n, hidden)) for v, n in zip(x, counts)]

        recv_x, recv_ids, recv_probs, per_expert, handle = fused_a2a().dispatch_forward(
            arrays,
            [np.array(i, np.int64).reshape(n, k) for i, n in zip(ids, counts)],
            [array(p, "fp32", (n, k)) for p, n in zip(probs, counts)],
            n_experts,
        )
        grads = [numbers(rng, dtype, (n, hidden)) for n in ns]
        grad_probs = [numbers(rng, "fp32", (n, k)) for n in ns]
        grad_arrays = [array(g, dtype, (n, hidden)) for g, n in zip(grads, ns)]
        grad_x, grad_p = fused_a2a().dispatch_backward(
            handle, grad_arrays, [array(g, "fp32", (n, k)) for g, n in zip(grad_probs, ns)]
        )
        combined = fused_a2a().combine_forward(grad_arrays, handle)
        back = fused_a2a().combine_backward(handle, arrays)

        moved, summed = model.moved(x), model.returned(grads, kind, hidden)
        local_probs = model.local_probs(probs)
        summed_probs = model.returned(grad_probs, kind_of("fp32"), k)
        for r in range(n_ranks):
            at, received, sent = f"seed {seed}, rank {r}: ", ns[r], counts[r]
            for what, actual, expected, dtype_of_it, shape in (
                ("recv_x", recv_x, moved, dtype, (received, hidden)),
                ("combine's grad_x", back, moved, dtype, (received, hidden)),
                ("recv_token_probs", recv_probs, local_probs, "fp32", (received, k)),
                ("combined_x", combined, summed, dtype, (sent, hidden)),
                ("dispatch's grad_x", grad_x, summed, dtype, (sent, hidden)),
                ("grad_token_probs", grad_p, summed_probs, "fp32", (sent, k)),
            ):
                same_bits(at + what, actual[r], expected[r], dtype_of_it, shape)
            of_rank = model.rows[r]
            for what, actual, expected, shape in (
                ("recv_token_indices", recv_ids, model.local_indices()[r], (received, k)),
                ("tokens_per_expert", per_expert, model.tokens_per_expert()[r], (local,)),
                ("src_rank", handle.src_rank, [src for src, _ in of_rank], (received,)),
                ("src_token", handle.src_token, [token for _, token in of_rank], (received,)),
            ):
                same_numbers(at + what, actual[r], expected, np.int64, shape)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_rows_of_experts(batch):
    """HybridEPDispatch and HybridEPCombine: padding, overflow, several p2p worlds."""
    overflows = 0
    for seed in range(batch, WORLDS, BATCHES):
        draw, rng = random.Random(1_000_000 + seed), np.random.default_rng(seed)
        n_ranks, local = draw.randint(1, 4), draw.randint(1, 4)
        dtype = draw.choice(("bf16", "bf16", "fp16"))
        n_experts, hidden = n_ranks * local, draw.choice((8, 24))
        counts = draw_tokens(draw, n_ranks, 8)
        density = draw.choice((0, 0.2, 0.5, 1))
        routing = [[[draw.random() < density for _ in range(n_experts)] for _ in range(n)] for n in counts]
        pad = draw.choice((None, None, 1, 4, 5))
        p2p = draw.choice([d for d in (1, 2, 3, 4) if n_ranks % d == 0])
        exact = ExpertRows(routing, local, None, pad, p2p)
        size = draw.choice(
            (None, 0, 3, max(map(len, exact.rows)), max(map(len, exact.rows)) + 2, max(map(len, exact.rows)) * 2 // 3)
        )
        model, kind = ExpertRows(routing, local, size, pad, p2p), kind_of(dtype)
        overflows += sum(model.overflow)
        x = [numbers(rng, dtype, (n, hidden)) for n in counts]
        probs = [numbers(rng, "fp32", (n, n_experts)) for n in counts] if draw.random() < 0.7 else None
        arrays = [array(v, dtype, (n, hidden)) for v, n in zip(x, counts)]

        hidden_rows, row_probs, scales, per_expert, handle = fused_a2a().hybrid_dispatch_forward(
            arrays,
            [np.array(m, bool).reshape(n, n_experts) for m, n in zip(routing, counts)],
            None if probs is None else [array(p, "fp32", (n, n_experts)) for p, n in zip(probs, counts)],
            local,
            num_permuted_tokens=size,
            pad_multiple=pad,
            p2p_world_size=p2p,
        )
        ps = [len(rows) for rows in model.rows]
        grads = [numbers(rng, dtype, (p, hidden)) for p in ps]
        grad_probs = [numbers(rng, "fp32", (p,)) for p in ps]
        for rows, g, of_probs in zip(model.rows, grads, grad_probs):
            for place, row in enumerate(rows):
                if row is None:  # what must not be read is NaN
                    g[place], of_probs[place] = [POISON[dtype]] * hidden, POISON["fp32"]
        grad_arrays = [array(g, dtype, (p, hidden)) for g, p in zip(grads, ps)]
        given = None if probs is None else [array(g, "fp32", (p,)) for g, p in zip(grad_probs, ps)]
        grad_x, grad_p = fused_a2a().hybrid_dispatch_backward(handle, grad_arrays, given)
        combined = fused_a2a().hybrid_combine_forward(grad_arrays, handle)
        back = fused_a2a().hybrid_combine_backward(handle, arrays)

        moved, summed = model.moved(x, hidden), model.returned(grads, kind, hidden)
        for r in range(n_ranks):
            at, received, sent = f"seed {seed}, rank {r}: ", ps[r], counts[r]
            for what, actual, expected, shape in (
                ("dispatched_hidden", hidden_rows, moved, (received, hidden)),
                ("combine's grad_x", back, moved, (received, hidden)),
                ("combined", combined, summed, (sent, hidden)),
                ("dispatch's grad_x", grad_x, summed, (sent, hidden)),
            ):
                same_bits(at + what, actual[r], expected[r], dtype, shape)
            places = [(-1, -1, -1) if row is None else row for row in model.rows[r]]
            experts = [-1 if expert < 0 else expert % local for *_, expert in places]
            for what, actual, expected, type_of_it, shape in (
                ("tokens_per_expert", per_expert, model.tokens_per_expert[r], np.int64, (local,)),
                ("overflow", handle.overflow, [model.overflow[r]], np.int32, (1,)),
                ("src_rank", handle.src_rank, [src for src, *_ in places], np.int64, (received,)),
                ("src_token", handle.src_token, [t for _, t, _ in places], np.int64, (received,)),
                ("local_expert", handle.local_expert, experts, np.int64, (received,)),
            ):
                same_numbers(at + what, actual[r], expected, type_of_it, shape)
            if probs is not None:
                of_rows, of_tokens = model.probs(probs)[r], model.probs_back(grad_probs)[r]
                same_bits(at + "dispatched_probs", row_probs[r], of_rows, "fp32", (received,))
                same_bits(at + "grad_probs", grad_p[r], of_tokens, "fp32", (sent, n_experts))
            else:
                assert each(row_probs, r) is None and each(grad_p, r) is None, at + "probs that were not given"
            assert each(scales, r) is None, at + "scaling factors without fp8_dispatch"
    assert overflows


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_experts_in_fp8(seed):
    """Each token is encoded once: its codes and scales lie in all of its rows, zeros in rows without a token."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    counts, local, size = draw_tokens(draw, 3, 8), 2, draw.choice((None, 7))
    routing = [[[draw.random() < 0.4 for _ in range(3 * local)] for _ in range(n)] for n in counts]
    x = [numbers(rng, "bf16", (n, 256)) for n in counts]
    rows, _, scales, *_ = fused_a2a().hybrid_dispatch_forward(
        [array(v, "bf16", (n, 256)) for v, n in zip(x, counts)],
        [np.array(m, bool).reshape(n, 3 * local) for m, n in zip(routing, counts)],
        None,
        local,
        num_permuted_tokens=size,
        pad_multiple=4,
        fp8_dispatch=True,
    )
    encoded = [[encode_token("fp8_blockwise", token) for token in own] for own in x]
    for r, of_rank in enumerate(ExpertRows(routing, local, size, 4, None).rows):
        wanted = [(bytes(256), bytes(8)) if row is None else encoded[row[0]][row[1]] for row in of_rank]
        assert rows[r].dtype == "float8_e4m3fn" and rows[r].shape == (len(of_rank), 256)
        assert rows[r].tobytes() == b"".join(codes for codes, _ in wanted)
        assert scales[r].dtype == np.float32 and scales[r].shape == (len(of_rank), 2)
        assert scales[r].tobytes() == b"".join(of_token for _, of_token in wanted)


def each(ranks, r):
    """A rank's entry of a list over ranks; None stands for a list of None."""
    return None if ranks is None else ranks[r]
