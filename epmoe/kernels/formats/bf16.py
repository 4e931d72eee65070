"""bf16 tokens: the payload is the row itself, the output its copy."""

import ml_dtypes
import numpy as np

from epmoe.device import device_fn, load_u64, u64

from .kernel_format import KernelFormat, align_up
from .row_copy import clear_padding, copy_input_vectors, copy_vectors

BF16_BYTES = 2


def make(cfg) -> KernelFormat:
    """Payload: hidden x 2 bytes. Outputs: output_tokens [capacity, hidden] bf16."""
    row_bytes = cfg.hidden * BF16_BYTES
    token_size = align_up(row_bytes, cfg.alignment)
    copy_in = copy_input_vectors(row_bytes)
    copy_out = copy_vectors(row_bytes)
    clear_rest = clear_padding(token_size - row_bytes)

    @device_fn
    def encode(src_row, dst_payload, input_scale, lane):
        copy_in(dst_payload, src_row, lane)
        clear_rest(dst_payload + u64(row_bytes), lane)

    @device_fn
    def decode(payload, out, row, group, row_in_group, group_start, lane):
        copy_out(load_u64(out) + u64(row) * u64(row_bytes), payload, lane)

    def outputs(cfg, capacity):
        return {"output_tokens": ((capacity, cfg.hidden), np.dtype(ml_dtypes.bfloat16))}

    return KernelFormat(token_size, token_size == row_bytes, 1, ("output_tokens",), outputs, encode, decode)
