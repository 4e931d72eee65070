"""Comparison with the reference in the words of the specification."""

from epmoe.check.compare import (compare_combined, compare_combined_world, compare_dispatched,
                                 compare_dispatched_world, report)
from epmoe.check.difference import Difference

__all__ = ["Difference", "compare_combined", "compare_combined_world", "compare_dispatched",
           "compare_dispatched_world", "report"]
