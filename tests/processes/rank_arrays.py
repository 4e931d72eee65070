"""Inputs of the programs in this folder, the same on every rank, and the reference's results."""

import ml_dtypes
import numpy as np

import epmoe_ref
from epmoe import EPConfig, MPIWorld, ShmemWorld

HIDDEN, TOKENS, TOP_K, EXPERTS_PER_RANK = 32, 6, 2, 3


def config(n_ranks, **options):
    return EPConfig(n_ranks, EXPERTS_PER_RANK * n_ranks, TOP_K, HIDDEN, TOKENS, **options)


def world_of(p2p_world_size):
    """(world, configuration) of this process: an MPIWorld, or for a size a ShmemWorld of such p2p worlds."""
    if not p2p_world_size:
        world = MPIWorld()
        return world, config(world.n_ranks)
    world = ShmemWorld(p2p_world_size=p2p_world_size)
    return world, config(world.n_ranks, p2p_world_size=p2p_world_size, use_shmem=True)


class Batch:
    """Inputs of one round, lists over ranks; the last rank of several has no token. Values differ in every place."""

    def __init__(self, cfg, number):
        rng = np.random.default_rng(number)
        counts = [int(rng.integers(1, TOKENS + 1)) for _ in range(cfg.n_ranks)]
        if cfg.n_ranks > 1:
            counts[-1] = 0
        self.cfg = cfg
        self.x = [rng.standard_normal((n, cfg.hidden)).astype(ml_dtypes.bfloat16) for n in counts]
        self.ids = [np.argsort(rng.random((n, cfg.n_experts)), axis=1)[:, : cfg.top_k].astype(np.int32) for n in counts]
        self.weights = [rng.random((n, cfg.top_k)).astype(np.float32) for n in counts]

    def expected(self):
        """(dispatched, combined) of all ranks, with experts that double their rows."""
        d = epmoe_ref.dispatch(self.cfg, self.x, self.ids)
        y = [doubled(of_rank.output_tokens) for of_rank in d]
        return d, epmoe_ref.combine(self.cfg, y, d, router_weights=self.weights)


def doubled(rows):
    """The expert of these programs: exact in bf16."""
    return (np.asarray(rows, np.float32) * 2).astype(ml_dtypes.bfloat16)
