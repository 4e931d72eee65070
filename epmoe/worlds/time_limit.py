"""The check of a time limit."""

import numpy as np

from epmoe_ref.errors import EPValueError

MOST_SECONDS = 1e9  # kernels count nanoseconds in 64 bits


def seconds(what, value):
    """A time limit as a float, positive and at most MOST_SECONDS."""
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    if not is_number or isinstance(value, bool) or not 0 < value <= MOST_SECONDS:
        raise EPValueError(
            f"{what}={value!r} must be a positive number of seconds, at most {MOST_SECONDS:g}; there is no endless wait"
        )
    return float(value)
