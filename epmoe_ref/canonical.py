"""The canonical order, in which two dispatch results can be compared: rows of each segment sorted by (token, k)."""

import numpy as np

from .dispatched import Dispatched, segments
from .formats.scale_layout import layout_of


def canonical(dispatched) -> Dispatched:
    """One rank's Dispatched with the rows of each (expert, src_rank) segment sorted by (token, k).

    dispatched: a Dispatched or any object with its fields as NumPy arrays; it may have more rows than the exact number.
    A row moves together with its src_info and its scales. Shared-expert rows, padding rows and rows past
    row_offsets[-1] do not move. The result is a copy and shares no memory with the argument.
    """
    order = np.arange(len(dispatched.src_info))
    output_scales = None if dispatched.output_scales is None else np.array(dispatched.output_scales, order="C")
    for segment in segments(dispatched):
        token, k = np.asarray(dispatched.src_info[segment.start : segment.end]).T
        in_order = np.lexsort((k, token))
        order[segment.start : segment.end] = segment.start + in_order
        if output_scales is not None:
            _sort_scales(dispatched, output_scales, segment, in_order)
    return Dispatched(
        output_tokens=np.take(dispatched.output_tokens, order, axis=0),
        output_scales=output_scales,
        scales_offset=None if dispatched.scales_offset is None else np.array(dispatched.scales_offset),
        row_offsets=np.array(dispatched.row_offsets),
        expert_ids=np.array(dispatched.expert_ids),
        src_info=np.take(dispatched.src_info, order, axis=0),
        recv_count=np.array(dispatched.recv_count),
        topk_ids=np.array(dispatched.topk_ids),
        num_tokens=int(dispatched.num_tokens),
    )


def _sort_scales(dispatched, output_scales: np.ndarray, segment, in_order: np.ndarray) -> None:
    first = segment.start - int(dispatched.row_offsets[segment.group])
    row_places, column_places = layout_of(output_scales)(
        output_scales.shape,
        dispatched.row_offsets,
        dispatched.scales_offset,
        segment.group,
        np.arange(first, first + segment.end - segment.start),
    )
    flat = output_scales.reshape(-1)
    flat[row_places[:, None] + column_places] = flat[row_places[in_order, None] + column_places]
