"""The counts of `epmoe routing` equal the reference: messages, rows, and rows of experts."""

import ml_dtypes
import numpy as np
import pytest

import epmoe_ref
from epmoe.routing_report import dump, report
from epmoe_ref import fused_a2a

WORLDS = [  # ranks, experts, top_k, hidden, tokens of each rank, share of ids of -1
    (4, 16, 3, 128, (5, 0, 9, 2), 0.2),
    (1, 4, 2, 128, (6,), 0.0),
    (2, 2, 1, 256, (3, 8), 0.5),
    (8, 64, 6, 128, (4,) * 8, 0.1),
    (3, 12, 12, 128, (2, 2, 1), 0.3),
]


def routed(n_ranks, n_experts, top_k, tokens, empty, seed=0):
    """Over ranks: ids, some of them -1."""
    rng = np.random.default_rng(seed)
    popularity = -np.log(1.0 + np.arange(n_experts))
    ids = [np.argsort(-(popularity + rng.gumbel(size=(n, n_experts))), axis=1)[:, :top_k] for n in tokens]
    return [np.where(rng.random(i.shape) < empty, -1, i) for i in ids]


def reported(ids, n_experts, **options):
    """The report of one step, with its ranks' tokens as given."""
    ends = np.cumsum([0, *map(len, ids)])
    found = dump.Dump([np.concatenate(ids).astype(np.int64)], n_experts=n_experts, rank_offsets=ends)
    return report.report(found, "test", n_ranks=len(ids), **options)


def between(n_ranks, src_of_each):
    """(all, of the busiest rank) things that leave their rank. src_of_each: over dst_ranks, the src_ranks."""
    sent = np.zeros((n_ranks, n_ranks), np.int64)
    for dst, sources in enumerate(src_of_each):
        for src in sources:
            sent[src, dst] += src != dst
    return sent.sum(), max(sent.sum(axis=0).max(), sent.sum(axis=1).max())


@pytest.mark.parametrize("token_format", ["bf16", "fp8_blockwise"])
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_bytes_are_those_of_the_reference(world, token_format):
    n_ranks, n_experts, top_k, hidden, tokens, empty = world
    ids = routed(n_ranks, n_experts, top_k, tokens, empty)
    found = reported(ids, n_experts, hidden=hidden, token_format=token_format)["interfaces"]
    cfg = epmoe_ref.EPConfig(n_ranks, n_experts, top_k, hidden, max(tokens), token_format=token_format)
    x = [np.ones((n, hidden), ml_dtypes.bfloat16) for n in tokens]

    d = epmoe_ref.dispatch(cfg, x, ids)
    message = len(cfg.format.messages(np.ones((1, hidden), ml_dtypes.bfloat16), np.zeros((1, top_k)))[0])
    sources = [np.repeat(np.tile(np.arange(n_ranks), len(of.recv_count)), of.recv_count.ravel()) for of in d]
    total, most = between(n_ranks, sources)
    of_pairs = found["pairs_plain"]
    assert of_pairs["dispatch"]["total_bytes"]["max"] == total * message
    assert of_pairs["dispatch"]["busiest_bytes"]["max"] == most * message
    assert of_pairs["combine"]["total_bytes"]["max"] == total * 2 * hidden
    assert of_pairs["combine"]["busiest_bytes"]["max"] == most * 2 * hidden

    probs = [np.ones(i.shape, np.float32) for i in ids]
    if token_format == "bf16":
        recv, _, _, _, handle = fused_a2a.dispatch_forward(x, ids, probs, n_experts)
        row = recv[0].shape[1] * recv[0].itemsize
    else:
        fp8 = fused_a2a.hybrid.blockwise_fp8(x)
        recv, _, _, _, handle = fused_a2a.dispatch_forward(list(zip(*fp8)), ids, probs, n_experts)
        row = sum(a.shape[1] * a.itemsize for a in recv[0])
    total, most = between(n_ranks, handle.src_rank)
    for name in ("rows", "expert_major"):
        assert found[name]["dispatch"]["total_bytes"]["max"] == total * row
        assert found[name]["dispatch"]["busiest_bytes"]["max"] == most * row
        assert found[name]["combine"]["busiest_bytes"]["max"] == most * 2 * hidden
    assert found["rows"]["result_bytes"]["max"] == max(handle.num_rows) * row

    routing_map = [(i[:, :, None] == np.arange(n_experts)).any(axis=1) for i in ids]
    hidden_rows, _, scales, _, _ = fused_a2a.hybrid_dispatch_forward(
        x, routing_map, None, n_experts // n_ranks, fp8_dispatch=token_format != "bf16"
    )
    received = [h.nbytes + (0 if s is None else s.nbytes) for h, s in zip(hidden_rows, scales)]
    assert found["expert_major"]["result_bytes"]["max"] == max(received)


def test_the_fast_kernels_send_the_payload_once_a_rank_and_a_header_for_each_pair():
    ids = routed(4, 16, 4, (6, 6, 6, 6), 0.1)
    found = reported(ids, 16, hidden=128)
    header = found["message_bytes"] - 256
    pairs, rows = (np.array(found[name]) * (1 - np.eye(4, dtype=int)) for name in ("pairs", "rows"))
    assert found["interfaces"]["pairs"]["dispatch"]["total_bytes"]["max"] == rows.sum() * 256 + pairs.sum() * header


def test_loads_and_their_measures_are_counted_by_hand():
    ids = [np.array([[0, 1], [0, -1]]), np.array([[0, 3]])]
    found = reported(ids, 4, hidden=8)
    assert found["pairs_by_expert"] == [3, 1, 0, 1] and found["pairs_by_rank"] == [4, 1]
    assert found["pairs"] == [[3, 0], [1, 1]] and found["rows"] == [[2, 0], [1, 1]] and found["empty_slots"] == 1
    rank, expert = found["imbalance"]["rank"], found["imbalance"]["expert"]
    assert rank["max_over_mean"]["max"] == pytest.approx(4 / 2.5) and rank["gini"]["max"] == pytest.approx(0.3)
    # mean absolute difference of all pairs of experts, halved and over the mean
    loads = np.array([3, 1, 0, 1])
    gini = np.abs(loads[:, None] - loads).mean() / 2 / loads.mean()
    assert expert["max_over_mean"]["max"] == pytest.approx(3 / 1.25) and expert["gini"]["max"] == pytest.approx(gini)


def test_a_step_axis_gives_percentiles_over_steps():
    # ranks of 2 experts; 1 token a rank
    one, two = np.array([[0, 1], [0, 2]]), np.array([[0, 2], [1, 3]])
    found = report.report(dump.Dump([one] * 9 + [two], n_experts=4), "test", n_ranks=2, hidden=8)
    by_step = [1.5] * 9 + [1.0]
    stat = found["imbalance"]["rank"]["max_over_mean"]
    assert stat == {"median": 1.5, "p90": np.percentile(by_step, 90), "p99": np.percentile(by_step, 99), "max": 1.5}
    assert found["steps"] == 10 and found["tokens"] == 20
    # only rank 1 sends one
    assert found["interfaces"]["pairs_plain"]["combine"]["busiest_bytes"]["median"] == 8 * 2


def test_nothing_routed_is_no_error():
    found = reported([np.full((3, 2), -1), np.zeros((0, 2), int)], 4, hidden=8)
    assert found["imbalance"]["rank"]["gini"] is None and found["empty_slots"] == 6
    assert found["interfaces"]["pairs"]["dispatch"]["floor_us"]["max"] == 0.0
