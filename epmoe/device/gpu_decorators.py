"""@device_fn and @kernel on the GPU."""

from numba import cuda

from .gpu_kernel import Kernel


def device_fn(fn):
    """Decorator for functions that kernels call; always inlined."""
    return cuda.jit(device=True, forceinline=True)(fn)


def kernel(fn=None, *, max_threads=1024, words=0, shmem=False):
    """Decorator for entry points: fn(params, num_tokens: i32, my_rank: i32), at most max_threads a block.

    words: params is a tuple of so many u64, passed by value; 0: one u64, an address. shmem: it uses words of
    epmoe.device.shmem.
    """
    if fn is None:
        return lambda f: kernel(f, max_threads=max_threads, words=words, shmem=shmem)
    if shmem:
        from .shmem_kernel import ShmemKernel  # which needs more packages

        return ShmemKernel(fn, max_threads, words)
    return Kernel(fn, max_threads, words)
