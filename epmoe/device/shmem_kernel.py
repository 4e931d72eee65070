"""Kernels that call NVSHMEM: linked with its device code, and introduced to it before they are launched."""
import warnings

from .gpu_kernel import SIGNATURE, Kernel

from numba import cuda


class ShmemKernel(Kernel):
    """An entry point that uses the words of epmoe.device.shmem; NVSHMEM must be initialised before it is loaded."""

    def compile(self):
        """The kernel compiled for the current GPU (once); link-time optimisation makes it seconds."""
        if self._compiled is None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "NVRTC log messages")     # about NVSHMEM's own headers
                jitted = cuda.jit(SIGNATURE, launch_bounds=self.max_threads, lto=True)(self.fn)
            self._compiled = jitted.overloads[SIGNATURE]
        return self._compiled

    def introduce(self, library):
        """Tells NVSHMEM of the loaded code, whose device side it sets up."""
        from nvshmem import bindings

        bindings.culibrary_init(library)
