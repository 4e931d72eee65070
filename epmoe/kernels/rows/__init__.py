"""Kernels of the rank-deduplicated layout: a token travels once to a rank, however many of its experts are there.

dispatch, resend, combine: kernels in which the ranks meet, whose stories dispatch.py and combine.py tell; expand, move:
local ones.
"""

from .combine import combine_kernel
from .dispatch import dispatch_kernel, resend_kernel
from .expand import expand_kernel
from .move import move_kernel

__all__ = ["combine_kernel", "dispatch_kernel", "expand_kernel", "move_kernel", "resend_kernel"]
