"""Kernels for rows: each rank receives a token once, even if several of its experts are there.

In dispatch, resend and combine the ranks communicate. dispatch.py and combine.py describe the steps; read dispatch.py
first, then call, layout, mailbox, announce, send, copy, expand and handle. receive and move send nothing.
"""

from .combine import combine_kernel
from .copy import move_kernel
from .dispatch import dispatch_kernel, receive_kernel, resend_kernel

__all__ = ["combine_kernel", "dispatch_kernel", "move_kernel", "receive_kernel", "resend_kernel"]
