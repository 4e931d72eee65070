"""Law: a decoder puts values and scales where its format's layout says, and writes nothing else but unused rows."""

import numpy as np
import pytest
from row_kernels import POISON, decode

from epmoe.kernels import formats
from epmoe_ref.config import EPConfig

CASES = [
    ("bf16", {}),
    ("fp8_blockwise", {}),
    ("nvfp4", {}),
    ("mxfp4", {}),
    ("mxfp8", {}),
    ("mxfp4_rows", {}),
    ("mxfp4_rows", {"fuse_a_scale_preshuffle": True}),
]
SHORTEST = [
    ("bf16", 8),
    ("fp8_blockwise", 128),
    ("nvfp4", 64),
    ("mxfp4", 128),
    ("mxfp8", 128),
    ("mxfp4_rows", 32),
    ("mxfp4_rows", 96),
]
VALUE_BITS = {"bf16": 16, "fp8_blockwise": 8, "nvfp4": 4, "mxfp4": 4, "mxfp8": 8, "mxfp4_rows": 4}
V = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}


def tile_layout(cfg, counts, starts):
    """scales_offset, and for (group, row) the first tile and the indices of every scale of a row."""
    tiles = [-(-n // 128) for n in counts]
    before = [sum(tiles[:g]) for g in range(len(counts))]
    offsets = [b - s // 128 for b, s in zip(before, starts)]
    k = np.arange(0, cfg.hidden, V[cfg.token_format])
    v = V[cfg.token_format]

    def place(group, r):
        first = starts[group] // 128 + offsets[group]
        return first + r // 128, k // (4 * v), r % 32, (r % 128) // 32, (k // v) % 4

    return tiles, before, offsets, place


def slot_places(cfg, slot, mn):
    ks = cfg.hidden // 32
    m_pad = -(-cfg.n_ranks * cfg.max_tokens_per_rank // 32) * 32
    return [
        slot * m_pad * ks
        + (mn // 16) % 2
        + 2 * ((k // 4) % 2)
        + 4 * (mn % 16)
        + 64 * (k % 4)
        + 256 * (k // 8)
        + 32 * ks * (mn // 32)
        for k in range(ks)
    ]


def check(token_format, options, hidden, counts, capacity, *, seed=0, n_parts=1, **world):
    cfg = EPConfig(2, 2 * len(counts), 2, hidden, max(counts), token_format=token_format, **options, **world)
    fmt = formats.of(cfg)
    rng = np.random.default_rng(seed)
    payloads = rng.integers(0, 256, (sum(counts), fmt.token_size), dtype=np.uint8)
    padded = [-(-n // fmt.pad_rows) * fmt.pad_rows for n in counts]
    starts = [sum(padded[:g]) for g in range(len(counts))]
    rows = [(g, r) for g, n in enumerate(counts) for r in range(n)]
    before = [sum(-(-n // 128) for n in counts[:g]) for g in range(len(counts))]
    order = rng.permutation(len(rows))
    groups = np.stack([starts, counts, before], 1)
    got = decode(cfg, payloads[order], np.array(rows)[order].reshape(-1, 2), groups, capacity, seed, n_parts)

    value_bytes = hidden * VALUE_BITS[token_format] // 8
    scales_at = -(-value_bytes // cfg.alignment) * cfg.alignment
    expected = {name: np.full(array.shape, POISON, np.uint8) for name, array in got.items()}
    for (g, r), payload in zip(rows, payloads):
        expected["output_tokens"][starts[g] + r] = payload[:value_bytes]
    if token_format == "fp8_blockwise":
        scales = expected["output_scales"].view(np.uint32)
        for (g, r), payload in zip(rows, payloads):
            scales[:, starts[g] + r] = payload[scales_at:][: hidden // 32].view(np.uint32)
    elif token_format == "mxfp4_rows":
        for (g, r), payload in zip(rows, payloads):
            if cfg.fuse_a_scale_preshuffle:
                expected["output_scales"].reshape(-1)[slot_places(cfg, g, r)] = payload[scales_at:][: hidden // 32]
            else:
                expected["output_scales"][starts[g] + r] = payload[scales_at:][: hidden // 32]
    elif token_format in V:
        tiles, before, offsets, place = tile_layout(cfg, counts, starts)
        assert sum(tiles) <= expected["output_scales"].shape[0]
        expected["output_scales"][: sum(tiles)] = 0
        for (g, r), payload in zip(rows, payloads):
            expected["output_scales"][place(g, r)] = payload[scales_at:][: hidden // V[token_format]]
        expected["scales_offset"][:] = np.array(offsets, np.uint32).view(np.uint8)
    for name in fmt.output_fields:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=f"{name} of {token_format}")


@pytest.mark.parametrize("token_format, options", CASES)
def test_rows_of_several_groups(token_format, options):
    check(token_format, options, 256, [3, 0, 7, 1], 32)


@pytest.mark.parametrize("token_format, options", CASES)
def test_long_rows_and_a_wide_alignment(token_format, options):
    check(token_format, options, 2304, [2, 1], 16, alignment=64)


@pytest.mark.parametrize("token_format, options", CASES)
@pytest.mark.parametrize("n_parts", [2, 5])
def test_parts_by_several_warps_make_the_same_rows(token_format, options, n_parts):
    check(token_format, options, 2304, [2, 1], 16, n_parts=n_parts)


@pytest.mark.parametrize("token_format, hidden", SHORTEST)
def test_shortest_rows(token_format, hidden):
    check(token_format, {}, hidden, [5, 2], 16)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("counts", [[128, 1, 33], [127, 0, 95, 65], [130, 31]])
@pytest.mark.parametrize("token_format", ["nvfp4", "mxfp8"])
def test_tiles_with_every_amount_of_unused_rows(token_format, counts):
    check(token_format, {}, 128, counts, sum(counts))


def test_tiles_example_of_the_specification():
    """row_offsets [0, 100, 300, 400] -> scales_offset [0, 1, 1]"""
    cfg = EPConfig(1, 3, 1, 64, 200, token_format="nvfp4")
    assert tile_layout(cfg, [100, 200, 100], [0, 100, 300])[2] == [0, 1, 1]
    check("nvfp4", {}, 64, [100, 200, 100], 400)


def test_slots_hold_every_row_once():
    """Mpad rows a slot, at most n_ranks * max_tokens_per_rank used; every row has bytes of its own."""
    check("mxfp4_rows", {"fuse_a_scale_preshuffle": True}, 256, [49, 17, 33], 99)


@pytest.mark.gpu
@pytest.mark.parametrize("token_format, options", CASES)
def test_large_rows_on_the_gpu(token_format, options):
    check(token_format, options, 7168, [200, 0, 128, 77, 1, 300], 800)


@pytest.mark.gpu
@pytest.mark.parametrize("token_format, hidden", SHORTEST)
def test_shortest_rows_on_the_gpu(token_format, hidden):
    check(token_format, {}, hidden, [5, 2], 16)
