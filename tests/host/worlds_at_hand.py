"""Small configurations and inputs for the tests of the host side."""

import ml_dtypes
import numpy as np

from epmoe import EPConfig, ExpertParallel, LocalWorld

BF16 = ml_dtypes.bfloat16


def config(**changes):
    sizes = dict(n_ranks=2, n_experts=4, top_k=2, hidden=16, max_tokens_per_rank=4) | changes
    return EPConfig(
        sizes.pop("n_ranks"),
        sizes.pop("n_experts"),
        sizes.pop("top_k"),
        sizes.pop("hidden"),
        sizes.pop("max_tokens_per_rank"),
        **sizes,
    )


def parallel(cfg, **options):
    """An ExpertParallel over a LocalWorld; simulation options go to the world."""
    simulation = {k: options.pop(k) for k in ("seed", "racecheck", "expire_waits") if k in options}
    return ExpertParallel(cfg, LocalWorld(cfg.n_ranks, **simulation), **options)


def batch(cfg, seed=0, num_tokens=None):
    """x, topk_ids, router weights: lists over ranks; ids distinct in a token, about one in six -1."""
    rng = np.random.default_rng(seed)
    num_tokens = num_tokens or [cfg.max_tokens_per_rank - r % 2 for r in range(cfg.n_ranks)]
    x, ids, weights = [], [], []
    for n in num_tokens:
        x.append(rng.standard_normal((n, cfg.hidden)).astype(BF16))
        of_rank = np.argsort(rng.random((n, cfg.n_experts)), axis=1)[:, : cfg.top_k].astype(
            np.int32
        )
        of_rank[rng.random(of_rank.shape) < 1 / 6] = -1
        ids.append(of_rank)
        weights.append(rng.random((n, cfg.top_k)).astype(np.float32))
    return x, ids, weights


def regions(ep):
    """All memory of all ranks, to see that nothing was written."""
    from epmoe import layout

    names = [name for name, *_ in layout.named_words(ep.cfg)]
    return {(name, rank): ep.region(name, rank) for name in names for rank in ep.world.ranks}
