"""@device_fn on the GPU."""

from types import ModuleType

import numpy as np
from numba import cuda
from numba.core.types import unliteral

MOST_SHARED = 20_000  # device functions that are remembered
_shared = {}


def device_fn(fn):
    """Decorator for functions that kernels call. They are always inlined.

    Factories make the same function for many kernels. Functions with equal code and equal closures become one object,
    so Numba compiles it once in a process. Numba also compiles it once for all numbers that it is called with; they
    become constants when it is inlined.
    """
    key = _key(fn)
    if key in _shared:
        return _shared[key]
    made = cuda.jit(device=True, forceinline=True)(fn)
    compile_device = made.compile_device
    made.compile_device = lambda types, *more: compile_device(tuple(map(unliteral, types)), *more)
    if key is not None:
        if len(_shared) >= MOST_SHARED:
            _shared.clear()
        _shared[key] = made
    return made


def _key(fn):
    """A key that is equal for functions that compile to the same code; None if there is none."""
    try:
        closure = tuple(_of_value(cell.cell_contents) for cell in fn.__closure__ or ())
        key = fn.__code__, id(fn.__globals__), closure, _of_value(fn.__defaults__)
        hash(key)
    except (ValueError, TypeError):  # an empty cell, or a value that cannot be compared
        return None
    return key


def _of_value(value):
    """A value with its type, since 1, 1.0 and True are equal. A namespace is compared by its contents."""
    if isinstance(value, tuple):
        return type(value), tuple(map(_of_value, value))
    if isinstance(value, ModuleType) and value.__spec__ is None:
        return ModuleType, tuple((name, _of_value(v)) for name, v in vars(value).items())
    if isinstance(value, (float, np.floating)):
        return type(value), repr(value)  # -0.0 is equal to 0.0
    return type(value), value
