"""The protocol on one device: dispatch and combine, split and fused, as factories of kernels."""

from .launch import KernelCall, LaunchConfig, Wanted
from .pairs.combine import combine_async_kernel, combine_kernel, combine_wait_kernel
from .pairs.dispatch import dispatch_async_kernel, dispatch_kernel, dispatch_wait_kernel
from .swiglu import fused_silu_kernel
from .user_functions import ArrayArg, ScalarArg

__all__ = ["ArrayArg", "KernelCall", "LaunchConfig", "ScalarArg", "Wanted", "combine_async_kernel", "combine_kernel",
           "combine_wait_kernel", "dispatch_async_kernel", "dispatch_kernel", "dispatch_wait_kernel", "fused_silu_kernel"]
