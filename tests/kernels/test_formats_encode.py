"""Law: an encoder's payload is the reference's, byte for byte, for every bf16 pattern."""

import numpy as np
import pytest
from bf16_rows import as_rows, below_a_maximum, edge_groups, every_pattern
from ml_dtypes import bfloat16
from row_kernels import encode

from epmoe_ref import format_of
from epmoe_ref.config import TOKEN_FORMATS, EPConfig

FLOAT32 = np.finfo(np.float32)
FORMATS = list(TOKEN_FORMATS)
QUANTISED = [name for name in FORMATS if name != "bf16"]
LONGER = dict(bf16=131, fp8_blockwise=5, nvfp4=17, mxfp4=9, mxfp8=5, mxfp4_rows=35)  # times the shortest row
LENGTHS = [(name, n * TOKEN_FORMATS[name].hidden_multiple) for name, longer in LONGER.items() for n in (1, longer)]


def config(token_format, hidden, **options):
    return EPConfig(1, 4, 2, hidden, 16, token_format=token_format, **options)


GROUP = {name: format_of(config(name, 512)).group_size for name in QUANTISED}


def agree(cfg, bits, input_scale=1.0, n_parts=1):
    got = encode(cfg, bits, input_scale, n_parts=n_parts)
    expected = format_of(cfg).encode(bits.view(bfloat16), input_scale)
    assert got.shape == expected.shape
    if (got != expected).any():
        row, byte = np.argwhere(got != expected)[0]
        raise AssertionError(
            f"{(got != expected).sum()} bytes of {cfg.token_format} differ; first: row {row}, "
            f"byte {byte}: {got[row, byte]:#04x}, expected {expected[row, byte]:#04x}"
        )


@pytest.mark.parametrize("token_format", FORMATS)
@pytest.mark.by_day(3)
def test_every_bf16_pattern(token_format):
    agree(config(token_format, 2048), every_pattern(2048))


@pytest.mark.parametrize("hidden", [512, pytest.param(7168, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("token_format", QUANTISED)
def test_zeros_nan_inf_subnormals_ties_and_scale_underflow(token_format, hidden):
    agree(config(token_format, hidden), as_rows(edge_groups(GROUP[token_format]), hidden))


@pytest.mark.by_day(2)
@pytest.mark.parametrize("token_format", QUANTISED)
def test_any_maximum_in_any_place(token_format):
    maxima = np.random.default_rng(5).permutation(65536)[: 16384 // GROUP[token_format]].astype(np.uint16)
    agree(config(token_format, 1024), as_rows(below_a_maximum(maxima, GROUP[token_format], seed=6), 1024))


@pytest.mark.parametrize(
    "input_scale", [0.5, 3.0, 3.1415927, 1e-3, 448.0, 3e38, 1e-42, 2.0**-149, 2.0**-126, FLOAT32.max]
)
def test_input_scale(input_scale):
    groups = np.concatenate([edge_groups(16)[:96], below_a_maximum(np.arange(0x3F80, 0x4000), 16, seed=7)])
    agree(config("nvfp4", 512), as_rows(groups, 512), input_scale)


def check_length(token_format, hidden, alignment, n_parts=1):
    bits = below_a_maximum(np.arange(0x3F80, 0x3F83), hidden, seed=hidden)
    agree(config(token_format, hidden, alignment=alignment), bits, n_parts=n_parts)


@pytest.mark.parametrize("token_format, hidden", LENGTHS)
@pytest.mark.parametrize("alignment, n_parts", [(16, 1), (64, 2), (1024, 7)])
@pytest.mark.by_day
def test_any_length_padding_and_number_of_warps_that_share_a_row(token_format, hidden, alignment, n_parts):
    check_length(token_format, hidden, alignment, n_parts)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [1024, 8192])
@pytest.mark.parametrize("token_format", FORMATS)
def test_every_bf16_pattern_on_the_gpu(token_format, hidden):
    agree(config(token_format, hidden), every_pattern(hidden))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("token_format", QUANTISED)
def test_every_maximum_on_the_gpu(token_format, seed):
    maxima = np.random.default_rng(seed).permutation(65536).astype(np.uint16)
    agree(config(token_format, 7168), as_rows(below_a_maximum(maxima, GROUP[token_format], seed), 7168))


@pytest.mark.gpu
@pytest.mark.parametrize("input_scale", [0.5, 3.1415927, 1e-3, 448.0, 3e38, 1e-42])
def test_input_scale_on_the_gpu(input_scale):
    agree(config("nvfp4", 7168), as_rows(below_a_maximum(np.arange(65536), 16, seed=8), 7168), input_scale)


@pytest.mark.gpu
@pytest.mark.parametrize("token_format, hidden", LENGTHS)
def test_row_lengths_and_padding_on_the_gpu(token_format, hidden):
    check_length(token_format, hidden, 64)
