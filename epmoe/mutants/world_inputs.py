"""Inputs and expected results of a world, made once and used for every mutant."""

from functools import lru_cache

import ml_dtypes
import numpy as np

import epmoe_ref
from epmoe.mutants import experts

BF16 = np.dtype(ml_dtypes.bfloat16)


@lru_cache(None)
def inputs(world):
    """For each round (x, ids as given, ids as kernels must clean them, weights). Each is a list over ranks."""
    cfg, rng, rounds = world.cfg, np.random.default_rng(5), []
    for tokens in world.tokens:
        x = [rng.normal(size=(n, cfg.hidden)).astype(BF16) for n in tokens]
        ids = [_routing(cfg, n, rng, world.from_expert) for n in tokens]
        if world.elsewhere:
            ids = [np.where(i // cfg.n_local_experts == rank, -1, i) for rank, i in enumerate(ids)]
        if cfg.skip_a2a:
            x, ids = [x[0]] * cfg.n_ranks, [ids[0]] * cfg.n_ranks
        # all tokens of the first rank, one of each other rank
        given = [_spoilt(cfg, i, 1 if rank else None) for rank, i in enumerate(ids)] if world.bad_ids else ids
        weights = [rng.random((len(i), cfg.top_k)).astype(np.float32) for i in ids]
        rounds.append((x, given, ids, [weights[0]] * cfg.n_ranks if cfg.skip_a2a else weights))
    return rounds


def _routing(cfg, n, rng, from_expert):
    """Distinct ids for each token. The second to last expert gets none, and some ids are -1."""
    popular = np.delete(np.arange(cfg.n_experts), cfg.n_experts - 2)
    popular = popular[popular % cfg.n_local_experts >= from_expert]
    ids = np.array([rng.permutation(popular)[: cfg.top_k] for _ in range(n)], np.int32).reshape(n, cfg.top_k)
    ids[rng.random(ids.shape) < 0.1] = -1
    return ids


def _spoilt(cfg, ids, most):
    """Ids that dispatch must clean to these: some -1 are replaced by a number that is no expert, or by a repeated id."""
    out = ids.copy()
    for t in range(len(out))[:most]:
        if t % 3 and out[t, 0] >= 0:
            out[t, 1], ids[t, 1] = out[t, 0], -1
        else:
            out[t, 0], ids[t, 0] = -2 - t if t % 2 else cfg.n_experts + t, -1
    return out


@lru_cache(None)
def expected(world):
    """For each round the reference's Dispatched and combined outputs, lists over ranks."""
    cfg, out = world.cfg, []
    for x, _, ids, weights in inputs(world):
        dispatched = epmoe_ref.dispatch(cfg, x, ids)
        rows = [experts.reference(cfg, d) for d in dispatched]
        options = {} if world.unreduced else dict(router_weights=weights)
        out.append((dispatched, epmoe_ref.combine(cfg, rows, dispatched, **options)))
    return out


@lru_cache(None)
def last_payloads(world):
    """Bytes of the last round's encoded tokens, padding included, a list over ranks: the expected content of send_buf."""
    fmt = epmoe_ref.format_of(world.cfg)
    return [fmt.encode(x) for x in inputs(world)[-1][0]]
