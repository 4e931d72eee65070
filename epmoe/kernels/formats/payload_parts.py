"""The payload of a format that rounds: values, then their scales, each padded with zeros to the alignment."""

from epmoe.device import device_fn, u64

from .kernel_format import align_up
from .row_copy import clear_padding


def values_and_scales(value_bytes: int, scale_bytes: int, alignment: int):
    """(where the scales begin, bytes of the payload, clear_rest).

    clear_rest(dst_payload, lane): device function, a warp writes the zeros behind the values and behind the scales.
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
