"""Token formats: the encoding of a bf16 row as a message's payload, and the arrays that the receiver stores."""

from importlib import import_module

from ..format_names import TOKEN_FORMATS
from .bf16 import BF16TokenFormat
from .blockwise_fp8 import BlockwiseFP8TokenFormat
from .message import TokenFormat, align_up
from .mxfp4 import MXFP4TokenFormat
from .nv_block_scaled import NVBlockScaledTokenFormat

__all__ = [
    "BF16TokenFormat",
    "BlockwiseFP8TokenFormat",
    "MXFP4TokenFormat",
    "NVBlockScaledTokenFormat",
    "TokenFormat",
    "align_up",
    "format_of",
]


def format_of(cfg) -> TokenFormat:
    """The token format that an EPConfig names, with its sizes. The table is `format_names.TOKEN_FORMATS`."""
    return import_module(f"{__name__}.{TOKEN_FORMATS[cfg.token_format].stem}").make(cfg)
