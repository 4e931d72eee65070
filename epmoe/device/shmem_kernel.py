"""Kernels that call NVSHMEM: linked with its device code, and introduced to it before they are launched."""
import warnings

from .gpu_kernel import Kernel
from .nvshmem_code import compiled_once

from numba.cuda.dispatcher import _Kernel as NumbaKernel


class ShmemKernel(Kernel):
    """An entry point that uses the words of epmoe.device.shmem; NVSHMEM must be initialised before it is loaded."""

    def compile(self):
        """The kernel compiled for the current GPU (once), with link-time optimisation; NVSHMEM need not run.

        cuda.jit would load it at once, which needs NVSHMEM and would be for nothing: load_cubin does that.
        """
        if self._compiled is None:
            with warnings.catch_warnings(), compiled_once():
                warnings.filterwarnings("ignore", "NVRTC log messages")     # about NVSHMEM's own headers
                compiled = NumbaKernel(self.fn, self.signature, launch_bounds=self.max_threads, lto=True)
                compiled._codelibrary.get_cubin()
            self._compiled = compiled
        return self._compiled

    def introduce(self, library):
        """Tells NVSHMEM of the loaded code, whose device side it sets up."""
        from nvshmem import bindings

        bindings.culibrary_init(library)
