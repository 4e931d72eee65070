"""Dispatch: sends every token to the owners of the experts that its router chose."""

import numpy as np
from ml_dtypes import bfloat16

from .casts import to_float32, to_output_type
from .config import EPConfig
from .dispatched import Dispatched
from .errors import EPValueError
from .formats import TokenFormat, format_of
from .formats.nv_block_scaled import checked_input_scale
from .functions import returned_values
from .over_ranks import over_ranks
from .routing import Routes, clean_topk_ids, routes


def dispatch(cfg: EPConfig, input_tokens, topk_ids, *, input_scale=1.0) -> list[Dispatched]:
    """Send each pair (token, k) of every rank to the owner of its expert; returns a Dispatched for each rank.

    input_tokens: list over ranks of bf16 [num_tokens, hidden], any strides; num_tokens may differ and be 0. For the
        bf16 format also fp16 and float32, which are rounded once to bf16, to nearest even.
    topk_ids: list over ranks of global expert ids, any integer type [num_tokens, top_k]; the ids of a token are
        distinct; -1 means "no expert", and nothing is sent.
    input_scale: used by NVFP4 only, but checked with every format: a positive finite float32 for each rank, given as a
        number, a list over ranks of numbers, or a function (i) -> float32, called once, with 0.

    Order: rows are grouped by local expert, then by src_rank. Within a segment this function sorts by (token, k), and
    kernels may use any order (see Dispatched and canonical). A row's payload is `format.decode(format.encode(token))`.

    fused_shared_expert: the rank's own tokens, encoded the same way, are group 0, in token order, before the routed
    rows. skip_a2a: nothing is exchanged. Each rank keeps the pairs of its own tokens whose expert it owns, the src_rank
    axis has length 1, and group 0 holds only the rank's share of the tokens (shared_expert_share).

    Errors: EPValueError before anything is computed. Memory: inputs, outputs and the payloads of one src_rank.
    Source: the dispatch_kernel page (docs/pages.md).
    """
    fmt = format_of(cfg)
    topk_ids = [clean_topk_ids(cfg, ids, rank) for rank, ids in enumerate(over_ranks(cfg, "topk_ids", topk_ids))]
    input_tokens = over_ranks(cfg, "input_tokens", input_tokens)
    for rank, (tokens, ids) in enumerate(zip(input_tokens, topk_ids)):
        check_tokens(cfg, tokens, len(ids), rank)
    scales = input_scales(cfg, input_scale)

    all_routes = [routes(cfg, ids) for ids in topk_ids]
    results = [
        empty_result(cfg, rank, _recv_count(cfg, rank, all_routes), topk_ids[rank]) for rank in range(cfg.n_ranks)
    ]
    for src_rank, (tokens, scale) in enumerate(zip(input_tokens, scales)):
        if not len(tokens):
            continue
        values, token_scales = fmt.decode(fmt.encode(rounded_tokens(tokens), scale))
        values = np.ascontiguousarray(values)
        if cfg.fused_shared_expert:
            _put_shared(cfg, fmt, results[src_rank], src_rank, values, token_scales)
        for dst_rank in [src_rank] if cfg.skip_a2a else range(cfg.n_ranks):
            _put_routed(cfg, fmt, results[dst_rank], src_rank, dst_rank, all_routes[src_rank], values, token_scales)
    return results


def shared_expert_share(cfg: EPConfig, rank: int, num_tokens: int) -> tuple[int, int]:
    """The tokens that a rank sends through the shared expert: (first token, number of tokens).

    These are all of its own tokens. Under skip_a2a every rank holds the same T tokens. With W = allreduce_world_size
    and r = rank % W, they are `(T + W - r - 1) // W` tokens, beginning at `r * (T // W) + min(r, T % W)`.
    """
    if not cfg.skip_a2a:
        return 0, num_tokens
    world = cfg.allreduce_world_size
    rank = rank % world
    start = rank * (num_tokens // world) + min(rank, num_tokens % world)
    return start, (num_tokens + world - rank - 1) // world


def _recv_count(cfg: EPConfig, rank: int, all_routes: list[Routes]) -> np.ndarray:
    own_experts = slice(rank * cfg.n_local_experts, (rank + 1) * cfg.n_local_experts)
    sources = [all_routes[rank]] if cfg.skip_a2a else all_routes
    return np.stack([np.diff(r.offsets)[own_experts] for r in sources], axis=1).astype(np.int32)


def empty_result(cfg: EPConfig, rank: int, recv_count: np.ndarray, topk_ids: np.ndarray) -> Dispatched:
    """One rank's Dispatched for these counts, before any row is stored: rows are zero, and (-1, -1) in src_info.

    recv_count: int32 [n_local_experts, n_ranks], [n_local_experts, 1] under skip_a2a. topk_ids: the rank's own.
    """
    fmt = format_of(cfg)
    counts = recv_count.sum(axis=1, dtype=np.int64)
    if cfg.fused_shared_expert:
        counts = np.concatenate([[shared_expert_share(cfg, rank, len(topk_ids))[1]], counts])
    row_offsets = fmt.pad_expert_offsets(counts)
    rows = int(row_offsets[-1])
    output_scales = None
    if fmt.scales_dtype is not None:
        shape = fmt.scales_shape(counts, cfg.n_ranks * cfg.max_tokens_per_rank)
        output_scales = _zero_bytes(shape, fmt.scales_dtype)
    return Dispatched(
        output_tokens=_zero_bytes((rows, fmt.values_size() // np.dtype(fmt.values_dtype).itemsize), fmt.values_dtype),
        output_scales=output_scales,
        scales_offset=fmt.scales_offset(counts),
        row_offsets=row_offsets,
        expert_ids=np.arange(cfg.n_groups, dtype=np.int32),
        src_info=np.full((rows, 2), -1, np.int32),
        recv_count=recv_count,
        topk_ids=topk_ids,
        num_tokens=len(topk_ids),
    )


def _put_shared(cfg, fmt, result: Dispatched, rank: int, values, scales) -> None:
    first, n_rows = shared_expert_share(cfg, rank, len(values))
    result.output_tokens[:n_rows] = values[first : first + n_rows]
    if scales is not None:
        put_scales(fmt, result, 0, 0, scales[first : first + n_rows])


def _put_routed(cfg, fmt, result: Dispatched, src_rank: int, dst_rank: int, pairs: Routes, values, scales) -> None:
    src_index = 0 if cfg.skip_a2a else src_rank
    first_expert = dst_rank * cfg.n_local_experts
    for local_expert in np.flatnonzero(result.recv_count[:, src_index]).tolist():
        expert = first_expert + local_expert
        group = local_expert + cfg.fused_shared_expert
        row_in_group = int(result.recv_count[local_expert, :src_index].sum())
        start = int(result.row_offsets[group]) + row_in_group
        end = start + int(result.recv_count[local_expert, src_index])
        sent = slice(pairs.offsets[expert], pairs.offsets[expert + 1])
        token = pairs.token[sent]
        # mode="clip" lets NumPy write into the output without a buffer; every token is in range.
        np.take(values, token, axis=0, out=result.output_tokens[start:end], mode="clip")
        if scales is not None:
            put_scales(fmt, result, group, row_in_group, scales[token])
        result.src_info[start:end, 0] = token
        result.src_info[start:end, 1] = pairs.k[sent]


def put_scales(fmt: TokenFormat, result: Dispatched, group: int, first: int, scales: np.ndarray) -> None:
    """Store scales [n, n_scales] of the group's rows first, first + 1, ... in the format's layout."""
    rows = np.arange(first, first + len(scales))
    assert result.output_scales is not None, "the format has scales"
    row_places, column_places = fmt.scale_layout(
        result.output_scales.shape, result.row_offsets, result.scales_offset, group, rows
    )
    result.output_scales.reshape(-1)[row_places[:, None] + column_places] = scales


def _zero_bytes(shape, dtype) -> np.ndarray:
    # float8_e8m0fnu has no zero, so zeros are made as bytes. The memory is not touched until rows are written.
    dtype = np.dtype(dtype)
    return np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)


def check_tokens(cfg: EPConfig, tokens, num_tokens: int, rank: int) -> None:
    """EPValueError unless tokens is a valid argument of dispatch for a rank with num_tokens tokens."""
    name = f"input_tokens of rank {rank}"
    if not isinstance(tokens, np.ndarray):
        raise EPValueError(f"{name} is of type {type(tokens).__name__} and must be a NumPy array")
    if tokens.dtype != bfloat16 and not (cfg.token_format == "bf16" and tokens.dtype in (np.float16, np.float32)):
        raise EPValueError(
            f"{name} has dtype {tokens.dtype} and must be bfloat16 (for the bf16 format also float16 or "
            "float32): use .astype(ml_dtypes.bfloat16)"
        )
    if tokens.shape != (num_tokens, cfg.hidden):
        raise EPValueError(
            f"{name} has shape {list(tokens.shape)} and must be [{num_tokens}, hidden={cfg.hidden}], "
            "one row for each row of topk_ids"
        )


def rounded_tokens(tokens: np.ndarray) -> np.ndarray:
    """The tokens as bf16. fp16 and float32 are rounded once, to nearest even."""
    return tokens if tokens.dtype == bfloat16 else to_output_type(to_float32(tokens), np.dtype(bfloat16))


def input_scales(cfg: EPConfig, input_scale) -> list[np.float32]:
    """The input scale of each rank, from a number, a list over ranks, or a function. Errors: EPValueError."""
    if callable(input_scale):
        scale = input_scale(0) if cfg.token_format == "nvfp4" else 1.0
        input_scale = float(returned_values("input_scale", scale, ()))
    per_rank = isinstance(input_scale, (list, tuple))
    scales = over_ranks(cfg, "input_scale", input_scale) if per_rank else [input_scale] * cfg.n_ranks
    return [checked_input_scale(scale, f"input_scale of rank {rank}") for rank, scale in enumerate(scales)]
