"""Where the block-scaled formats put scales in the output: tiles of 128 rows, or slots of fixed size.

Tiles. The 5-D scale tiles of the block-scaled formats: 128 rows by 4 scales to an atom of 512 bytes.

Shape [tiles, n_words, 32, 4, 4] with n_words = hidden / (4 V): the four scale bytes of (row r, columns 4 V j ...) are
the word at [r // 128, j, r % 32, (r % 128) // 32]. Rows count from the group's start, and every group starts a tile.

Slots. The slot layout of fuse_a_scale_preshuffle: every expert has a slot of a fixed number of rows for its scales.

Scale (slot, row mn, column k), with KS = hidden / 32 columns and Mpad rows a slot, is byte
slot Mpad KS + (mn // 16) % 2 + 2 ((k // 4) % 2) + 4 (mn % 16) + 64 (k % 4) + 256 (k // 8) + 32 KS (mn // 32).
"""

from epmoe.device import device_fn, i32, load_u32, store16, store_u8, store_u32, u32, u64

from .kernel_format import align_up
from .row_copy import LANES, spread_words

TILE_ROWS = 128
ATOM_BYTES = 512


def n_tiles_for(n_rows: int, n_groups: int) -> int:
    """Tiles that n_rows rows in n_groups groups can need at most: each group can leave 127 rows of a tile unused."""
    return (n_rows + (TILE_ROWS - 1) * n_groups) // TILE_ROWS


def store_row_scales(n_words: int):
    """Device function (tiles, first_tile, row_in_group, src, lane): one row's scale bytes at src into the tiles.

    tiles: address of the scale array; first_tile: the group's; src: n_words words, 4-byte aligned.
    """
    spread = spread_words(n_words)

    @device_fn
    def store(tiles, first_tile, row_in_group, src, lane):
        r = u32(row_in_group)
        tile = u64(first_tile) + u64(r >> u32(7))
        dst = tiles + tile * u64(n_words * ATOM_BYTES) + u64(16 * (r & u32(31)) + 4 * (u32(r >> u32(5)) & u32(3)))
        spread(dst, u64(ATOM_BYTES), src, lane)

    return store


def clear_unused_rows(n_words: int):
    """Device function (tiles, first_tile, n_rows, lane): zero the bytes of the rows past n_rows in a group's last tile.

    A lane owns rows lane, lane + 32, lane + 64, lane + 96 of the tile: 16 adjacent bytes of each atom.
    """

    @device_fn
    def clear(tiles, first_tile, n_rows, lane):
        n_used = i32(u32(n_rows) & u32(TILE_ROWS - 1))
        if n_used > 0:
            tile = u64(first_tile) + u64(u32(n_rows) >> u32(7))
            dst = tiles + tile * u64(n_words * ATOM_BYTES) + u64(16 * lane)
            j = 0
            while j < n_words:
                if lane >= n_used:
                    store16(dst, 0, 0, 0, 0)
                else:
                    if lane + 32 >= n_used:
                        store_u32(dst + u64(4), 0)
                    if lane + 64 >= n_used:
                        store_u32(dst + u64(8), 0)
                    if lane + 96 >= n_used:
                        store_u32(dst + u64(12), 0)
                dst = u64(dst + u64(ATOM_BYTES))
                j += 1

    return clear


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
