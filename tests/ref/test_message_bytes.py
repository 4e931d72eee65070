"""The message: sizes and places of its parts, padding, trailer."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from small_worlds import FORMAT_IDS, FORMATS, config, tokens

from epmoe_ref import (
    BF16TokenFormat,
    BlockwiseFP8TokenFormat,
    EPValueError,
    MXFP4TokenFormat,
    NVBlockScaledTokenFormat,
    format_of,
)

KINDS = {kind: (lambda *a, kind=kind: NVBlockScaledTokenFormat(*a, kind=kind)) for kind in ("nvfp4", "mxfp4", "mxfp8")}


@pytest.mark.parametrize(
    "make, hidden, top_k, alignment, sizes",
    [
        (BF16TokenFormat, 8, 1, 16, (16, 16, 16)),
        (BF16TokenFormat, 40, 9, 128, (128, 128, 128)),
        (BF16TokenFormat, 8, 32, 16, (16, 16, 64)),
        (BlockwiseFP8TokenFormat, 128, 8, 16, (128 + 16, 16, 16)),
        (BlockwiseFP8TokenFormat, 128, 8, 256, (256 + 256, 256, 256)),
        (KINDS["nvfp4"], 64, 4, 16, (32 + 16, 16, 16)),
        (KINDS["mxfp4"], 128, 4, 16, (64 + 16, 16, 16)),
        (KINDS["mxfp8"], 128, 4, 64, (128 + 64, 64, 64)),
        (MXFP4TokenFormat, 32, 17, 16, (16 + 16, 16, 48)),
        (BF16TokenFormat, 8, 3, 4, (16, 4, 8)),
        # of a real model
        (BF16TokenFormat, 7168, 8, 16, (14336, 16, 16)),
        (BlockwiseFP8TokenFormat, 7168, 8, 16, (7168 + 224, 16, 16)),
        (KINDS["nvfp4"], 7168, 8, 16, (3584 + 448, 16, 16)),
        (KINDS["mxfp4"], 7168, 8, 16, (3584 + 224, 16, 16)),
        (KINDS["mxfp8"], 7168, 8, 16, (7168 + 224, 16, 16)),
        (MXFP4TokenFormat, 7168, 8, 16, (3584 + 224, 16, 16)),
    ],
)
def test_every_part_is_padded_to_the_alignment(make, hidden, top_k, alignment, sizes):
    fmt = make(hidden, top_k, alignment)
    assert (fmt.token_size(), fmt.src_info_size(), fmt.topk_info_size()) == sizes
    assert fmt.src_info_offset() == sizes[0] and fmt.topk_info_offset() == sum(sizes[:2])
    assert fmt.msg_size() == sum(sizes)


@pytest.mark.parametrize("name, slots, hidden", FORMATS, ids=FORMAT_IDS)
def test_padding_bytes_of_a_payload_are_zero_and_the_parts_come_back(name, slots, hidden):
    fmt = format_of(config(name, slots, hidden, alignment=256))
    rows = tokens(config(name, slots, hidden), 5, np.random.default_rng(0))
    payload = fmt.encode(rows)
    assert payload.shape == (5, fmt.token_size()) and payload.dtype == np.uint8
    start = fmt.scales_offset_in_payload()
    assert not payload[:, fmt.values_size() : start].any() and not payload[:, start + fmt.scales_size() :].any()
    values, scales = fmt.decode(payload)
    assert values.dtype == fmt.values_dtype and len(values) == 5
    assert np.array_equal(values.view(np.uint8), payload[:, : fmt.values_size()])
    assert (scales is None) == (name == "bf16")
    if scales is not None:
        assert scales.dtype == fmt.scales_dtype and scales.shape == (5, fmt.n_scales())


@pytest.mark.parametrize("name, slots, hidden", FORMATS, ids=FORMAT_IDS)
def test_rows_are_encoded_independently_of_strides_and_neighbours(name, slots, hidden):
    fmt = format_of(config(name, slots, hidden))
    # more than one block of an encoder
    rows = tokens(config(name, slots, hidden), 2500, np.random.default_rng(0))
    payload = fmt.encode(rows)
    assert np.array_equal(fmt.encode(rows[::-7]), payload[::-7])
    assert np.array_equal(fmt.encode(np.asfortranarray(rows[2490:])), payload[2490:])
    assert fmt.encode(rows[:0]).shape == (0, fmt.token_size())


def test_trailer_holds_token_and_ids():
    fmt = MXFP4TokenFormat(64, 3)
    ids = np.array([[5, -1, 65534], [0, 1, 2]])
    message = fmt.messages(np.ones((2, 64), bfloat16), ids)
    assert message.shape == (2, fmt.msg_size())
    assert message[:, fmt.src_info_offset() :][:, :4].copy().view("<i4").ravel().tolist() == [0, 1]
    assert message[:, fmt.topk_info_offset() :][:, :6].copy().view("<u2").tolist() == [[5, 65535, 65534], [0, 1, 2]]
    assert np.array_equal(fmt.decode(message)[0], fmt.decode(fmt.encode(np.ones((2, 64), bfloat16)))[0])


def test_row_offsets_are_rounded_up_where_the_format_pads():
    assert BF16TokenFormat(8, 1).pad_expert_offsets([5, 0, 3]).tolist() == [0, 5, 5, 8]
    offsets = BlockwiseFP8TokenFormat(128, 1).pad_expert_offsets([5, 0, 4, 1])
    assert offsets.tolist() == [0, 8, 8, 12, 16] and offsets.dtype == np.uint32


@pytest.mark.parametrize(
    "make, args, words",
    [
        (BF16TokenFormat, (12, 4), "hid_dim=12 must be a multiple of 8 for BF16TokenFormat"),
        (BF16TokenFormat, (0, 4), "hid_dim=0 must be a whole number of at least 1"),
        (BF16TokenFormat, (8, 4, 24), "alignment=24"),
        (BF16TokenFormat, (8, 4.0), "top_k=4.0 must be a whole number"),
        (BlockwiseFP8TokenFormat, (64, 4), "multiple of 128"),
        (KINDS["nvfp4"], (96, 4), "multiple of 64"),
        (KINDS["mxfp4"], (64, 4), "multiple of 128"),
        (KINDS["mxfp8"], (64, 4), "multiple of 128"),
        (MXFP4TokenFormat, (48, 4), "multiple of 32"),
        (lambda *a: NVBlockScaledTokenFormat(*a, kind="fp4"), (64, 4), "kind='fp4' must be one of nvfp4, mxfp4, mxfp8"),
        (lambda *a: MXFP4TokenFormat(*a, fuse_a_scale_preshuffle=True), (128, 4), "hid_dim=128 .* multiple of 256"),
    ],
)
def test_refusals_of_sizes(make, args, words):
    with pytest.raises(EPValueError, match=words):
        make(*args)


@pytest.mark.parametrize(
    "rows", [np.ones((2, 8), np.float32), np.ones((2, 16), bfloat16), np.ones(8, bfloat16), [[1] * 8]]
)
def test_refusals_of_rows(rows):
    with pytest.raises(EPValueError, match=r"must be a bfloat16 array \[n, 8\]"):
        BF16TokenFormat(8, 1).encode(rows)
    with pytest.raises(EPValueError, match=r"must be uint8 \[n, 16\]"):
        BF16TokenFormat(8, 1).decode(np.zeros((2, 15), np.uint8))


@pytest.mark.parametrize("scale", [0, -1, np.nan, np.inf, "x", None, [1, 2], 1e-60, 1e60])
def test_refusals_of_input_scales(scale):
    with pytest.raises(EPValueError, match="positive finite"), np.errstate(over="ignore"):
        KINDS["nvfp4"](64, 1).encode(np.ones((1, 64), bfloat16), scale)
