"""Token formats: how a row of bf16 becomes the payload of a message, and what the receiver stores."""

from importlib import import_module

from ..config import TOKEN_FORMATS, EPConfig
from .bf16 import BF16TokenFormat
from .blockwise_fp8 import BlockwiseFP8TokenFormat
from .message import TokenFormat, align_up
from .mxfp4 import MXFP4TokenFormat
from .nv_block_scaled import NVBlockScaledTokenFormat

__all__ = ["BF16TokenFormat", "BlockwiseFP8TokenFormat", "MXFP4TokenFormat", "NVBlockScaledTokenFormat", "TokenFormat",
           "align_up", "format_of"]


def format_of(cfg: EPConfig) -> TokenFormat:
    """The token format that a configuration names, with its sizes; the table is `config.TOKEN_FORMATS`."""
    return import_module(f"{__name__}.{TOKEN_FORMATS[cfg.token_format].stem}").make(cfg)
