"""NVSHMEM on the host. Starts it once a process, over MPI, and uses its symmetric heap as the ranks' memory."""

import os

import numpy as np
from cuda.bindings import driver as cu

from epmoe.device.gpu_driver import check
from epmoe.device.gpu_memory import Buffer
from epmoe.provenance import install
from epmoe_ref.errors import EPValueError, UnavailableError

REMEDY = f"{install('shmem')}; `epmoe doctor` says what is missing"
ALIGNMENT = 256  # bytes: the layout's regions begin at multiples of it
_started: dict = {}  # "members": (rank, number of ranks) that NVSHMEM was started with, "device": the GPU
_abandoned: list = []  # memory of ranks that left after an error; peers may still write into it


def start(world, timeout):
    """Start NVSHMEM with the world's ranks, or check that it was started with the same ones; collective."""
    members = (world.rank, world.n_ranks)
    if _started:
        if _started["members"] != members or _started["device"] != world.machine.ordinal:
            rank, size = _started["members"]
            raise EPValueError(
                f"NVSHMEM runs in this process as rank {rank} of {size} on GPU {_started['device']}, "
                "and starts once: use the same ranks and GPU as before"
            )
        return
    # The kernels use no NVLink multicast, and setting it up fails where the fabric does not offer it.
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    nv = _nvshmem()
    from cuda.core import Device

    own = nv.get_unique_id(empty=world.rank != 0)
    raw = world.exchange.gather("telling", own._data.tobytes() if world.rank == 0 else b"", timeout)[0]
    own._data.view(np.uint8)[...] = np.frombuffer(raw, np.uint8)
    world.machine.activate()
    gpu = Device(world.machine.ordinal)
    gpu.set_current()
    try:
        nv.init(device=gpu, uid=own, rank=world.rank, nranks=world.n_ranks, initializer_method="uid")
    except Exception as error:  # nvshmem4py's own classes, which differ between its versions
        raise UnavailableError(
            f"NVSHMEM did not start on rank {world.rank} ({error}); NVSHMEM_DEBUG=INFO prints "
            "more, NVSHMEM_REMOTE_TRANSPORT=none suits a single host, and `epmoe doctor` "
            "says what is missing"
        ) from error
    world.machine.activate()
    _started.update(members=members, device=world.machine.ordinal)


def complete(world):
    """Wait until everything that this rank's finished kernels sent has arrived."""
    from nvshmem import bindings

    world.machine.activate()
    bindings.quiet_on_stream(int(world.machine.copies))
    check(cu.cuStreamSynchronize(world.machine.copies))


class HeapBuffer(Buffer):
    """This rank's part of an allocation in the symmetric heap."""

    def __init__(self, machine, nbytes, name):
        self.machine, self.nbytes, self.name = machine, int(nbytes), name
        machine.activate()
        # after an error it is never freed
        self._memory = _nvshmem().buffer(self.nbytes, except_on_del=False)
        self.address = int(self._memory.handle)

    def free(self):
        """Free the memory; collective."""
        if self.address:
            self.machine.synchronize()
            _nvshmem().free(self._memory)
            self.address = 0


class HeapMemory:
    """This rank's allocation as a Buffer, and its p2p world's allocations mapped here. See SymmetricMemory."""

    def __init__(self, world, nbytes, name, regions, timeout):
        rank, size = world.rank, world.p2p_world_size
        # Allocating waits for all ranks without a time limit. The ranks have checked that all request the same size.
        world.exchange.gather("allocation", nbytes, timeout)
        buffer = HeapBuffer(world.machine, -(-nbytes // ALIGNMENT) * ALIGNMENT, name)
        self._world, self.buffers = world, {rank: buffer}
        first = rank // size * size
        self.addresses = [
            _address(buffer.address, peer, rank) if first <= peer < first + size else 0 for peer in range(world.n_ranks)
        ]

    def free(self, together, timeout, heaps=None, release=None):
        """Free it, on all ranks together. After an error, or while results are in it (heaps), it stays."""
        if not together:
            _abandoned.append(self.buffers)
            return
        complete(self._world)
        in_use = any(heap.lent_bytes for heap in (heaps or {}).values())
        if any(self._world.exchange.gather("unmapping", in_use, timeout)):
            _abandoned.append(self.buffers)
            return
        for buffer in self.buffers.values():
            buffer.free()


def _address(address, peer, rank):
    """This rank's address of the peer's copy of symmetric memory."""
    if peer == rank:
        return address
    from nvshmem import bindings

    mapped = int(bindings.ptr(address, peer))
    if not mapped:
        raise UnavailableError(
            f"rank {rank} cannot map the memory of rank {peer}, which is in its p2p world: "
            "`nvidia-smi topo -p2p r` shows which GPUs can; choose a smaller p2p_world_size"
        )
    return mapped


def _nvshmem():
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        # nvshmem.core imports torch if there is one, and torch brings an older library of the same name
        load_nvidia_dynamic_lib("nvshmem_host")
        import nvshmem.core as nv
    except Exception as error:  # ImportError, or what its own imports raise
        raise UnavailableError(f"nvshmem4py cannot be used ({type(error).__name__}: {error}): {REMEDY}") from error
    return nv
