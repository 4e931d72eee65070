"""The semantics of fused_a2a in plain loops over tokens, for comparison bit by bit.

It shares nothing with epmoe_ref: routes are lists that grow by append, casts are made from bits and tables.
"""

import struct

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
PAD = None


# Casts of float32, one number at a time


def round_one(number, dtype):
    """float32 -> bfloat16 or float16: nearest, ties to even, on the bits."""
    number = np.float32(number)
    if dtype == np.float32:
        return number
    if np.isnan(number):
        return dtype.type(np.nan)
    if dtype == BF16:
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        upper, lower = bits >> 16, bits & 0xFFFF
        if lower > 0x8000 or (lower == 0x8000 and upper & 1):
            upper += 1
        return np.array([upper], np.uint16).view(BF16)[0]
    # float16: the spacing at this magnitude is a power of two, and Python rounds halves to even
    if np.isinf(number):
        return np.float16(number)
    magnitude = abs(float(number))
    exponent = max(int(np.frexp(magnitude)[1]) - 11, -24)
    rounded = round(magnitude / 2.0**exponent) * 2.0**exponent
    value = np.float16(np.inf) if rounded > 65504 else np.float16(rounded)
    return -value if np.signbit(number) else value


def round_row(row, dtype):
    out = np.empty(len(row), dtype)
    for column, number in enumerate(row):
        out[column] = round_one(number, dtype)
    return out


def _e4m3_table():
    table = []
    for code in range(0x7F):  # 0x7F is NaN
        exponent, mantissa = code >> 3, code & 7
        table.append(
            mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        )
    return table


E4M3 = _e4m3_table()


def e4m3_code(number):
    if np.isnan(number):
        return 0x7F
    magnitude, sign = min(abs(float(number)), 448.0), 0x80 if np.signbit(number) else 0
    distance = [abs(value - magnitude) for value in E4M3]
    smallest = min(distance)
    nearest = [code for code in range(0x7F) if distance[code] == smallest]
    return sign | next((code for code in nearest if code % 2 == 0), nearest[0])


def blockwise_fp8(row):
    """One token -> (e4m3 [H], float32 scales [H / 128])."""
    codes, scales = [], []
    for first in range(0, len(row), 128):
        group = [np.float32(number) for number in row[first : first + 128]]
        absmax = np.float32(0)
        for number in group:
            if abs(number) > absmax:  # False for NaN
                absmax = abs(number)
        scale = max(absmax, np.float32(1e-4)) / np.float32(448)
        scales.append(scale)
        with np.errstate(invalid="ignore"):
            codes += [e4m3_code(number / scale) for number in group]
    return np.array(codes, np.uint8).view(FP8), np.array(scales, np.float32)


# Sums


def float32_sum(rows, width):
    total = np.zeros(width, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for row in rows:
            total = total + np.array([np.float32(number) for number in row], np.float32)
    return total


def matrix(rows, width, dtype):
    out = np.zeros((len(rows), width), dtype)
    for i, row in enumerate(rows):
        out[i] = row
    return out


# FusedDispatch, FusedCombine: a route is (src_rank, token)


def rows_routes(token_indices, num_experts):
    n_ranks = len(token_indices)
    n_local = num_experts // n_ranks
    routes = []
    for rank in range(n_ranks):
        routes.append([])
        for src in range(n_ranks):
            for token in range(len(token_indices[src])):
                if any(
                    expert != -1 and expert // n_local == rank
                    for expert in token_indices[src][token]
                ):
                    routes[rank].append((src, token))
    return routes


def rows_send(per_rank, routes):
    return [
        matrix([per_rank[src][t] for src, t in to], per_rank[0].shape[1], per_rank[0].dtype)
        for to in routes
    ]


def rows_dispatch(x, token_indices, token_probs, num_experts):
    """(recv_x, recv_token_indices, recv_token_probs, tokens_per_expert)."""
    routes, n_local = rows_routes(token_indices, num_experts), num_experts // len(x)
    top_k = token_indices[0].shape[1]
    indices, probs, counts = [], [], []
    for rank, to in enumerate(routes):
        indices.append(np.full((len(to), top_k), -1, np.int64))
        probs.append(np.zeros((len(to), top_k), np.float32))
        counts.append([0] * n_local)
        for row, (src, token) in enumerate(to):
            for slot in range(top_k):
                expert = token_indices[src][token, slot]
                if rank * n_local <= expert < (rank + 1) * n_local:
                    indices[rank][row, slot] = expert - rank * n_local
                    probs[rank][row, slot] = token_probs[src][token, slot]
                    counts[rank][expert - rank * n_local] += 1
    return rows_send(x, routes), indices, probs, [np.array(count, np.int64) for count in counts]


def rows_return(rows, routes, num_tokens):
    """For every token the sum over ranks of its row, rounded once."""
    width, dtype = rows[0].shape[1], rows[0].dtype
    out = []
    for src, count in enumerate(num_tokens):
        sums = []
        for token in range(count):
            own = [
                rows[rank][to.index((src, token))]
                for rank, to in enumerate(routes)
                if (src, token) in to
            ]
            sums.append(round_row(float32_sum(own, width), dtype))
        out.append(matrix(sums, width, dtype))
    return out


# HybridEP: a route is (src_rank, token, global expert), or PAD


def hybrid_routes(routing_map, num_local_experts, num_permuted_tokens, pad_multiple):
    """(routes, tokens_per_expert, overflow), each over ranks."""
    routes, counts, overflow = [], [], []
    for rank in range(len(routing_map)):
        segments = []
        for expert in range(rank * num_local_experts, (rank + 1) * num_local_experts):
            segment = []
            for src, routed in enumerate(routing_map):
                for token in range(len(routed)):
                    if routed[token, expert]:
                        segment.append((src, token, expert))
            while pad_multiple and len(segment) % pad_multiple:
                segment.append(PAD)
            segments.append(segment)
        padded_total = sum(len(segment) for segment in segments)
        budget = padded_total if num_permuted_tokens is None else num_permuted_tokens
        flat, own_counts = [], []
        for segment in segments:
            fits = segment[: max(0, budget - len(flat))]
            flat += fits
            own_counts.append(len(fits))
        routes.append(flat + [PAD] * (budget - len(flat)))
        counts.append(np.array(own_counts, np.int64))
        overflow.append(np.array([int(padded_total > budget)], np.int32))
    return routes, counts, overflow


def hybrid_send(per_rank, routes):
    width, dtype = per_rank[0].shape[1], per_rank[0].dtype
    nothing = np.zeros(width, dtype)
    return [
        matrix([nothing if r is PAD else per_rank[r[0]][r[1]] for r in to], width, dtype)
        for to in routes
    ]


def hybrid_send_probs(probs, routes):
    return [
        np.array([0 if r is PAD else probs[r[0]][r[1], r[2]] for r in to], np.float32)
        for to in routes
    ]


def hybrid_return(rows, routes, num_tokens, p2p_world_size):
    """For every token: rank sums rounded, p2p world sums of these rounded, their sum rounded."""
    width, dtype, n_ranks = rows[0].shape[1], rows[0].dtype, len(rows)
    out = []
    for src, count in enumerate(num_tokens):
        sums = []
        for token in range(count):
            of_worlds = []
            for first in range(0, n_ranks, p2p_world_size or n_ranks):
                of_ranks = []
                for rank in range(first, first + (p2p_world_size or n_ranks)):
                    own = [
                        row
                        for row, r in zip(rows[rank], routes[rank])
                        if r is not PAD and r[:2] == (src, token)
                    ]
                    if own:
                        of_ranks.append(round_row(float32_sum(own, width), dtype))
                of_worlds.append(round_row(float32_sum(of_ranks, width), dtype))
            sums.append(round_row(float32_sum(of_worlds, width), dtype))
        out.append(matrix(sums, width, dtype))
    return out


def hybrid_return_probs(rows, routes, shapes):
    out = [np.zeros(shape, np.float32) for shape in shapes]
    for rank, to in enumerate(routes):
        for row, route in enumerate(to):
            if route is not PAD:
                src, token, expert = route
                out[src][token, expert] = rows[rank][row]
    return out
