"""The names of the token formats, for checking configurations and finding the formats."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FormatName:
    """One entry of the table of token formats.

    stem: the name of the module that implements it, both in `epmoe_ref/formats` and in `epmoe/kernels/formats`; each
    has a function `make(cfg)`. hidden_multiple: hidden must be a multiple of it (elements).
    """

    stem: str
    hidden_multiple: int


# The one table of formats. A new format is a module of this stem on each side, and a line here.
TOKEN_FORMATS = {
    "bf16": FormatName("bf16", 8),
    "fp8_blockwise": FormatName("blockwise_fp8", 128),
    "nvfp4": FormatName("nv_block_scaled", 64),
    "mxfp4": FormatName("nv_block_scaled", 128),
    "mxfp8": FormatName("nv_block_scaled", 128),
    "mxfp4_rows": FormatName("mxfp4", 32),
}
