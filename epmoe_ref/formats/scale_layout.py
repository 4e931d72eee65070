"""Where output_scales holds the scale of (row, scale column): four layouts, each a sum of two offsets.

Every layout is a function (shape, row_offsets, scales_offset, group, rows) -> (row_places, column_places): with
`flat = output_scales.reshape(-1)`, the scale of row `rows[i]` of the group and column c is
`flat[row_places[i] + column_places[c]]`. rows: int64 [n], numbered within the group (the expert, or the shared expert,
which is group 0). Column c holds the scale of the elements [c * V, (c + 1) * V) of a token, V elements a scale.
"""

import numpy as np

TILE_ROWS = 128  # SF_MN_GROUP_SIZE: rows of one scale tile
SLOT_ROWS = 32  # the rows of a slot are rounded up to this


def row_major(shape, row_offsets, scales_offset, group, rows):
    """[rows, columns]: one line of scales per output row."""
    n_columns = shape[1]
    return (int(row_offsets[group]) + rows) * n_columns, np.arange(n_columns)


def transposed(shape, row_offsets, scales_offset, group, rows):
    """[columns, rows]: one line of scales per scale column."""
    n_columns, n_rows = shape
    return int(row_offsets[group]) + rows, np.arange(n_columns) * n_rows


def tiles_5d(shape, row_offsets, scales_offset, group, rows):
    """[tiles, columns / 4, 32, 4, 4]: tiles of 128 rows x 4 columns, as block-scaled matrix multiplication reads them.

    (row r of the group, column c) is at [first + r // 128, c // 4, r % 32, (r % 128) // 32, c % 4], where the group's
    first tile is `row_offsets[group] // 128 + scales_offset[group]`.
    """
    _, n_quads, m_low, m_high, k_low = shape
    tile = int(row_offsets[group]) // TILE_ROWS + int(scales_offset[group]) + rows // TILE_ROWS
    row_places = (tile * n_quads * m_low + rows % m_low) * (m_high * k_low) + rows % TILE_ROWS // m_low * k_low
    columns = np.arange(n_quads * k_low)
    return row_places, columns // k_low * (m_low * m_high * k_low) + columns % k_low


def slots_4d(shape, row_offsets, scales_offset, group, rows):
    """[groups, Mpad / 32, columns / 8, 256]: a slot of Mpad rows per group, in the order matrix instructions load.

    With KS columns, (row mn, column k) of a slot is at byte `slot * Mpad * KS + (mn // 16) % 2 + 2 * ((k // 4) % 2)
    + 4 * (mn % 16) + 64 * (k % 4) + 256 * (k // 8) + 32 * KS * (mn // 32)`; one to one because KS % 8 == 0.
    """
    _, n_blocks, n_octets, block = shape
    n_columns = 8 * n_octets
    row_places = (group * n_blocks + rows // SLOT_ROWS) * n_octets * block + rows // 16 % 2 + 4 * (rows % 16)
    columns = np.arange(n_columns)
    return row_places, 2 * (columns // 4 % 2) + 64 * (columns % 4) + block * (columns // 8)


def layout_of(output_scales: np.ndarray):
    """The layout of an array of scales, recognised by its shape."""
    if output_scales.ndim == 5:
        return tiles_5d
    if output_scales.ndim == 4:
        return slots_4d
    return transposed if output_scales.dtype == np.float32 else row_major
