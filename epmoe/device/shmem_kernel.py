"""Kernels that call NVSHMEM: linked with its device code, and known to it before they are launched."""
import warnings

from .gpu_kernel import SIGNATURE, Kernel

from numba import cuda


class ShmemKernel(Kernel):
    """An entry point that uses the words of epmoe.device.shmem; NVSHMEM must be initialised before it is compiled."""

    def compile(self):
        """The kernel compiled and linked for the current GPU (once); link-time optimisation makes it seconds."""
        if self._compiled is None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "NVRTC log messages")     # about NVSHMEM's own headers
                jitted = cuda.jit(SIGNATURE, launch_bounds=self.max_threads, lto=True)(self.fn)
            self._compiled = jitted.overloads[SIGNATURE]
        return self._compiled

    def handle(self):
        """The CUkernel: the very one that Numba loaded, since that is the code that it introduced to NVSHMEM."""
        return self.compile()._codelibrary.get_cufunc().handle
