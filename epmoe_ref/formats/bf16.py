"""BF16: the token unchanged."""

import numpy as np
from ml_dtypes import bfloat16

from .message import TokenFormat


class BF16TokenFormat(TokenFormat):
    """hid_dim x 2 bytes, no scales; output_tokens bf16 [rows, hid_dim]. hid_dim is a multiple of 8 (16 bytes).

    Every bit pattern arrives unchanged, including NaN payloads.
    """

    hidden_multiple = 8
    values_dtype = bfloat16

    def values_size(self) -> int:
        """Bytes of the values."""
        return 2 * self.hid_dim

    def encode(self, rows: np.ndarray, input_scale=1.0) -> np.ndarray:
        """bf16 [n, hid_dim] to uint8 [n, token_size()]; a view of contiguous rows where no padding is needed."""
        self._check_rows(rows)
        values = np.ascontiguousarray(rows).view(np.uint8)
        padding = self.token_size() - self.values_size()
        return np.pad(values, ((0, 0), (0, padding))) if padding else values


def make(cfg) -> BF16TokenFormat:
    """The format of a configuration whose token_format is "bf16"."""
    return BF16TokenFormat(cfg.hidden, cfg.top_k, cfg.alignment)
