"""The slot layout of fuse_a_scale_preshuffle: every expert has a slot of a fixed number of rows for its scales.

Scale (slot, row mn, column k), with KS = hidden / 32 columns and Mpad rows a slot, is byte
slot Mpad KS + (mn // 16) % 2 + 2 ((k // 4) % 2) + 4 (mn % 16) + 64 (k % 4) + 256 (k // 8) + 32 KS (mn // 32).
"""

from epmoe.device import device_fn, load_u32, store_u8, u32, u64

from .kernel_format import align_up

LANES = 32


def slot_rows(cfg) -> int:
    """Mpad: the rows a slot holds scales for; one expert can receive every token of every rank."""
    return align_up(cfg.n_ranks * cfg.max_tokens_per_rank, 32)


def slots_shape(cfg) -> tuple[int, int, int, int]:
    """Slots (the groups), blocks of 32 rows, blocks of 8 columns, bytes of such a block (256, interleaved)."""
    return cfg.n_groups, slot_rows(cfg) // 32, cfg.hidden // 256, 256


def store_slot_scales(cfg):
    """Device function (slots, place, src, lane): one row's hidden / 32 scale bytes at src into its slot, the group.

    src is 4-byte aligned.
    """
    n_scales = cfg.hidden // 32
    slot_bytes = slot_rows(cfg) * n_scales
    n_words = n_scales // 4

    @device_fn
    def store(slots, place, src, lane):
        m = u32(place.row_in_group)
        base = slots + u64(place.group) * u64(slot_bytes) + u64(m >> u32(5)) * u64(32 * n_scales)
        base = u64(base + u64(u32(m >> u32(4)) & u32(1)) + u64(4 * (m & u32(15))))
        j = u32(lane)
        while j < n_words:          # columns 4 j ... 4 j + 3
            word = load_u32(src + u64(4 * j))
            dst = base + u64(2 * (j & u32(1)) + 256 * (j >> u32(1)))
            store_u8(dst, u32(word & u32(0xFF)))
            store_u8(dst + u64(64), u32(u32(word >> u32(8)) & u32(0xFF)))
            store_u8(dst + u64(128), u32(u32(word >> u32(16)) & u32(0xFF)))
            store_u8(dst + u64(192), u32(word >> u32(24)))
            j = u32(j + LANES)

    return store
