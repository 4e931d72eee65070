"""Places of scales: the example of the 5-D tiles, its formula, and no two scales in one place."""

import numpy as np
import pytest

from epmoe_ref import NVBlockScaledTokenFormat
from epmoe_ref.formats.scale_layout import row_major, slots_4d, tiles_5d, transposed


def places(layout, shape, row_offsets, scales_offset, group, n_rows):
    row_places, column_places = layout(shape, row_offsets, scales_offset, group, np.arange(n_rows))
    return row_places[:, None] + column_places


def test_scales_offset_of_the_example():
    fmt = NVBlockScaledTokenFormat(128, 4, kind="mxfp8")
    assert fmt.pad_expert_offsets([100, 200, 100]).tolist() == [0, 100, 300, 400]
    assert fmt.scales_offset([100, 200, 100]).tolist() == [0, 1, 1]
    assert fmt.scales_offset([100, 200, 100]).dtype == np.uint32
    assert fmt.scales_shape([100, 200, 100], 0) == (4, 1, 32, 4, 4)


@pytest.mark.parametrize("counts", [[0, 0, 0], [128, 128, 1], [127, 1, 0, 300, 5], [1] * 9])
def test_groups_have_tiles_of_their_own_in_their_order(counts):
    fmt = NVBlockScaledTokenFormat(128, 4, kind="nvfp4")
    row_offsets, scales_offset = fmt.pad_expert_offsets(counts), fmt.scales_offset(counts)
    tile = 0
    for group, count in enumerate(counts):
        assert row_offsets[group] // 128 + scales_offset[group] == tile
        tile += -(-count // 128)
    assert fmt.scales_shape(counts, 0) == (tile, 2, 32, 4, 4)


@pytest.mark.parametrize("v", [16, 32])
def test_5d_formula(v):
    hidden, row_offsets, scales_offset = 8 * v, [0, 100, 300, 400], [0, 1, 1]
    shape = (4, hidden // (4 * v), 32, 4, 4)
    got = places(tiles_5d, shape, row_offsets, scales_offset, 1, 200)
    for r in (0, 1, 31, 32, 127, 128, 199):
        for k in range(0, hidden, v):
            at = (1 + r // 128, k // (4 * v), r % 32, (r % 128) // 32, (k // v) % 4)
            assert got[r, k // v] == np.ravel_multi_index(at, shape)


@pytest.mark.parametrize("n_columns", [8, 24, 224])
def test_slot_layout_is_the_formula_and_one_to_one(n_columns):
    m_pad, n_slots = 96, 3
    shape = (n_slots, m_pad // 32, n_columns // 8, 256)
    assert np.prod(shape) == n_slots * m_pad * n_columns
    everywhere = []
    for slot in range(n_slots):
        got = places(slots_4d, shape, None, None, slot, m_pad)
        mn, k = np.arange(m_pad)[:, None], np.arange(n_columns)
        formula = (
            slot * m_pad * n_columns
            + (mn // 16) % 2
            + 2 * ((k // 4) % 2)
            + 4 * (mn % 16)
            + 64 * (k % 4)
            + 256 * (k // 8)
            + 32 * n_columns * (mn // 32)
        )
        assert np.array_equal(got, formula)
        everywhere.append(got.ravel())
    assert np.array_equal(np.sort(np.concatenate(everywhere)), np.arange(np.prod(shape)))


def test_plain_layouts():
    scales = np.arange(20).reshape(4, 5)
    assert (
        scales.ravel()[places(transposed, (4, 5), [0, 2], None, 1, 3)].tolist()
        == scales.T[2:].tolist()
    )
    assert (
        scales.ravel()[places(row_major, (4, 5), [0, 2], None, 1, 2)].tolist()
        == scales[2:].tolist()
    )
