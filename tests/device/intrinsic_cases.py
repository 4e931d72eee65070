"""All cases."""

import cases_memory
import cases_numbers
import cases_shared_and_bulk
import cases_threads
from case_table import CASES

__all__ = ["CASES", "cases_memory", "cases_numbers", "cases_shared_and_bulk", "cases_threads"]
