"""Token formats inside the kernels: one module per family, with the same stem as its twin in the reference.

Which formats there are is the table `TOKEN_FORMATS` of the configuration: name -> stem of the module. A new format is a
module here with `make(cfg) -> KernelFormat`, its twin in the reference, and a line in that table.
"""

from functools import cache
from importlib import import_module

from epmoe_ref.config import TOKEN_FORMATS, EPConfig

from .kernel_format import KernelFormat, RowPlace

__all__ = ["KernelFormat", "RowPlace", "of"]


@cache
def of(cfg: EPConfig) -> KernelFormat:
    """The kernel side of cfg.token_format; equal configurations share one object, hence its compiled functions."""
    stem = TOKEN_FORMATS[cfg.token_format].stem
    return import_module(f".{stem}", __name__).make(cfg)
