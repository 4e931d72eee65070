"""Rounds of a LocalWorld with nothing to send; arrays are placed once; worlds beside each other. Others: tests/oracle."""

from unittest.mock import patch

import numpy as np
import pytest
from worlds_at_hand import batch, combine, config, equal_round, same_bits, scaled_rows

from epmoe import ExpertParallel, LocalWorld


@pytest.fixture
def ep():
    with ExpertParallel(config(), LocalWorld(2)) as made:  # as users get it
        yield made


def test_split_calls_place_each_array_once(ep, x, ids, weights):
    placing = ep._engine.placing
    with patch.object(placing, "place", wraps=placing.place) as place:
        ep.dispatch_async(x, ids)
        d = ep.dispatch_wait()
        ep.combine_async(scaled_rows(d, 1), d)
        ep.combine_wait(weights)
    names = [call.args[1] for call in place.call_args_list]
    of_rank = ["input_tokens", "topk_ids", "expert_outputs", "router_weights"]
    assert sorted(names) == sorted(of_rank * ep.cfg.n_ranks)


def test_no_tokens_at_all(ep):
    equal_round(ep, *batch(ep.cfg, num_tokens=[0, 0]))


def test_a_weight_of_an_empty_slot_adds_nothing_whatever_it_is(ep, x, ids, weights):
    equal_round(ep, x, [np.full_like(a, -1) for a in ids], [np.full_like(w, np.nan) for w in weights])


def test_two_worlds_beside_each_other(ep, x, ids, weights):
    with ExpertParallel(config(), LocalWorld(2)) as other:
        d, of_other = ep.dispatch(x, ids), other.dispatch(x, ids)
        out_of_other = combine(other, of_other, weights)
        assert same_bits(combine(ep, d, weights), out_of_other)
