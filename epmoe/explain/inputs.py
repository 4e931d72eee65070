"""Inputs of the round that is shown: tokens, their experts and weights, made from a seed."""

import ml_dtypes
import numpy as np

from epmoe.routing import Routed


def routed_for(cfg, seed):
    """Tokens, experts and router weights from a seed. Every rank has tokens, but not all have the same number.

    One id is -1, and one token has two experts on one rank, if top_k and a rank's number of experts allow it.

    Tokens are multiples of 1/8, and weights, a softmax over the token's scores, have 2 decimals, so that a picture can
    show them.
    """
    rng = np.random.default_rng([seed, cfg.n_ranks, cfg.n_experts])
    most = cfg.max_tokens_per_rank
    counts = [most, *rng.integers(max(1, most - 1), most + 1, cfg.n_ranks - 1)]
    x, ids, weights = [], [], []
    for n in counts:
        x.append((rng.integers(-16, 17, (n, cfg.hidden)) / 8).astype(ml_dtypes.bfloat16))
        scores = rng.gumbel(size=(n, cfg.n_experts)) - 0.25 * np.log(np.arange(1, cfg.n_experts + 1))
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, : cfg.top_k]
        if len(x) == cfg.n_ranks and cfg.top_k > 1:
            _two_on_one_rank(cfg, chosen[0])
        raised = np.exp(np.take_along_axis(scores, chosen, axis=1) / 2)
        ids.append(chosen.astype(np.int32))
        weights.append(np.round(raised / raised.sum(axis=1, keepdims=True), 2).astype(np.float32))
    if cfg.top_k > 1:
        ids[0][-1, -1] = -1
    return Routed(x, ids, weights)


def _two_on_one_rank(cfg, ids):
    """Move a token's second expert to its first expert's rank, if no other is there yet and that rank has another."""
    first = cfg.owner(int(ids[0])) * cfg.n_local_experts
    free = [e for e in range(first, first + cfg.n_local_experts) if e not in ids]
    if free and all(e < first or e >= first + cfg.n_local_experts for e in ids[1:]):
        ids[1] = free[0]
