"""The plain kernels: the specification in code. Each does what its page says, and nothing cleverer.

dispatch.py, combine.py: the six kernels, top down. receive.py: the wait half of dispatch. messages.py: the message and
the ids. peers.py: what goes to other ranks. counters.py: the words of ep_counters. waits.py: bounded waits.
arguments.py, launcher.py: what a factory and a launch take.
"""

from .arguments import capacity, given_weights
from .combine import combine_async_kernel, combine_kernel, combine_wait_kernel
from .dispatch import dispatch_async_kernel, dispatch_kernel, dispatch_wait_kernel
from .launcher import PlainKernel

__all__ = ["PlainKernel", "capacity", "combine_async_kernel", "combine_kernel", "combine_wait_kernel",
           "dispatch_async_kernel", "dispatch_kernel", "dispatch_wait_kernel", "given_weights"]
