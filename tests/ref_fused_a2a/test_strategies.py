"""The public strategies give valid worlds that reach corner cases, and garbage that is invalid."""

from random import Random

import numpy as np
import pytest
from fused_a2a_laws import law
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from epmoe_ref import EPConfig, strategies
from epmoe_ref.config import TOKEN_FORMATS

# any example will do: nothing to shrink
search = settings(law, max_examples=1000, phases=(Phase.generate,))


def distinct(ids):
    return all(len(set(own)) == len(own) for own in ([e for e in token if e >= 0] for token in ids.tolist()))


@law
@given(strategies.worlds())
def test_worlds_are_valid(world):
    cfg = world.cfg
    for x, ids, weights in zip(world.input_tokens, world.topk_ids, world.router_weights, strict=True):
        assert x.dtype == strategies.BF16 and x.shape == (len(ids), cfg.hidden) and len(ids) <= cfg.max_tokens_per_rank
        assert ids.dtype == np.int32 and ids.shape == (len(x), cfg.top_k) and distinct(ids)
        assert ((ids >= -1) & (ids < cfg.n_experts)).all()
        assert weights.dtype == np.float32 and np.array_equal(np.isnan(weights), ids < 0)
        if cfg.skip_a2a:
            assert x.tobytes() == world.input_tokens[0].tobytes() and np.array_equal(ids, world.topk_ids[0])
    assert len(world.topk_ids) == cfg.n_ranks


@law
@given(st.data(), st.sampled_from(tuple(TOKEN_FORMATS)), st.integers(1, 8))
def test_fields_of_the_configuration_can_be_fixed(data, token_format, n_ranks):
    cfg = data.draw(strategies.configs(token_format=token_format, n_ranks=n_ranks, top_k=1, skip_a2a=False))
    assert (cfg.token_format, cfg.n_ranks, cfg.top_k, cfg.skip_a2a) == (token_format, n_ranks, 1, False)
    world = data.draw(strategies.worlds(cfg, kinds=("coordinates",)))
    assert world.cfg is cfg


@law
@given(st.data(), st.sampled_from((np.int8, np.int32, np.int64)))
def test_garbage_has_its_dtype(data, dtype):
    ids = data.draw(strategies.garbage_topk_ids(4, 6, 3, 2, dtype))
    assert ids.shape == (4, 3) and ids.dtype == dtype


def tokens(world):
    return [token for ids in world.token_indices for token in ids]


CORNERS = {
    "a rank without tokens beside one with": lambda w: {0} < {min(len(x), 1) for x in w.x},
    "uneven ranks": lambda w: len({len(x) for x in w.x} - {0}) > 1,
    "a token without expert beside one with": lambda w: {False, True} == {bool((t >= 0).any()) for t in tokens(w)},
    "a slot without expert in a token with": lambda w: any(0 < (t >= 0).sum() < t.size for t in tokens(w)),
    "everything on one rank of several": lambda w: (
        len(w.x) > 1
        and sum(map(len, w.x)) > 3
        and {int(e) // (w.num_experts // len(w.x)) for ids in w.token_indices for e in ids.ravel()} in ({0}, {1})
    ),
    "K = E > 1": lambda w: w.token_indices[0].shape[1] == w.num_experts > 1,
    "an id out of order": lambda w: any((np.diff(ids) < 0).any() for ids in w.token_indices),
    "NaN and Inf": lambda w: any(np.isnan(x).any() for x in w.x) and any(np.isinf(x).any() for x in w.x),
}


@pytest.mark.parametrize("corner", CORNERS)
def test_rows_worlds_reach(corner):
    find(strategies.rows_worlds(), CORNERS[corner], settings=search, random=Random(1))


HYBRID_CORNERS = {
    "an overflow": lambda w: (
        w.num_permuted_tokens is not None
        and any(m.sum() for m in w.routing_map)
        and w.num_permuted_tokens < np.concatenate(w.routing_map).sum(axis=0).reshape(len(w.x), -1).sum(axis=1).max()
    ),
    "a budget with room": lambda w: w.num_permuted_tokens and w.num_permuted_tokens > 4 * sum(map(len, w.x)),
    "FP8 with probs": lambda w: w.fp8_dispatch and w.probs is not None,
    "all experts": lambda w: any(len(m) > 1 and m.shape[1] > 1 and m.all() for m in w.routing_map),
    "several p2p worlds of several ranks": lambda w: (w.p2p_world_size or 0) > 1 and w.p2p_world_size < len(w.x),
}


@pytest.mark.parametrize("corner", HYBRID_CORNERS)
def test_hybrid_worlds_reach(corner):
    find(strategies.hybrid_worlds(), HYBRID_CORNERS[corner], settings=search, random=Random(1))


def test_large_worlds_are_drawn_now_and_then():
    tokens, experts = [], []

    @settings(law, max_examples=100, phases=(Phase.generate,))
    @given(strategies.configs(large=True), strategies.rows_worlds(large=True))
    def drawn(cfg, rows):
        tokens.append((cfg.max_tokens_per_rank, max(map(len, rows.x))))
        experts.append((cfg.n_local_experts, rows.num_experts))

    drawn()
    for sizes, at_most, more_than in ((tokens, 12, 64), (experts, 16, 32)):
        for of_one in zip(*sizes):
            assert sum(size <= at_most for size in of_one) > len(of_one) / 2
            assert max(of_one) > more_than


def test_garbage_reaches_wild_ids_and_ids_twice():
    def wild(ids):
        return ((ids < -1) | (ids >= 6)).any()

    find(strategies.garbage_topk_ids(4, 6, 3), wild, settings=search)
    find(strategies.garbage_topk_ids(4, 6, 3), lambda ids: not wild(ids) and not distinct(ids), settings=search)


def test_configurations_refuse_what_epconfig_refuses():
    with pytest.raises(ValueError, match="n_experts=5"):
        find(strategies.configs(n_ranks=2, n_experts=5), lambda cfg: isinstance(cfg, EPConfig), settings=search)
