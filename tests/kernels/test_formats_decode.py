"""Law: a decoder puts values and scales where the reference does, and writes nothing else but unused rows of tiles."""

import numpy as np
import pytest
from row_kernels import POISON, decode

from epmoe_ref import EPConfig, format_of
from epmoe_ref.config import TOKEN_FORMATS
from epmoe_ref.dispatch import empty_result, put_scales

CASES = [(name, {}) for name in TOKEN_FORMATS] + [("mxfp4_rows", {"fuse_a_scale_preshuffle": True})]
SHORTEST = [(name, of.hidden_multiple) for name, of in TOKEN_FORMATS.items()] + [("mxfp4_rows", 96)]


def check(token_format, options, hidden, counts, capacity, *, n_parts=1, **world):
    cfg = EPConfig(2, 2 * len(counts), 2, hidden, max(counts), token_format=token_format, **options, **world)
    fmt, rng = format_of(cfg), np.random.default_rng(0)
    payloads = rng.integers(0, 256, (sum(counts), fmt.token_size()), dtype=np.uint8)
    want = empty_result(cfg, 0, np.stack([counts, np.zeros_like(counts)], 1), np.empty((0, 2), np.int32))
    want.output_tokens.view(np.uint8)[...] = POISON  # padding rows are not written
    if want.output_scales is not None and want.scales_offset is None:  # unused rows of tiles are zeros
        want.output_scales.view(np.uint8)[...] = POISON
    values, scales = fmt.decode(payloads)
    rows = [(group, row) for group, n in enumerate(counts) for row in range(n)]
    for i, (group, row) in enumerate(rows):
        want.output_tokens[want.row_offsets[group] + row] = values[i]
        if scales is not None:
            put_scales(fmt, want, group, row, scales[i : i + 1])

    order = rng.permutation(len(rows))
    tiles_before = [sum(-(-n // 128) for n in counts[:group]) for group in range(len(counts))]
    groups = np.stack([want.row_offsets[:-1], counts, tiles_before], 1)
    got = decode(cfg, payloads[order], np.array(rows)[order].reshape(-1, 2), groups, capacity, n_parts=n_parts)
    for name, array in got.items():
        whole = np.full(array.shape, POISON, np.uint8)
        written = getattr(want, name)
        written = written.view(np.uint8).reshape(*written.shape[:-1], -1)
        whole[tuple(map(slice, written.shape))] = written
        np.testing.assert_array_equal(array, whole, err_msg=f"{name} of {token_format}")


@pytest.mark.parametrize("token_format, options", CASES)
@pytest.mark.parametrize(
    "hidden, counts, capacity, more",
    [
        (256, [3, 0, 7, 1], 32, {}),
        (2304, [2, 1], 16, dict(alignment=64)),
        (2304, [2, 1], 16, dict(n_parts=2)),
        (2304, [2, 1], 16, dict(n_parts=5)),
        pytest.param(7168, [200, 0, 128, 77, 1, 300], 800, {}, marks=pytest.mark.gpu),
    ],
    ids=["several groups", "long rows and a wide alignment", "two warps a row", "five warps a row", "large rows"],
)
def test_rows(token_format, options, hidden, counts, capacity, more):
    check(token_format, options, hidden, counts, capacity, **more)


@pytest.mark.parametrize("on", ["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("token_format, hidden", SHORTEST)
def test_shortest_rows(token_format, hidden, on):
    check(token_format, {}, hidden, [5, 2], 16)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("counts", [[100, 200, 100], [128, 1, 33], [127, 0, 95, 65]])
@pytest.mark.parametrize("token_format", ["nvfp4", "mxfp8"])
def test_tiles_with_every_amount_of_unused_rows(token_format, counts):
    check(token_format, {}, 128, counts, sum(counts))


def test_slots_hold_every_row_once():
    """Mpad rows a slot, at most n_ranks * max_tokens_per_rank used; every row has bytes of its own."""
    check("mxfp4_rows", {"fuse_a_scale_preshuffle": True}, 256, [49, 17, 33], 99)
