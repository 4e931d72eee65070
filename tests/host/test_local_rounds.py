"""Rounds of a LocalWorld with nothing to send, or all to one expert; worlds beside each other. Others: tests/oracle."""

from functools import partial
from unittest.mock import patch

import numpy as np
import worlds_at_hand
from worlds_at_hand import batch, config, equal_dispatch, scaled_rows

import epmoe_ref
from epmoe import LocalWorld
from epmoe.check import compare_combined_world, report
from epmoe.expert_parallel import ExpertParallel

parallel = partial(worlds_at_hand.parallel, launch=None)  # as users get it


def check_round(ep, cfg, x, ids, weights):
    """One round against the reference."""
    d = ep.dispatch(x, ids)
    want = equal_dispatch(cfg, d, x, ids)
    out = ep.combine(scaled_rows(d, 0.5), d, weights)
    expected = epmoe_ref.combine(cfg, scaled_rows(want, 0.5), want, router_weights=weights)
    found = compare_combined_world(cfg, out, expected)
    assert not found, report(found)
    return d, out


def test_split_calls_place_each_array_once():
    cfg = config()
    x, ids, weights = batch(cfg)
    with parallel(cfg) as ep:
        placing = ep._engine.placing
        with patch.object(placing, "place", wraps=placing.place) as place:
            ep.dispatch_async(x, ids)
            d = ep.dispatch_wait()
            ep.combine_async(scaled_rows(d, 1), d)
            ep.combine_wait(weights)
    names = [call.args[1] for call in place.call_args_list]
    of_rank = ["input_tokens", "topk_ids", "expert_outputs", "router_weights"]
    assert sorted(names) == sorted(of_rank * cfg.n_ranks)


def test_no_tokens_at_all():
    cfg = config()
    with parallel(cfg) as ep:
        x, ids, weights = batch(cfg, num_tokens=[0, 0])
        d, out = check_round(ep, cfg, x, ids, weights)
        assert [a.n_rows for a in d] == [0, 0] and [a.shape for a in out] == [(0, 16), (0, 16)]


def test_every_slot_empty_gives_zeros():
    cfg = config()
    x, ids, weights = batch(cfg)
    # a weight of an empty slot adds nothing, whatever it is
    nan = [np.full_like(w, np.nan) for w in weights]
    with parallel(cfg) as ep:
        _, out = check_round(ep, cfg, x, [np.full_like(a, -1) for a in ids], nan)
        assert all((a.view(np.uint16) == 0).all() for a in out)


def test_one_hot_expert():
    cfg = config(n_ranks=3, n_experts=6, top_k=2, max_tokens_per_rank=8)
    x, ids, weights = batch(cfg, num_tokens=[8, 8, 8])
    hot = [np.tile(np.array([5, -1]), (8, 1)) for _ in range(3)]
    with parallel(cfg) as ep:
        d, _ = check_round(ep, cfg, x, hot, weights)
        assert d[2].recv_count.tolist() == [[0, 0, 0], [8, 8, 8]]


def test_two_worlds_beside_each_other():
    cfg = config()
    x, ids, weights = batch(cfg)
    with ExpertParallel(cfg, LocalWorld(2)) as a, ExpertParallel(cfg, LocalWorld(2)) as b:
        da, db = a.dispatch(x, ids), b.dispatch(x, ids)
        outs = [ep.combine(scaled_rows(d, 1), d, weights) for ep, d in ((b, db), (a, da))]
    assert all(np.array_equal(p, q) for p, q in zip(*outs))
