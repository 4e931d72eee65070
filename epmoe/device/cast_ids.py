"""Converts topk_ids of any integer type in device memory to int32. An id that int32 cannot hold becomes OUTSIDE."""

from functools import lru_cache

import numpy as np

from . import (
    block_dim,
    block_idx,
    grid_dim,
    i32,
    kernel,
    load_u8,
    load_u16,
    load_u32,
    load_u64,
    store_i32,
    thread_idx,
    u64,
)

OUTSIDE = -2  # outside [0, n_experts) and not -1: dispatch counts it as a bad id
THREADS = 256
BLOCKS = 8
_LOAD = {1: load_u8, 2: load_u16, 4: load_u32, 8: load_u64}


@lru_cache
def cast_kernel(itemsize, is_signed):
    """Kernel over (params: source address, destination address; number of ids) for one integer type."""
    load, half = _LOAD[itemsize], 1 << (8 * itemsize - 1)
    lowest = 2**31 if is_signed else 0  # of int32, as a distance below 0

    @kernel(max_threads=THREADS, words=2)
    def narrow_ids(params, n_ids, my_rank):
        source, destination = params
        i = i32(block_idx() * block_dim() + thread_idx())
        while i < n_ids:
            value = u64(load(source + u64(itemsize) * u64(i)))
            if is_signed:  # two's complement of 64 bits
                value = u64((value ^ u64(half)) - u64(half))
            result = i32(OUTSIDE)
            if u64(value + u64(lowest)) < u64(2**31 + lowest):
                result = i32(value)
            store_i32(destination + u64(4) * u64(i), result)
            i = i32(i + grid_dim() * block_dim())

    return narrow_ids


def cast_ids(machine, stream, rank, dtype, n_ids):
    """A launch with start(source address, destination address): converts n_ids ids to int32."""
    dtype = np.dtype(dtype)
    kernel = cast_kernel(dtype.itemsize, dtype.kind == "i")
    return machine.prepared(kernel, BLOCKS, THREADS, (), n_ids, rank, stream=stream)
