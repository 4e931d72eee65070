"""Errors found on the device: their number, and the first one with its place and both values."""

from dataclasses import dataclass

import numpy as np

from epmoe.device import atomic_add_relaxed_gpu_i32, device_fn, i32, store_i32, store_u32, u32, u64

WORDS = 16
COUNT, ROUND, WHAT, PLACE, PART, EXPECTED, SEEN = range(7)
ROWS, COMBINED = 8, 10  # u64 tallies: rows and combined tokens that were checked

(RECV_COUNT, ROW_OFFSETS, EXPERT_IDS, PADDING, NOT_A_TOKEN, WRONG_PLACE, TWICE, PAYLOAD, ENCODED, SUM) = range(1, 11)
# what -> (words, with {place} and {part}; both values are bits)
SAYS = {
    RECV_COUNT: "recv_count[local_expert {place}, src_rank {part}]",
    ROW_OFFSETS: "row_offsets[{place}]",
    EXPERT_IDS: "expert_ids[{place}]",
    PADDING: "src_info of padding row {place}, column {part}",
    NOT_A_TOKEN: "row {place}: src_info column {part} lies outside the src_rank's tokens or top_k; its limit",
    WRONG_PLACE: "row {place}: the expert that its (token, k) selects, k {part}",
    TWICE: "row {place}: its (token, k) came twice; token {part}",
    PAYLOAD: "row {place}, elements from {part} on: bits of the token",
    ENCODED: "output array number {place} of the format, byte {part} on: the token, encoded and decoded again",
    SUM: "combined token {place}, elements from {part} on: bits of the weighted sum",
}


@device_fn
def record(errors, number, what, place, part, expected, seen):
    """Count a difference. The first one of a rank keeps its place."""
    if atomic_add_relaxed_gpu_i32(errors + u64(4 * COUNT), i32(1)) == 0:
        store_i32(errors + u64(4 * ROUND), i32(number))
        store_i32(errors + u64(4 * WHAT), i32(what))
        store_i32(errors + u64(4 * PLACE), i32(place))
        store_i32(errors + u64(4 * PART), i32(part))
        store_u32(errors + u64(4 * EXPECTED), u32(expected))
        store_u32(errors + u64(4 * SEEN), u32(seen))


@dataclass(frozen=True)
class Found:
    """The findings of one rank's kernels so far."""

    rank: int
    errors: int
    rows: int
    tokens: int
    first: str | None  # the first difference in words


def found(rank, words) -> Found:
    """Found, from a rank's words [WORDS] int32."""
    words = np.ascontiguousarray(words, np.int32)
    rows, tokens = (int(words[i : i + 2].view(np.uint64)[0]) for i in (ROWS, COMBINED))
    first = None
    if words[COUNT]:
        expected, seen = (int(words[i : i + 1].view(np.uint32)[0]) for i in (EXPECTED, SEEN))
        place = SAYS[int(words[WHAT])].format(place=int(words[PLACE]), part=int(words[PART]))
        first = f"rank {rank}, round {int(words[ROUND]) + 1}: {place}: expected {_number(expected)}, is {_number(seen)}"
    return Found(rank, int(words[COUNT]) & 0xFFFFFFFF, rows, tokens, first)


def _number(bits):
    signed = bits - (1 << 32) if bits >> 31 else bits
    return f"{signed} (0x{bits:08x})"
