"""MXFP4 tokens with "even" scales: row-major scales, or the slot layout of fuse_a_scale_preshuffle.

In the slot layout every expert has a slot of a fixed number of rows for its scales. Scale (slot, row mn, column k),
with KS = hidden / 32 columns and Mpad rows a slot, is byte
slot Mpad KS + (mn // 16) % 2 + 2 ((k // 4) % 2) + 4 (mn % 16) + 64 (k % 4) + 256 (k // 8) + 32 KS (mn // 32).
"""

import ml_dtypes
import numpy as np

from epmoe.device import device_fn, f32_as_u32, load_u32, output, store_u8, u32, u64

from ..params import LANES
from . import KernelFormat, align_up
from .number_codes import e8m0_reciprocal
from .row_copy import spread
from .row_encoder import store_e2m1, values_then_scales, with_scales

GROUP = 32
output_scales = output(1)


@device_fn
def even_scale(absmax, input_scale):
    """(e8m0 byte that puts absmax, rounded to two significant bits, into [4, 8), clamp(... - 2, 0, 254); 1 / scale).

    The product with the exact reciprocal of a power of two is the quotient, rounded once, subnormals included.
    """
    exponent = u32(u32(u32(f32_as_u32(absmax) + u32(1 << 21)) >> u32(23)) & u32(0xFF))
    byte = u32(u32(max(exponent, u32(2))) - u32(2))     # at most 253, so the upper clamp has nothing to do
    return byte, e8m0_reciprocal(byte)


def make(cfg) -> KernelFormat:
    """Payload: hidden / 2 packed bytes, then hidden / 32 e8m0 scale bytes.

    Scale byte: clamp((((bits(absmax) + 2**21) >> 23) & 0xFF) - 2, 0, 254); value: e2m1(x / 2**(byte - 127)). Outputs:
    output_tokens [capacity, hidden / 2] uint8; output_scales e8m0 [capacity, hidden / 32], or with
    fuse_a_scale_preshuffle slots [groups, Mpad / 32, hidden / 256, 256], where bytes of unused rows are unspecified.
    """
    value_bytes, n_scales, slots = cfg.hidden // 2, cfg.hidden // GROUP, cfg.fuse_a_scale_preshuffle

    spread_scales = spread(1, n_scales)     # one by one, as rows of an odd n_scales are not aligned
    scale_row = device_fn(lambda out, place, src, lane: spread_scales(
        output_scales(out) + u64(place.row) * u64(n_scales), u64(1), src, lane))

    def outputs(cfg, capacity):
        # slots (the groups), blocks of 32 rows, blocks of 8 columns, bytes of such a block, interleaved
        slots_shape = cfg.n_groups, slot_rows(cfg) // 32, cfg.hidden // 256, 256
        scales = slots_shape if slots else (capacity, n_scales)
        return {"output_tokens": ((capacity, value_bytes), np.dtype(np.uint8)),
                "output_scales": (scales, np.dtype(ml_dtypes.float8_e8m0fnu))}

    return values_then_scales(cfg, value_bytes, n_scales, GROUP, with_scales(GROUP, even_scale, store_e2m1),
                              slot_scales(cfg) if slots else scale_row, outputs)


def slot_rows(cfg) -> int:
    """Mpad: the number of rows that a slot holds scales for. One expert can receive every token of every rank."""
    return align_up(cfg.n_ranks * cfg.max_tokens_per_rank, 32)


def slot_scales(cfg):
    """store_scales: stores one row's hidden / 32 scale bytes in its slot, the group. src is 4-byte aligned."""
    n_scales = cfg.hidden // 32
    slot_bytes, n_words = slot_rows(cfg) * n_scales, n_scales // 4

    @device_fn
    def store(out, place, src, lane):
        m = u32(place.row_in_group)
        base = output_scales(out) + u64(place.group) * u64(slot_bytes) + u64(m >> u32(5)) * u64(32 * n_scales)
        base = u64(base + u64(u32(m >> u32(4)) & u32(1)) + u64(4 * (m & u32(15))))
        j = u32(lane)
        while j < n_words:          # columns 4 j ... 4 j + 3
            word, dst = load_u32(src + u64(4 * j)), base + u64(2 * (j & u32(1)) + 256 * (j >> u32(1)))
            store_u8(dst, u32(word & u32(0xFF)))
            store_u8(dst + u64(64), u32(u32(word >> u32(8)) & u32(0xFF)))
            store_u8(dst + u64(128), u32(u32(word >> u32(16)) & u32(0xFF)))
            store_u8(dst + u64(192), u32(word >> u32(24)))
            j = u32(j + LANES)

    return store
