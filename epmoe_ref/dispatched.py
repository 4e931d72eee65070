"""The result of dispatch on one rank, and the segments of its rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(eq=False)
class Dispatched:
    """The tokens that one rank received, grouped by expert, and the data that combine needs to send the results back.

    A group is a local expert. A fused shared expert is group 0, before them. The rows of a group are
    `[row_offsets[group], row_offsets[group + 1])`, ordered by src_rank. Within a segment (local expert, src_rank) the
    order is free: kernels claim slots with atomics, and the reference sorts by (token, k). Two results are equal if
    they agree after `canonical`. Padding rows come last in their group.

    output_tokens [rows, ...]: the decoded payloads, in the type and shape of the format. Padding rows: zero here,
        unspecified on the device, never read.
    output_scales: scales in the layout of the format, or None.
    scales_offset: uint32 [groups], or None if the format has none.
    row_offsets: uint32 [groups + 1]. The reference's arrays have exactly row_offsets[-1] rows.
    expert_ids: int32 [groups] = 0, 1, ... (group numbers, so the local experts if none is shared).
    src_info: int32 [rows, 2] = (token, k) on src_rank; (-1, -1) in shared-expert rows and padding rows.
    recv_count: int32 [n_local_experts, n_ranks], rows of each segment; [n_local_experts, 1] under skip_a2a.
    topk_ids: int32 [num_tokens, top_k] of this rank's tokens, as combine uses them.
    num_tokens: number of this rank's tokens.
    """

    output_tokens: np.ndarray
    output_scales: np.ndarray | None
    scales_offset: np.ndarray | None
    row_offsets: np.ndarray
    expert_ids: np.ndarray
    src_info: np.ndarray
    recv_count: np.ndarray
    topk_ids: np.ndarray
    num_tokens: int


class Segment(NamedTuple):
    """The rows [start, end) of one segment (local expert, src_rank), and the group of its expert."""

    local_expert: int
    src_rank: int
    group: int
    start: int
    end: int


def segments(dispatched) -> Iterator[Segment]:
    """The segments that have rows, in row order. They contain no shared-expert rows and no padding rows.

    dispatched: a Dispatched or any object with its row_offsets and recv_count. Yields Segments: local_expert, src_rank,
    group, and rows [start, end).
    """
    n_local_experts, _ = dispatched.recv_count.shape
    n_shared = len(dispatched.row_offsets) - 1 - n_local_experts
    for local_expert, counts in enumerate(np.asarray(dispatched.recv_count).tolist()):
        group = local_expert + n_shared
        end = int(dispatched.row_offsets[group])
        for src_rank, count in enumerate(counts):
            start, end = end, end + count
            if count:
                yield Segment(local_expert, src_rank, group, start, end)
