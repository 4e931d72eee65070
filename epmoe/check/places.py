"""Where the rows and the scales of one rank's dispatch result lie, computed from its counts.

The reference and the kernels have this arithmetic too; it is written once more here because a comparison that asked
one side for the places could not see that side's mistakes.
"""

from dataclasses import dataclass

import numpy as np

PADDING = -1
SHARED = -2


@dataclass(frozen=True)
class Places:
    """Per output row: its group, its row inside the group, and its source rank.

    group [n_rows] int64, row_in_group [n_rows] int64, src_rank [n_rows] int64 (PADDING for rows that only fill a group
    up, SHARED for the shared expert's rows), all of exact length row_offsets[-1].
    """

    group: np.ndarray
    row_in_group: np.ndarray
    src_rank: np.ndarray

    @property
    def n_rows(self):
        return len(self.group)

    def routed(self):
        return np.flatnonzero(self.src_rank >= 0)

    def padding(self):
        return np.flatnonzero(self.src_rank == PADDING)

    def shared(self):
        return np.flatnonzero(self.src_rank == SHARED)


def places_of(cfg, rank, result):
    """Places of every row of a rank's result, which has row_offsets, recv_count and num_tokens."""
    return places(cfg, result.row_offsets, result.recv_count, n_shared=shared_rows(cfg, rank, result.num_tokens))


def shared_rows(cfg, rank, num_tokens):
    """Rows of the shared expert on a rank: one a token; under skip_a2a its share of them."""
    world = cfg.allreduce_world_size if cfg.skip_a2a else 1
    return (num_tokens + world - (rank if cfg.skip_a2a else 0) - 1) // world


def places(cfg, row_offsets, recv_count, *, n_shared=None):
    """Places of every row, from row_offsets (n_groups + 1) and recv_count (n_local_experts, source ranks).

    n_shared: rows of the shared expert; None: all of group 0, which is so where the format does not pad.
    """
    offsets = np.asarray(row_offsets).astype(np.int64)
    counts = np.asarray(recv_count).astype(np.int64)
    group = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    row_in_group = np.arange(offsets[-1]) - offsets[group]
    src_rank = np.full(len(group), PADDING, np.int64)
    first = int(cfg.fused_shared_expert)
    if first:
        src_rank[:offsets[1] if n_shared is None else n_shared] = SHARED
    for local_expert, row in enumerate(counts):
        start = offsets[first + local_expert]
        src_rank[start:start + row.sum()] = np.repeat(np.arange(len(row)), row)
    return Places(group, row_in_group, src_rank)


def global_expert(cfg, rank, group):
    """The expert of a group, as people name it: a global id, or "shared"."""
    local_expert = int(group) - int(cfg.fused_shared_expert)
    return "shared" if local_expert < 0 else rank * cfg.n_local_experts + local_expert


def source_rank(cfg, rank, index):
    """The source rank that an index of recv_count's second axis stands for: under skip_a2a the rank itself."""
    return rank if cfg.skip_a2a else int(index)


def scale_group(cfg):
    """Elements of a row that share one scale; 0 for bf16."""
    return {"bf16": 0, "fp8_blockwise": 128, "nvfp4": 16}.get(cfg.token_format, 32)


def tiled(cfg):
    """True for the formats whose scales lie in 5-D tiles of 128 rows."""
    return cfg.token_format in ("nvfp4", "mxfp4", "mxfp8")


def first_tiles(row_offsets):
    """First scale tile of every group, and behind it the number of tiles in all."""
    rows = np.diff(np.asarray(row_offsets).astype(np.int64))
    return np.concatenate([[0], np.cumsum(-(-rows // 128))])


def scale_index(cfg, row_offsets, group, row_in_group):
    """Flat element index [n, n_scales] of the scales of the given rows in output_scales; not for fp8_blockwise.

    5-D tiles: [r // 128, k // 4V, r % 32, r % 128 // 32, k // V % 4]. mxfp4_rows: row-major, or the slot layout.
    """
    n_scales = cfg.hidden // scale_group(cfg)
    k = np.arange(n_scales)[None, :]
    mn = np.asarray(row_in_group)[:, None]
    group = np.asarray(group)[:, None]
    if tiled(cfg):
        tile = first_tiles(row_offsets)[group] + mn // 128
        return ((tile * (n_scales // 4) + k // 4) * 32 + mn % 32) * 16 + mn % 128 // 32 * 4 + k % 4
    if not cfg.fuse_a_scale_preshuffle:
        return (np.asarray(row_offsets).astype(np.int64)[group] + mn) * n_scales + k
    capacity = -(-cfg.n_ranks * cfg.max_tokens_per_rank // 32) * 32
    return (group * capacity * n_scales + mn // 16 % 2 + 2 * (k // 4 % 2) + 4 * (mn % 16) + 64 * (k % 4)
            + 256 * (k // 8) + 32 * n_scales * (mn // 32))
