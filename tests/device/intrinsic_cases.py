"""All cases: every word of the device layer has one."""

import cases_memory
import cases_numbers
import cases_shared_and_bulk
import cases_threads
from case_table import CASES

from epmoe.device import intrinsics

MODULES = (cases_memory, cases_numbers, cases_shared_and_bulk, cases_threads)
assert set(CASES) == set(intrinsics.INTRINSICS), set(CASES) ^ set(intrinsics.INTRINSICS)
