"""The places of rows and scales in one rank's dispatch result, computed from its counts.

The reference and the kernels compute row places too. They are computed here again, because a comparison that used one
side's places could not see that side's mistakes. Properties of a format come from the reference's format objects, so a
new format needs no change here.
"""

from dataclasses import dataclass

import numpy as np

from epmoe_ref import format_of

PADDING = -1
SHARED = -2


@dataclass(frozen=True)
class Places:
    """Per output row: its group, its row inside the group, and its src_rank.

    group [n_rows] int64, row_in_group [n_rows] int64, src_rank [n_rows] int64 (PADDING for rows that only fill up a
    group, SHARED for the shared expert's rows), all of exact length row_offsets[-1].
    """

    group: np.ndarray
    row_in_group: np.ndarray
    src_rank: np.ndarray

    @property
    def n_rows(self):
        """Number of rows."""
        return len(self.group)

    def routed(self):
        """Rows that hold a routed token."""
        return np.flatnonzero(self.src_rank >= 0)

    def shared(self):
        """Rows of the shared expert."""
        return np.flatnonzero(self.src_rank == SHARED)


def places_of(cfg, rank, result):
    """Places of every row of a rank's result. The result has row_offsets, recv_count and num_tokens."""
    return places(cfg, result.row_offsets, result.recv_count, n_shared=shared_rows(cfg, rank, result.num_tokens))


def shared_rows(cfg, rank, num_tokens):
    """Rows of the shared expert on a rank: one for each token, or under skip_a2a for its share of them."""
    world = cfg.allreduce_world_size if cfg.skip_a2a else 1
    return (num_tokens + world - rank % world - 1) // world


def places(cfg, row_offsets, recv_count, *, n_shared=None):
    """Places of every row, from row_offsets (n_groups + 1) and recv_count (n_local_experts, src_ranks).

    n_shared: rows of the shared expert. None: all of group 0, which is right if the format does not pad.
    """
    offsets = np.asarray(row_offsets).astype(np.int64)
    counts = np.asarray(recv_count).astype(np.int64)
    group = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    row_in_group = np.arange(offsets[-1]) - offsets[group]
    src_rank = np.full(len(group), PADDING, np.int64)
    first = int(cfg.fused_shared_expert)
    if first:
        src_rank[: offsets[1] if n_shared is None else n_shared] = SHARED
    for local_expert, row in enumerate(counts):
        start = offsets[first + local_expert]
        src_rank[start : start + row.sum()] = np.repeat(np.arange(len(row)), row)
    return Places(group, row_in_group, src_rank)


def global_expert(cfg, rank, group):
    """The expert of a group in messages: a global id, or "shared"."""
    local_expert = int(group) - int(cfg.fused_shared_expert)
    return "shared" if local_expert < 0 else rank * cfg.n_local_experts + local_expert


def src_rank_at(cfg, rank, index):
    """The src_rank for an index of recv_count's second axis. Under skip_a2a it is the rank itself."""
    return rank if cfg.skip_a2a else int(index)


def packed(cfg):
    """True for formats that keep two values in a byte."""
    return 2 * format_of(cfg).values_size() == cfg.hidden


def layout(cfg):
    """The layout of the format's scales: one of the functions of epmoe_ref.formats.scale_layout."""
    return format_of(cfg).scale_layout


def scale_index(cfg, shape, row_offsets, group, row_in_group):
    """Flat element index [n, n_scales] of the scales of the given rows in an output_scales of that shape."""
    fmt, offsets = format_of(cfg), np.asarray(row_offsets).astype(np.int64)
    scales_offset = fmt.scales_offset(np.diff(offsets))
    group, row_in_group = np.asarray(group), np.asarray(row_in_group)
    index = np.empty((len(group), fmt.n_scales()), np.int64)
    for g in np.unique(group):
        of = group == g
        row_places, column_places = fmt.scale_layout(shape, offsets, scales_offset, int(g), row_in_group[of])
        index[of] = row_places[:, None] + column_places
    return index
