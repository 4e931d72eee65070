"""One table of all intrinsics: a small kernel for each, the expected memory, and its PTX.

A kernel finds its inputs at `params` and writes its results at `params + OUT`. Expected values come from Python
integers and from NumPy and ml_dtypes, not from the device layer. The modules cases_* have the cases.
"""

from dataclasses import dataclass

import numpy as np

from epmoe import device

OUT = 4096
DTYPE = {"u8": np.uint8, "u16": np.uint16, "i32": np.int32, "u32": np.uint32, "u64": np.uint64, "f32": np.float32}
PTX = {"u8": "u8", "u16": "u16", "i32": "s32", "u32": "u32", "u64": "u64", "f32": "f32"}
SCOPES = ("cta", "gpu", "sys")


@dataclass
class Case:
    """A kernel and its expected memory at OUT (and, if `left` is given, at the inputs)."""

    intrinsic: str
    ptx: str
    kernel: object
    inputs: np.ndarray
    expected: np.ndarray
    left: np.ndarray = None
    grid: int = 1
    block: int = 32
    shared_bytes: int = 0
    close: bool = False  # approximate intrinsics: two units in the last place


def intrinsic(name):
    return getattr(device, name)


def at_types(ty):
    return intrinsic("load_" + ty), intrinsic("store_" + ty)


# values for 64 threads
VALUES = (np.arange(64) * 37 % 64 * 1000003 - 20000000).astype(np.int32)
LONG = VALUES.astype(np.int64).view(np.uint64) * np.uint64(0x100000001)
FLOATS = (VALUES / np.float32(7)).astype(np.float32)
FLOATS[3], FLOATS[40] = np.nan, np.inf
CASES = {}


def case(name, ptx, made, inputs, expected, **more):
    assert name not in CASES, name
    CASES[name] = Case(name, ptx, made, np.asarray(inputs), np.asarray(expected), **more)
