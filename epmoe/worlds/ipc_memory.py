"""Symmetric memory of ranks in separate processes with GPUs of one host: CUDA IPC handles, exchanged once."""

import ctypes

from cuda.bindings import driver as cu

from epmoe.device.gpu_driver import check
from epmoe.worlds.symmetric import SymmetricMemory
from epmoe_ref.errors import EPError, UnavailableError

HANDLE_BYTES = 64
GRANULE = 2 << 20  # bytes: an allocation of whole granules shares no block with other memory
_abandoned: list = []  # memory of ranks that left after an error; peers may still write into it


def gpu_count():
    """GPUs that this process sees, at least one."""
    try:
        check(cu.cuInit(0))
        count = check(cu.cuDeviceGetCount())
    except (EPError, RuntimeError) as error:  # RuntimeError: there is no driver
        raise UnavailableError(f"no GPU can be used ({error}); EPMOE_DEVICE=sim runs the simulator instead") from error
    if not count:
        raise UnavailableError("this process sees no GPU: CUDA_VISIBLE_DEVICES hides them, or the job has none")
    return count


def gpu_uuid(ordinal):
    """16 bytes that identify a GPU, whatever number CUDA_VISIBLE_DEVICES gives it in this process."""
    return bytes(check(cu.cuDeviceGetUuid(ordinal)).bytes)


class IpcMemory(SymmetricMemory):
    """This rank's allocation as a Buffer, and the peers' allocations mapped here."""

    def __init__(self, world, nbytes, name, regions, timeout):
        machine, rank = world.machine, world.rank
        self._world = world
        buffer = machine.alloc(-(-nbytes // GRANULE) * GRANULE, name, rank, regions=regions)
        handle = ctypes.string_at(check(cu.cuIpcGetMemHandle(buffer.address)).getPtr(), HANDLE_BYTES)
        handles = world.exchange.gather("allocation", handle, timeout)
        machine.activate()
        addresses = [
            buffer.address if peer == rank else _opened(handle, rank, peer) for peer, handle in enumerate(handles)
        ]
        super().__init__({rank: buffer}, addresses)

    def free(self, together, timeout, heaps=None, release=None):
        """Unmap the peers' memory, and free its own when all peers have unmapped it. After an error it stays."""
        world = self._world
        world.machine.activate()
        for peer, address in enumerate(self.addresses):
            if peer != world.rank and address:
                check(cu.cuIpcCloseMemHandle(address))
        if not together:
            _abandoned.append(self.buffers)
            return
        world.barrier("unmapping", timeout)
        super().free(together, timeout, heaps, release)


def _opened(handle, rank, peer):
    """Address at which this process reaches the memory behind a peer's handle."""
    ipc = cu.CUipcMemHandle()
    ctypes.memmove(ipc.getPtr(), handle, HANDLE_BYTES)
    try:
        flags = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        return int(check(cu.cuIpcOpenMemHandle(ipc, flags)))
    except EPError as error:
        raise UnavailableError(
            f"rank {rank} cannot map the GPU memory of rank {peer} ({error}): the GPUs need peer "
            "access (`nvidia-smi topo -p2p r`), and the processes one container or job step where "
            "all GPUs are visible"
        ) from error
