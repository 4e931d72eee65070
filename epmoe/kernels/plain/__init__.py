"""The plain kernels: the specification in code. Each follows its specification page (docs/pages.md) step by step.

dispatch.py, combine.py: the six kernels, then the steps that they call. receive.py: the waiting half of dispatch.
messages.py: the message and the ids. peers.py: writes to other ranks. counters.py: the words of ep_counters. waits.py:
bounded waits. arguments.py, launcher.py: the arguments of factories and launches.
"""

from .arguments import capacity, given_weights
from .combine import combine_async_kernel, combine_kernel, combine_wait_kernel
from .dispatch import dispatch_async_kernel, dispatch_kernel, dispatch_wait_kernel
from .launcher import PlainKernel

__all__ = ["PlainKernel", "capacity", "combine_async_kernel", "combine_kernel", "combine_wait_kernel",
           "dispatch_async_kernel", "dispatch_kernel", "dispatch_wait_kernel", "given_weights"]
