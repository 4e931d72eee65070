"""First difference between the record model and a package's result, in the protocol's terms; None if equal."""

from dataclasses import replace

import ml_dtypes
import numpy as np
from api_arrays import BIT_TYPES, DTYPES, bytes_of
from exact_codes import OUTPUT_TYPES
from exact_formats import FACTS
from record_model import PADDING, Received, place_scales

TOKEN_DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp8_blockwise": ml_dtypes.float8_e4m3fn,
    "mxfp8": ml_dtypes.float8_e4m3fn,
    "nvfp4": np.uint8,
    "mxfp4": np.uint8,
    "mxfp4_rows": np.uint8,
}
SCALE_DTYPES = {
    "fp8_blockwise": np.float32,
    "nvfp4": ml_dtypes.float8_e4m3fn,
    "mxfp4": ml_dtypes.float8_e8m0fnu,
    "mxfp8": ml_dtypes.float8_e8m0fnu,
    "mxfp4_rows": ml_dtypes.float8_e8m0fnu,
}


def dispatch_difference(world, rank, received, dispatched, *, padding_is_zero):
    """Compare one rank's Dispatched (exact rows) with the model's Received.

    padding_is_zero: the reference defines padding rows as zero, the device leaves their payload alone.
    """
    for difference in _dispatch_differences(world, rank, received, dispatched, padding_is_zero):
        return f"rank {rank}: {difference}"
    return None


def _numbers_differ(name, expected, actual, dtype=np.int32):
    actual, expected = np.asarray(actual), np.array(expected, np.int64)
    if (actual.dtype, actual.shape) != (dtype, expected.shape):
        yield f"{name} is {actual.dtype} {actual.shape}, expected {np.dtype(dtype)} {expected.shape}"
    elif not np.array_equal(actual.astype(np.int64), expected):
        at = tuple(int(i) for i in np.argwhere(actual.astype(np.int64) != expected)[0])
        yield f"{name}{list(at)} is {actual[at]}, expected {expected[at]}"


def _dispatch_differences(world, rank, received, dispatched, padding_is_zero):
    facts = FACTS[world.token_format]
    ids = np.array(world.topk_ids[rank], int).reshape(world.num_tokens(rank), world.top_k)
    yield from _numbers_differ("topk_ids", ids, dispatched.topk_ids)
    yield from _numbers_differ("num_tokens", world.num_tokens(rank), np.int32(dispatched.num_tokens))
    yield from _numbers_differ("recv_count", received.recv_count, dispatched.recv_count)
    yield from _numbers_differ("row_offsets", received.row_offsets, dispatched.row_offsets, np.uint32)
    yield from _numbers_differ("expert_ids", received.expert_ids, dispatched.expert_ids)
    if facts.tiles:
        yield from _numbers_differ("scales_offset", received.scales_offset, dispatched.scales_offset, np.uint32)
    elif dispatched.scales_offset is not None:
        yield f"scales_offset is there, but {world.token_format} has none"

    rows = received.row_offsets[-1]
    src_info, tokens = np.asarray(dispatched.src_info), np.asarray(dispatched.output_tokens)
    if (src_info.dtype, src_info.shape) != (np.int32, (rows, 2)):
        yield f"src_info is {src_info.dtype} {src_info.shape}, expected int32 {(rows, 2)}"
    width = world.hidden // 2 if facts.code_bits == 4 else world.hidden
    if tokens.shape != (rows, width):
        yield f"output_tokens has shape {tokens.shape}, expected {(rows, width)}"
    if tokens.dtype != TOKEN_DTYPES[world.token_format]:
        yield f"output_tokens is {tokens.dtype}, expected {np.dtype(TOKEN_DTYPES[world.token_format])}"

    token_bytes = bytes_of(tokens).reshape(rows, -1) if rows else None
    where = _rows_by_origin(received, src_info)
    yield from where.pop("messages")
    for row, record in where["rows"]:
        if record.src_rank == PADDING:
            expected = bytes(world.hidden * facts.code_bits // 8) if padding_is_zero else None
        else:
            expected = record.code_bytes
        if expected is not None and token_bytes[row].tobytes() != expected:
            column = next(i for i, (a, b) in enumerate(zip(token_bytes[row], expected)) if a != b)
            yield (
                f"output_tokens row {row} ({record}): byte {column} is 0x{token_bytes[row][column]:02x}, "
                f"expected 0x{expected[column]:02x}"
            )
    yield from _scale_differences(world, received, dispatched, where["rows"], padding_is_zero)


def _rows_by_origin(received, src_info):
    """Pair each actual row with the model's record of the same origin; order is free inside a segment."""
    rows, messages, start = [], [], 0
    while start < len(received.rows) and not messages:
        first = received.rows[start]
        end = start
        while end < len(received.rows) and (received.rows[end].group, received.rows[end].src_rank) == (
            first.group,
            first.src_rank,
        ):
            end += 1
        segment = received.rows[start:end]
        if isinstance(first.src_rank, str):
            for row in range(start, end):
                if tuple(src_info[row]) != (-1, -1):
                    messages.append(
                        f"src_info[{row}] is {tuple(src_info[row].tolist())}, expected (-1, -1): "
                        f"{first.src_rank} row of group {first.group}"
                    )
            rows += zip(range(start, end), segment)
        else:
            expected = {(record.token, record.slot): record for record in segment}
            for row in range(start, end):
                origin = tuple(src_info[row].tolist())
                record = expected.pop(origin, None)
                if record is None:
                    messages.append(
                        f"src_info[{row}] = (token, slot) {origin} is a repetition or foreign in the segment of group "
                        f"{first.group}, src_rank {first.src_rank}; still expected: {sorted(expected)[:4]}"
                    )
                    break
                rows.append((row, record))
        start = end
    return {"rows": rows, "messages": messages}


def _scale_differences(world, received, dispatched, rows, padding_is_zero):
    facts = FACTS[world.token_format]
    if facts.group == 0:
        if dispatched.output_scales is not None:
            yield "output_scales is there, but bf16 has none"
        return
    scales = np.asarray(dispatched.output_scales)
    if scales.dtype != SCALE_DTYPES[world.token_format]:
        yield f"output_scales is {scales.dtype}, expected {np.dtype(SCALE_DTYPES[world.token_format])}"
    columns, total = world.hidden // facts.group, received.row_offsets[-1]
    expected_shape = {"fp8_blockwise": (columns, total), "mxfp4_rows": (total, columns)}.get(
        world.token_format, (received.scale_size // (128 * columns), columns // 4, 32, 4, 4)
    )
    if not world.fuse_a_scale_preshuffle and scales.shape != expected_shape:
        yield f"output_scales has shape {scales.shape}, expected {expected_shape}"
    actual = bytes_of(scales)
    if len(actual) != received.scale_size:
        yield f"output_scales has {len(actual)} bytes, expected {received.scale_size}"
    # The model placed scales for its own row order; move each to the row that holds the record.
    expected = _expected_scale_bytes(world, received, rows)
    for at, (value, record) in expected.items():
        if actual[at] != value:
            whose = record or "of a row past the group's count"
            yield f"output_scales byte {at} ({whose}) is 0x{actual[at]:02x}, expected 0x{value:02x}"
    if padding_is_zero:
        rest = np.ones(len(actual), bool)
        rest[np.fromiter(expected, np.int64, len(expected))] = False
        if actual[rest].any():
            at = int(np.flatnonzero(rest & (actual != 0))[0])
            yield f"output_scales byte {at} belongs to no row and is 0x{actual[at]:02x}, expected 0x00"


def _expected_scale_bytes(world, received, rows):
    """byte -> (value, Row), in the row order of the result."""
    moved = Received(rows=[None] * len(received.rows), row_offsets=received.row_offsets, group_rows=received.group_rows)
    for row, record in rows:
        moved.rows[row] = replace(record, row_in_group=row - received.row_offsets[record.group])
    place_scales(world, moved)
    return moved.scale_bytes


def combine_difference(world, rank, expected, actual):
    """Compare one rank's combine output (an array of combine_dtype) with the model's bits. NaN equals NaN."""
    kind, dtype = OUTPUT_TYPES[world.combine_dtype], DTYPES[world.combine_dtype]
    actual = np.asarray(actual)
    t = world.num_tokens(rank)
    shape = (t, world.hidden) if world.weights is not None else (t, world.top_k, world.hidden)
    if actual.shape != shape:
        return f"rank {rank}: combine's output has shape {actual.shape}, expected {shape}"
    if actual.dtype != dtype:
        return f"rank {rank}: combine's output is {actual.dtype}, expected {dtype}"
    bits = np.ascontiguousarray(actual).view(BIT_TYPES[world.combine_dtype])
    wanted = np.array(expected, BIT_TYPES[world.combine_dtype]).reshape(shape)
    for at in np.argwhere(bits != wanted):
        at = tuple(int(i) for i in at)
        mine, theirs = int(wanted[at]), int(bits[at])
        if world.weights is not None and kind.is_nan_bits(mine) and kind.is_nan_bits(theirs):
            continue
        names = ("token", "column") if world.weights is not None else ("token", "slot", "column")
        place = ", ".join(f"{name} {i}" for name, i in zip(names, at))
        ids = world.topk_ids[rank][at[0]]
        return (
            f"rank {rank}, {place}: combine gives {float(actual[at])!r} (0x{theirs:x}), "
            f"expected {float(wanted[at].view(dtype))!r} (0x{mine:x}); the token's experts are {ids}"
        )
    return None
