"""MXFP4 with even scales: row-major, or in the slot layout that a matrix multiplication loads without shuffling."""

import numpy as np
from ml_dtypes import float8_e8m0fnu

from ..casts import absmax, e8m0_to_float32, pack_e2m1, to_e2m1
from ..errors import EPValueError
from .message import TokenFormat, align_up
from .scale_layout import SLOT_ROWS, row_major, slots_4d


def even_scale(largest: np.ndarray) -> np.ndarray:
    """The scale of groups with these largest magnitudes: float32 [...] to float8_e8m0fnu [...].

    byte = clamp((((bits + 2**21) >> 23) & 0xFF) - 2, 0, 254): 1.6 gives 2^-2, 6 gives 1, 7 gives 2, 0 gives byte 0.
    """
    bits = np.ascontiguousarray(largest, np.float32).view(np.uint32).astype(np.int64)
    byte = np.clip((((bits + (1 << 21)) >> 23) & 0xFF) - 2, 0, 254)
    return byte.astype(np.uint8).view(float8_e8m0fnu).reshape(np.shape(largest))


class MXFP4TokenFormat(TokenFormat):
    """hid_dim / 2 bytes of e2m1, two a byte, then hid_dim / 32 e8m0 scales; a value is `code * scale`.

    output_tokens uint8 [rows, hid_dim / 2]. output_scales e8m0 [rows, hid_dim / 32]; or, with fuse_a_scale_preshuffle,
    the slot layout [groups, Mpad / 32, hid_dim / 256, 256] with `Mpad = align_up(n_ranks * max_tokens_per_rank, 32)`
    rows a group, however many arrive. The slot is the local expert, plus 1 if the shared expert is fused. Bytes of rows
    that do not exist are unspecified on the device and zero here. Rows are not padded. hid_dim is a multiple of 32,
    with fuse_a_scale_preshuffle of 256.
    """

    hidden_multiple = 32
    group_size = 32
    values_dtype = np.dtype(np.uint8)
    scales_dtype = float8_e8m0fnu

    def __init__(self, hid_dim: int, top_k: int, alignment: int = 16, *, fuse_a_scale_preshuffle: bool = False):
        super().__init__(hid_dim, top_k, alignment)
        if fuse_a_scale_preshuffle and hid_dim % 256:
            raise EPValueError(
                f"hid_dim={hid_dim} must be a multiple of 256 with fuse_a_scale_preshuffle=True: the "
                "slot layout holds scales eight at a time; pad the tokens or leave it False"
            )
        self.fuse_a_scale_preshuffle = bool(fuse_a_scale_preshuffle)
        self.scale_layout = slots_4d if self.fuse_a_scale_preshuffle else row_major

    def values_size(self) -> int:
        """Bytes of the values."""
        return self.hid_dim // 2

    def scales_size(self) -> int:
        """Bytes of the scales."""
        return self.n_scales()

    def scales_shape(self, counts, slot_rows: int) -> tuple[int, ...]:
        """Shape of output_scales for groups with `counts` rows. slot_rows is n_ranks * max_tokens_per_rank."""
        if self.fuse_a_scale_preshuffle:
            return (len(counts), align_up(slot_rows, SLOT_ROWS) // SLOT_ROWS, self.n_scales() // 8, 256)
        return int(self.pad_expert_offsets(counts)[-1]), self.n_scales()

    def quantise(self, groups: np.ndarray, input_scale):
        """float32 [n, hid_dim / 32, 32] to packed e2m1 and e8m0 scales: q = e2m1(x / scale).

        absmax ignores NaN, which encodes as +6. Inf gives byte 253 and saturates. A group of zeros has byte 0.
        """
        scales = even_scale(absmax(groups))
        return pack_e2m1(to_e2m1(groups / e8m0_to_float32(scales))), scales


def make(cfg) -> MXFP4TokenFormat:
    """The format of a configuration whose token_format is "mxfp4_rows"."""
    return MXFP4TokenFormat(cfg.hidden, cfg.top_k, cfg.alignment, fuse_a_scale_preshuffle=cfg.fuse_a_scale_preshuffle)
