"""Places of scales: the example of the 5-D tiles, and tiles of its own for each group."""

import numpy as np
import pytest

from epmoe_ref import NVBlockScaledTokenFormat


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
