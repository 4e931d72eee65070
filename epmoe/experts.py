"""The experts of a verification: a SwiGLU MLP for each, in NumPy, with weights made from a seed."""

import ml_dtypes
import numpy as np

from epmoe.check.places import places, scale_group, scale_index
from epmoe.inputs import COMBINE_DTYPE


def dequantised(cfg, d):
    """float32 (rows, hidden) values of a Dispatched (NumPy, exact rows); NVFP4 as if input_scale were 1."""
    tokens = d.output_tokens
    if cfg.token_format == "bf16":
        return tokens.astype(np.float32)
    if cfg.token_format in ("nvfp4", "mxfp4", "mxfp4_rows"):
        packed = tokens.view(np.uint8)
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), cfg.hidden)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    else:
        values = tokens.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if cfg.token_format == "fp8_blockwise":
        scales = np.asarray(d.output_scales).T
    else:
        where = places(cfg, d.row_offsets, d.recv_count)
        at = scale_index(cfg, d.row_offsets, where.group, where.row_in_group)
        kind = ml_dtypes.float8_e4m3fn if cfg.token_format == "nvfp4" else ml_dtypes.float8_e8m0fnu
        scales = np.ascontiguousarray(d.output_scales).view(np.uint8).reshape(-1)[at].view(kind)
    with np.errstate(invalid="ignore"):
        return values * np.repeat(scales.astype(np.float32), scale_group(cfg), axis=1)


class Experts:
    """Experts of all ranks: y = (silu(x @ gate) * (x @ up)) @ down, float32 inside, one rounding to combine_dtype.

    Weights of one expert are made when it is needed and dropped again, so 256 experts of a large model fit.
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
        return (rng.standard_normal((h, i), np.float32) / np.float32(h**0.5),
                rng.standard_normal((h, i), np.float32) / np.float32(h**0.5),
                rng.standard_normal((i, h), np.float32) / np.float32(i**0.5))

    def __call__(self, rank, d):
        """Expert outputs of a rank, combine_dtype (rows, hidden); padding rows are NaN, which nobody may read."""
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
    """Rows of y, in d_from's order, put into d_to's order; (rows, hidden), where nothing belongs NaN.

    Inside an (expert, source rank) segment the two may have the same rows in another order.
    """
    result = np.full((rows, cfg.hidden), np.nan, y.dtype)
    result[_order(cfg, d_to)] = y[_order(cfg, d_from)]
    return result


def _order(cfg, d):
    where = places(cfg, d.row_offsets, d.recv_count)
    info = np.asarray(d.src_info)[:where.n_rows]
    free = where.src_rank >= 0
    token, slot = (np.where(free, info[:, i], where.row_in_group if i == 0 else 0) for i in (0, 1))
    return np.lexsort((slot, token, where.src_rank % (cfg.n_ranks + 2), where.group))
