"""bf16 tokens: the payload is the row itself, the output its copy."""

import ml_dtypes
import numpy as np

from epmoe.device import device_fn, output, u64

from ..params import BF16_BYTES
from . import KernelFormat, align_up
from .row_copy import clear_padding, copy_part, most_parts

output_tokens = output(0)


def make(cfg) -> KernelFormat:
    """Payload: hidden x 2 bytes. Outputs: output_tokens [capacity, hidden] bf16."""
    row_bytes = cfg.hidden * BF16_BYTES
    token_size, copy_in = align_up(row_bytes, cfg.alignment), copy_part(row_bytes, read_only=True)
    copy_out, clear_rest = copy_part(row_bytes), clear_padding(token_size - row_bytes)

    @device_fn
    def encode_part(src_row, dst_payload, input_scale, part, n_parts, lane):
        copy_in(dst_payload, src_row, part, n_parts, lane)
        if part == 0:
            clear_rest(dst_payload + u64(row_bytes), lane)

    @device_fn
    def decode(payload, out, place, part, n_parts, lane):
        copy_out(output_tokens(out) + u64(place.row) * u64(row_bytes), payload, part, n_parts, lane)

    def outputs(cfg, capacity):
        return {"output_tokens": ((capacity, cfg.hidden), np.dtype(ml_dtypes.bfloat16))}

    return KernelFormat(token_size, token_size == row_bytes, outputs, ("output_tokens",), encode_part,
                        most_parts(row_bytes), decode, most_parts(row_bytes))
