"""What decides how a device array is treated, told in little time, so that calls on known arrays are recognised."""

from operator import attrgetter

import numpy as np

from epmoe.host.arrays import DeviceArray, is_torch

UNSEEN = None  # what look() says of anything that is no array in device memory

_look_at_ours = attrgetter("seen")


def _look_at_torch(t):
    return (
        (t.data_ptr(), t.shape, t.dtype, t.is_contiguous(), t.get_device()) if t.is_cuda else UNSEEN
    )


def _look_at_interface(a):
    seen, dtype = a.__cuda_array_interface__, getattr(a, "dtype", None)
    shape, strides = tuple(seen["shape"]), seen.get("strides")
    return (
        seen["data"][0],
        shape,
        seen["typestr"],
        strides if strides is None else tuple(strides),
        dtype if isinstance(dtype, (np.dtype, type)) else None,
        getattr(getattr(a, "device", None), "id", None),
    )


def _look_away(_):
    return UNSEEN


def _way_to_look(array):
    # The same order as in arrays.view
    if isinstance(array, DeviceArray):
        return _look_at_ours
    if isinstance(array, np.ndarray):
        return _look_away
    if is_torch(array):
        return _look_at_torch
    return _look_at_interface if hasattr(type(array), "__cuda_array_interface__") else _look_away


WAYS = {DeviceArray: _look_at_ours}  # by type, of those that were seen


def look(array):
    """Everything that decides how a device array is treated: (address, shape, ...), for comparison. Else UNSEEN."""
    return (WAYS.get(type(array)) or _new_way(array))(array)


def _new_way(array):
    way = WAYS[type(array)] = _way_to_look(array)
    return way
