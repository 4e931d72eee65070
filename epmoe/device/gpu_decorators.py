"""@device_fn and @kernel on the GPU."""

from numba import cuda

from .gpu_kernel import Kernel


def device_fn(fn):
    """Decorator for functions that kernels call; always inlined."""
    return cuda.jit(device=True, forceinline=True)(fn)


def kernel(fn=None, *, max_threads=1024, shmem=False):
    """Decorator for entry points: fn(params: u64, num_tokens: i32, my_rank: i32), at most max_threads a block.

    fn may take more arguments, u64 each: what it needs before it can have read its parameters. shmem: it uses words of
    epmoe.device.shmem.
    """
    if fn is None:
        return lambda f: kernel(f, max_threads=max_threads, shmem=shmem)
    if shmem:
        from .shmem_kernel import ShmemKernel  # which needs more packages

        return ShmemKernel(fn, max_threads)
    return Kernel(fn, max_threads)
