"""Kernels that call NVSHMEM. They are linked with its device code, and registered with it before they are launched."""

import warnings

from .gpu_kernel import Kernel
from .nvshmem_code import compiled_once


class ShmemKernel(Kernel):
    """An entry point that uses epmoe.device.shmem. NVSHMEM must be initialised before it is loaded."""

    options = {"lto": True}  # without it, NVSHMEM's code would be compiled as one more program

    def cubin(self, cc):
        """As in Kernel. NVSHMEM need not be running."""
        with warnings.catch_warnings(), compiled_once():
            warnings.filterwarnings("ignore", "NVRTC log messages")  # about NVSHMEM's own headers
            return super().cubin(cc)

    def introduce(self, library):
        """Register the loaded code with NVSHMEM, which sets up its device side."""
        from nvshmem import bindings

        bindings.culibrary_init(int(library))
