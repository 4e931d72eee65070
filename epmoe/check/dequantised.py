"""The numbers that a dispatch result represents, in any token format."""

import ml_dtypes
import numpy as np

from epmoe.check.places import packed, places, scale_index
from epmoe_ref import format_of


def dequantised(cfg, d):
    """float32 (rows, hidden) values of a Dispatched (NumPy, exact rows). NVFP4 is decoded as if input_scale were 1."""
    tokens, fmt = d.output_tokens, format_of(cfg)
    if fmt.scales_dtype is None:
        return tokens.astype(np.float32)
    if packed(cfg):
        pairs = tokens.view(np.uint8)
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), cfg.hidden)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    else:
        values = np.ascontiguousarray(tokens).view(fmt.values_dtype).astype(np.float32)
    where = places(cfg, d.row_offsets, d.recv_count)
    scales = np.ascontiguousarray(d.output_scales)
    at = scale_index(cfg, scales.shape, d.row_offsets, where.group, where.row_in_group)
    scales = scales.reshape(-1).view(fmt.scales_dtype)[at].astype(np.float32)
    with np.errstate(invalid="ignore"):
        return values * np.repeat(scales, fmt.group_size, axis=1)
