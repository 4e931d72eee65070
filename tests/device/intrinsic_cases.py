"""All cases. As a program: print as JSON {intrinsic: PTX of the named cases' kernels}, for sm_90, without a GPU."""

import functools
import json
import sys

import cases_memory
import cases_numbers
import cases_shared_and_bulk
import cases_threads
from case_table import CASES

__all__ = ["CASES", "cases_memory", "cases_numbers", "cases_shared_and_bulk", "cases_threads"]

if __name__ == "__main__":
    ptx_of = functools.cache(lambda kernel: kernel.ptx())
    json.dump({name: ptx_of(CASES[name].kernel) for name in sys.argv[1:]}, sys.stdout)
