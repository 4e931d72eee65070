"""The message of a pair (token, k): the sizes and offsets of its parts, and its trailer."""

from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from ..casts import to_float32
from ..errors import EPValueError
from .scale_layout import row_major

# an encoder works on this many elements at a time, so its float32 scratch stays small
_BLOCK_ELEMENTS = 1 << 18


def align_up(n: int, alignment: int) -> int:
    """n rounded up to a multiple of alignment."""
    return -(-n // alignment) * alignment


class TokenFormat:
    """A token as bytes: `payload | src_info | topk_info`, each part padded up to `alignment` bytes.

    payload    token_size() bytes: the values, then the scales, each padded
    src_info   int32: the token's row in the src_rank's input_tokens
    topk_info  uint16 [top_k]: the token's global expert ids in the order of k, -1 as 65535; the receiver finds k by
               looking up its own id

    A subclass defines `values_size()`, `scales_size()`, `values_dtype`, `scales_dtype` and, except bf16, `quantise`.

    hid_dim: elements of a token, a multiple of the subclass's `hidden_multiple`. top_k: at least 1. alignment: bytes, a
    power of two. Errors: EPValueError. Source: the TokenFormat trait of the dispatch_kernel page (docs/pages.md).
    """

    hidden_multiple = 8
    group_size: int = 0  # elements that share a scale; 0: the format has no scales
    pad_rows = 1  # the rows of a group of output rows are rounded up to a multiple of this
    values_dtype: Any = None  # of output_tokens
    scales_dtype: Any = None  # of output_scales; None: the format has none
    scale_layout = staticmethod(row_major)  # the place of a scale in output_scales

    def __init__(self, hid_dim: int, top_k: int, alignment: int = 16):
        for name, value in (("hid_dim", hid_dim), ("top_k", top_k), ("alignment", alignment)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise EPValueError(f"{name}={value!r} must be a whole number of at least 1")
        if hid_dim % self.hidden_multiple:
            raise EPValueError(
                f"hid_dim={hid_dim} must be a multiple of {self.hidden_multiple} for "
                f"{type(self).__name__}: pad the tokens or choose another format"
            )
        if alignment & (alignment - 1):
            raise EPValueError(f"alignment={alignment} must be a power of two (bytes)")
        self.hid_dim, self.top_k, self.alignment = int(hid_dim), int(top_k), int(alignment)

    def values_size(self) -> int:
        """Bytes of the values, not padded."""
        raise NotImplementedError

    def scales_size(self) -> int:
        """Bytes of the scales, not padded."""
        return 0

    def n_scales(self) -> int:
        """Scales of a token."""
        return self.hid_dim // self.group_size if self.group_size else 0

    def scales_offset_in_payload(self) -> int:
        """Byte at which the scales start."""
        return align_up(self.values_size(), self.alignment)

    def token_size(self) -> int:
        """Bytes of the payload."""
        return self.scales_offset_in_payload() + align_up(self.scales_size(), self.alignment)

    def src_info_size(self) -> int:
        """Bytes of src_info, padded."""
        return align_up(4, self.alignment)

    def topk_info_size(self) -> int:
        """Bytes of topk_info, padded."""
        return align_up(2 * self.top_k, self.alignment)

    def msg_size(self) -> int:
        """Bytes of a message."""
        return self.token_size() + self.src_info_size() + self.topk_info_size()

    def src_info_offset(self) -> int:
        """Byte of the message at which src_info starts."""
        return self.token_size()

    def topk_info_offset(self) -> int:
        """Byte of the message at which topk_info starts."""
        return self.token_size() + self.src_info_size()

    def scales_shape(self, counts, slot_rows: int):
        """Shape of output_scales for groups with `counts` rows; None without scales. slot_rows: rows of a slot."""
        return None

    def scales_offset(self, counts):
        """scales_offset for groups with `counts` rows; None where the layout needs none."""
        return None

    def pad_expert_offsets(self, counts) -> np.ndarray:
        """Row offsets of groups with `counts` rows: int [groups] to uint32 [groups + 1].

        Exclusive prefix sums of the counts, each rounded up to `pad_rows`. A group's data starts at its offset, and its
        padding rows come last.
        """
        padded = -(-np.asarray(counts, np.int64) // self.pad_rows) * self.pad_rows
        return np.concatenate([[0], np.cumsum(padded)]).astype(np.uint32)

    def encode(self, rows: np.ndarray, input_scale=1.0) -> np.ndarray:
        """Input rows to payloads: bf16 [n, hid_dim] to uint8 [n, token_size()], padding bytes 0.

        input_scale: one positive finite float32; only NVFP4 uses it. The result may share memory with rows.
        """
        self._check_rows(rows)
        payload = np.zeros((len(rows), self.token_size()), np.uint8)
        values_end, scales_start = self.values_size(), self.scales_offset_in_payload()
        scales_end = scales_start + self.scales_size()
        step = max(1, _BLOCK_ELEMENTS // self.hid_dim)
        for start in range(0, len(rows), step):
            x = to_float32(rows[start : start + step])
            with np.errstate(all="ignore"):
                values, scales = self.quantise(x.reshape(len(x), -1, self.group_size), input_scale)
            block = payload[start : start + step]
            block[:, :values_end] = _bytes(values, values_end)
            block[:, scales_start:scales_end] = _bytes(scales, scales_end - scales_start)
        return payload

    def decode(self, payload: np.ndarray):
        """Payloads to the receiver's arrays: uint8 [n, >= token_size()] to (values, scales or None).

        values: values_dtype [n, values per token] (FP4: packed uint8 [n, hid_dim / 2]). scales: scales_dtype
        [n, n_scales()]. Nothing is dequantised. Both may share memory with payload.
        """
        if payload.dtype != np.uint8 or payload.ndim != 2 or payload.shape[1] < self.token_size():
            raise EPValueError(
                f"payload {payload.dtype}{list(payload.shape)} must be uint8 [n, {self.token_size()}]: "
                "give whole payloads, or messages, which start with one"
            )
        payload = np.ascontiguousarray(payload)
        values = payload[:, : self.values_size()].view(self.values_dtype)
        if self.scales_dtype is None:
            return values, None
        start = self.scales_offset_in_payload()
        return values, payload[:, start : start + self.scales_size()].view(self.scales_dtype)

    def quantise(self, groups: np.ndarray, input_scale):
        """float32 [n, n_scales(), group_size] to (values, scales), contiguous arrays of n rows."""
        raise NotImplementedError

    def messages(self, rows: np.ndarray, topk_ids: np.ndarray, input_scale=1.0) -> np.ndarray:
        """Whole messages of the tokens 0, 1, ...: bf16 [n, hid_dim], int32 [n, top_k] to uint8 [n, msg_size()]."""
        message = np.zeros((len(rows), self.msg_size()), np.uint8)
        message[:, : self.token_size()] = self.encode(rows, input_scale)
        trailer = self.src_info_offset()
        message[:, trailer : trailer + 4] = np.arange(len(rows), dtype="<i4").reshape(-1, 1).view(np.uint8)
        trailer = self.topk_info_offset()
        ids = np.ascontiguousarray(np.asarray(topk_ids).astype(np.int32).astype("<u2"))
        message[:, trailer : trailer + 2 * self.top_k] = ids.view(np.uint8)
        return message

    def _check_rows(self, rows: np.ndarray) -> None:
        is_array = isinstance(rows, np.ndarray)
        if not is_array or rows.dtype != bfloat16 or rows.ndim != 2 or rows.shape[1] != self.hid_dim:
            what = f"{rows.dtype}{list(rows.shape)}" if is_array else type(rows).__name__
            raise EPValueError(
                f"rows {what} must be a bfloat16 array [n, {self.hid_dim}]: convert with .astype(ml_dtypes.bfloat16)"
            )


def _bytes(array: np.ndarray, row_bytes: int) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8).reshape(len(array), row_bytes)
