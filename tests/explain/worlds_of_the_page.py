"""Random small worlds as the page's model takes them, each with epmoe_ref's arrays."""

from functools import cache

import numpy as np

from epmoe.explain.world import reference


@cache
def worlds(n=200):
    """[{"world": ..., "reference": ...}]: 1 to 4 ranks, uneven and empty ones, ids of -1, values of all sizes."""
    rng = np.random.default_rng(26)
    return [{"world": w, "reference": reference(w)} for w in (_world(rng) for _ in range(n))]


def _world(rng):
    ranks, local = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    top_k = int(rng.integers(1, min(4, ranks * local) + 1))
    ids, weights, x = [], [], []
    for _ in range(ranks):
        n = int(rng.integers(0, 6))
        chosen = np.array([rng.permutation(ranks * local)[:top_k] for _ in range(n)], int).reshape(n, top_k)
        chosen[rng.random(chosen.shape) < 0.1] = -1
        ids.append(chosen.tolist())
        weights.append(rng.random((n, top_k), np.float32).tolist())
        values = rng.standard_normal((n, 4)) * 2.0 ** rng.integers(-12, 13, (n, 4))
        x.append((values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).tolist())
    if not any(map(len, ids)):
        return _world(rng)
    return {"ranks": ranks, "local": local, "topK": top_k, "ids": ids, "weights": weights, "x": x}
