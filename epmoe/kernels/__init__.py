"""The protocol on one device: dispatch and combine, split and fused, as factories of kernels."""

from .call import ArrayArg, FormatHandler, ScalarArg, TokenArray
from .pairs.combine import combine_async_kernel, combine_kernel, combine_wait_kernel
from .pairs.dispatch import dispatch_async_kernel, dispatch_kernel, dispatch_wait_kernel
from .launch import LaunchConfig
from .swiglu import fused_silu_kernel

__all__ = ["ArrayArg", "FormatHandler", "LaunchConfig", "ScalarArg", "TokenArray", "combine_async_kernel",
           "combine_kernel", "combine_wait_kernel", "dispatch_async_kernel", "dispatch_kernel", "dispatch_wait_kernel",
           "fused_silu_kernel"]
