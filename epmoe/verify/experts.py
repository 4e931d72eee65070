"""The experts of a verification: a SwiGLU MLP for each, in NumPy, with weights made from a seed."""

import numpy as np

from epmoe.check.dequantised import dequantised
from epmoe.check.places import places
from epmoe.host.inputs import COMBINE_DTYPE


class Experts:
    """Experts of all ranks: y = (silu(x @ gate) * (x @ up)) @ down, float32 inside, one rounding to combine_dtype.

    Weights of an expert are made when needed and then dropped, so 256 experts of a large model fit into memory.
    """

    def __init__(self, cfg, seed, intermediate=32):
        self.cfg, self.seed, self.intermediate = cfg, seed, intermediate

    def weights(self, rank, group):
        """gate, up (hidden, intermediate) and down (intermediate, hidden), float32, of a group of rows of a rank."""
        local = group - int(self.cfg.fused_shared_expert)
        # the shared expert is the same on every rank
        expert = -1 if local < 0 else rank * self.cfg.n_local_experts + local
        rng = np.random.default_rng([self.seed, expert + 1])
        h, i = self.cfg.hidden, self.intermediate
        return (
            rng.standard_normal((h, i), np.float32) / np.float32(h**0.5),
            rng.standard_normal((h, i), np.float32) / np.float32(h**0.5),
            rng.standard_normal((i, h), np.float32) / np.float32(i**0.5),
        )

    @np.errstate(all="ignore")  # a user's tokens may be NaN
    def __call__(self, rank, d):
        """Expert outputs of a rank, combine_dtype (rows, hidden). Padding rows are NaN, and must not be read."""
        x = dequantised(self.cfg, d)
        y = np.full((len(x), self.cfg.hidden), np.nan, COMBINE_DTYPE[self.cfg.combine_dtype])
        where = places(self.cfg, d.row_offsets, d.recv_count)
        for group in np.unique(where.group):
            rows = np.flatnonzero((where.group == group) & (where.src_rank != -1))
            gate, up, down = self.weights(rank, int(group))
            g, u = x[rows] @ gate, x[rows] @ up
            y[rows] = ((g / (1 + np.exp(-g)) * u) @ down).astype(y.dtype)
        return y


def reordered(cfg, d_from, d_to, y, rows):
    """Rows of y, in d_from's order, sorted into d_to's order: (rows, hidden), NaN in padding rows.

    The two may have the rows of an (expert, src_rank) segment in different orders.
    """
    result = np.full((rows, cfg.hidden), np.nan, y.dtype)
    result[_order(cfg, d_to)] = y[_order(cfg, d_from)]
    return result


def _order(cfg, d):
    where = places(cfg, d.row_offsets, d.recv_count)
    info = np.asarray(d.src_info)[: where.n_rows]
    free = where.src_rank >= 0
    token, k = (np.where(free, info[:, i], where.row_in_group if i == 0 else 0) for i in (0, 1))
    return np.lexsort((k, token, where.src_rank % (cfg.n_ranks + 2), where.group))
