"""The loop that all quantising encoders share: a warp reads a row once, 16 elements a lane, and finds the absmax."""

from epmoe.device import (abs_f32, bf16_hi, bf16_lo, device_fn, f32, i32, load16, max_f32, shfl_xor, store_u8, store_u64,
                          u64)

from . import align_up
from .number_codes import e2m1x16
from .row_copy import clear_padding

LANES = 32
LANE_ELEMENTS = 16
LANE_BYTES = 32         # of bf16


def encode_parts(hidden: int) -> int:
    """How many warps can share the encoding of a row: one for each step of 32 lanes x 16 elements."""
    return -(-hidden // (LANES * LANE_ELEMENTS))


def encode_row(hidden: int, group: int, quantise, clear_rest):
    """encode_part of a KernelFormat: a device function that hands every 16 elements of a row to `quantise`.

    hidden, group: elements of a row, and of a group with one scale (16, 32, 64, ...; it divides hidden).
    quantise(dst_payload, chunk, there, ab, absmax, input_scale, lane): chunk counts the row's runs of 16 elements;
    ab are its 8 + 8 bf16 values in 4 + 4 words; absmax is that of the whole group, the same in the group's lanes. It
    writes only if `there`: all lanes take every step, for the shuffles, and past the row's end they repeat its last
    group.
    clear_rest(dst_payload, lane): what is padding in the payload; by one warp, part 0 where there are several.

    Loads are ordinary ones: two consecutive ones share each 32-byte sector, which a load that bypasses L1 might fetch
    twice.
    """
    n_chunks, n_steps = hidden // LANE_ELEMENTS, encode_parts(hidden)
    group_lanes = group // LANE_ELEMENTS
    last_group = n_chunks - group_lanes
    group_maximum = maximum_over(group_lanes)

    @device_fn
    def load_step(src_row, chunk, lane):
        src = src_row + u64(LANE_BYTES * min(chunk, i32(last_group + (lane & (group_lanes - 1)))))
        return load16(src), load16(src + u64(16))

    @device_fn
    def encode_step(dst_payload, chunk, ab, input_scale, lane):
        absmax = group_maximum(max_f32(f32(0.0), max_f32(absmax8(ab[0]), absmax8(ab[1]))))
        quantise(dst_payload, chunk, chunk < n_chunks, ab, absmax, input_scale, lane)

    @device_fn
    def encode_part(src_row, dst_payload, input_scale, part, n_parts, lane):
        steps = i32((n_steps + n_parts - 1) // n_parts)
        step, end = i32(part * steps), i32(min(part * steps + steps, n_steps))
        while step < end:
            chunk = i32(step * LANES + lane)
            encode_step(dst_payload, chunk, load_step(src_row, chunk, lane), input_scale, lane)
            step = i32(step + 1)
        if part == 0:
            clear_rest(dst_payload, lane)

    return encode_part


def with_scale_bytes(scales_at: int, group: int, scale_of, store_values):
    """What encode_row calls for a format whose groups of 16 or 32 elements have one scale byte each.

    scale_of(absmax, input_scale) -> (byte, factor of the group's values). store_values(dst_payload, chunk, ab, factor).
    """
    group_lanes = group // LANE_ELEMENTS

    @device_fn
    def quantise(dst_payload, chunk, there, ab, absmax, input_scale, lane):
        byte, factor = scale_of(absmax, input_scale)
        if there:
            store_values(dst_payload, chunk, ab, factor)
            if lane & (group_lanes - 1) == 0:
                store_u8(dst_payload + u64(scales_at + i32(chunk >> (group_lanes - 1))), byte)

    return quantise


@device_fn
def store_e2m1(dst_payload, chunk, ab, factor):
    """store_values of the FP4 formats: 8 bytes a lane."""
    store_u64(dst_payload + u64(8 * chunk), e2m1x16(ab[0], ab[1], factor))


@device_fn
def absmax8(q):
    """The largest |x| of the 8 bf16 values of a 16-byte load q (4 words); NaN only if all are NaN, as in max.f32."""
    return max_f32(max_f32(absmax2(q[0]), absmax2(q[1])), max_f32(absmax2(q[2]), absmax2(q[3])))


@device_fn
def absmax2(word):
    """The larger |x| of the two bf16 values of a word."""
    return max_f32(abs_f32(bf16_lo(word)), abs_f32(bf16_hi(word)))


def maximum_over(n_lanes: int):
    """Device function (v): the largest v of each n_lanes adjacent lanes; n_lanes is a power of two."""
    if n_lanes == 1:
        return _itself
    over_half = maximum_over(n_lanes // 2)

    @device_fn
    def maximum(v):
        v = over_half(v)
        return max_f32(v, shfl_xor(v, n_lanes // 2))

    return maximum


@device_fn
def _itself(v):
    return v


def values_and_scales(value_bytes: int, scale_bytes: int, alignment: int):
    """(where the scales begin, bytes of the payload, clear_rest).

    clear_rest(dst_payload, lane): device function, a warp writes the zeros after the values and after the scales.
    """
    scales_at = align_up(value_bytes, alignment)
    token_size = scales_at + align_up(scale_bytes, alignment)
    clear_after_values = clear_padding(scales_at - value_bytes)
    clear_after_scales = clear_padding(token_size - scales_at - scale_bytes)

    @device_fn
    def clear_rest(dst_payload, lane):
        clear_after_values(dst_payload + u64(value_bytes), lane)
        clear_after_scales(dst_payload + u64(scales_at + scale_bytes), lane)

    return scales_at, token_size, clear_rest
