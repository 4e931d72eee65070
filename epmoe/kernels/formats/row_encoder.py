"""The loop that all quantising encoders share: a warp reads a row once, 16 elements a lane, and finds the absmax."""

from epmoe.device import (abs_f32, bf16_hi, bf16_lo, device_fn, f32, i32, load16, max_f32, output, store_u8,
                          store_u64, u64)

from ..bits import over_lanes
from ..params import LANES
from . import KernelFormat, align_up
from .number_codes import e2m1x8
from .row_copy import clear_padding, copy_part, most_parts

LANE_ELEMENTS = 16
LANE_BYTES = 32         # of bf16
maximum = device_fn(lambda a, b: max_f32(a, b))


def encode_parts(hidden: int) -> int:
    """How many warps can share the encoding of a row: one for each step of 32 lanes x 16 elements."""
    return -(-hidden // (LANES * LANE_ELEMENTS))


def encode_row(hidden: int, group: int, quantise, clear_rest):
    """encode_part of a KernelFormat: a device function that hands every 16 elements of a row to `quantise`.

    hidden, group: elements of a row, and of a group with one scale (16, 32, 64, ...; it divides hidden).
    quantise(dst_payload, chunk, there, ab, absmax, input_scale, lane): chunk counts the row's runs of 16 elements.
    ab are its 8 + 8 bf16 values in 4 + 4 words. absmax is the whole group's, in all of the group's lanes. It writes
    only if `there`: all lanes take every step, for the shuffles, and past the row's end they repeat its last group.
    clear_rest(dst_payload, lane): zeroes the payload's padding. One warp does so; of several, the warp of part 0.

    Loads are ordinary ones: two consecutive ones share each 32-byte sector, which a load that bypasses L1 might fetch
    twice.
    """
    n_chunks, n_steps, group_lanes = hidden // LANE_ELEMENTS, encode_parts(hidden), group // LANE_ELEMENTS
    last_group, group_maximum = n_chunks - group_lanes, over_lanes(maximum, group_lanes)

    @device_fn
    def encode_part(src_row, dst_payload, input_scale, part, n_parts, lane):
        steps = i32((n_steps + n_parts - 1) // n_parts)
        step, end = i32(part * steps), i32(min(part * steps + steps, n_steps))
        while step < end:
            chunk = i32(step * LANES + lane)
            src = src_row + u64(LANE_BYTES * min(chunk, i32(last_group + (lane & (group_lanes - 1)))))
            ab = load16(src), load16(src + u64(16))
            absmax = group_maximum(max_f32(f32(0.0), max_f32(absmax8(ab[0]), absmax8(ab[1]))))
            quantise(dst_payload, chunk, chunk < n_chunks, ab, absmax, input_scale, lane)
            step = i32(step + 1)
        if part == 0:
            clear_rest(dst_payload, lane)

    return encode_part


def with_scales(group: int, scale_of, store_values, store_scale=store_u8, scale_bytes=1):
    """quantise for a format that has, for each group of `group` elements, a scale of scale_bytes bytes.

    scale_of(absmax, input_scale) -> (scale, factor of its values). store_values(dst_payload, chunk, ab, factor).
    """
    group_lanes = group // LANE_ELEMENTS
    shift = group_lanes.bit_length() - 1

    def with_scales_at(scales_at):
        @device_fn
        def quantise(dst_payload, chunk, there, ab, absmax, input_scale, lane):
            scale, factor = scale_of(absmax, input_scale)
            if there:
                store_values(dst_payload, chunk, ab, factor)
                if lane & (group_lanes - 1) == 0:
                    store_scale(dst_payload + u64(scales_at + scale_bytes * i32(chunk >> shift)), scale)

        return quantise

    return with_scales_at


@device_fn
def store_e2m1(dst_payload, chunk, ab, factor):
    """store_values for the FP4 formats: 8 bytes a lane."""
    store_u64(dst_payload + u64(8 * chunk), u64(u64(e2m1x8(ab[0], factor)) | u64(u64(e2m1x8(ab[1], factor)) << u64(32))))


@device_fn
def absmax8(q):
    """The largest |x| of the 8 bf16 values of a 16-byte load q (4 words); NaN only if all are NaN, as in max.f32."""
    return max_f32(max_f32(absmax2(q[0]), absmax2(q[1])), max_f32(absmax2(q[2]), absmax2(q[3])))


@device_fn
def absmax2(word):
    """The larger |x| of the two bf16 values of a word."""
    return max_f32(abs_f32(bf16_lo(word)), abs_f32(bf16_hi(word)))


def values_then_scales(cfg, value_bytes, scale_bytes, group, quantise, store_scales, outputs, **more) -> KernelFormat:
    """The format with a payload of a row's values, then its scales, each padded with zeros to cfg.alignment.

    group: elements with one scale. quantise: function scales_at -> what encode_row calls; scales_at: where the scales
    begin. store_scales(out, place, src, lane): device function, a warp puts a row's scales at src into the outputs.
    outputs, more: of the KernelFormat; the values are output 0.
    """
    scales_at = align_up(value_bytes, cfg.alignment)
    token_size = scales_at + align_up(scale_bytes, cfg.alignment)
    clear_after_values = clear_padding(scales_at - value_bytes)
    clear_after_scales = clear_padding(token_size - scales_at - scale_bytes)
    copy_values, output_tokens = copy_part(value_bytes), output(0)

    @device_fn
    def clear_rest(dst_payload, lane):
        clear_after_values(dst_payload + u64(value_bytes), lane)
        clear_after_scales(dst_payload + u64(scales_at + scale_bytes), lane)

    @device_fn
    def decode(payload, out, place, part, n_parts, lane):
        if part == 0:
            store_scales(out, place, payload + u64(scales_at), lane)
        copy_values(output_tokens(out) + u64(place.row) * u64(value_bytes), payload, part, n_parts, lane)

    encode_part = encode_row(cfg.hidden, group, quantise(scales_at), clear_rest)
    return KernelFormat(token_size, False, outputs, tuple(outputs(cfg, 0)), encode_part, encode_parts(cfg.hidden),
                        decode, most_parts(value_bytes), **more)
