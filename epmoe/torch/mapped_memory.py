"""Symmetric memory of ranks that are simulated in processes of one host, without MPI: files that all of them map."""

import ctypes
import mmap
import os
import tempfile

from epmoe.device.sim.window import WindowBuffer, add_window, remove_window

FOLDER = "/dev/shm"     # in memory, where there is such a folder
_maps = []              # never unmapped: results of the pool may be looked at after it is gone


class MappedMemory:
    """This rank's part as a Buffer, everybody's addresses in this process; see SymmetricMemory.

    A file has a name only until all ranks have mapped it, so none is left behind however the processes end. Maps begin
    with a page, so addresses are aligned.
    """

    def __init__(self, world, nbytes, name, regions, timeout):
        self._world, rank = world, world.rank
        file, path = tempfile.mkstemp(prefix="epmoe-", dir=FOLDER if os.path.isdir(FOLDER) else None)
        try:
            os.truncate(file, max(1, nbytes))
            paths = world.exchange.gather("allocation", path, timeout)
            maps = [_mapped(path) for path in paths]
            _maps.extend(maps)
            world.exchange.gather("allocation", None, timeout)
        finally:
            os.close(file)
            os.unlink(path)
        self.addresses = [ctypes.addressof(ctypes.c_uint8.from_buffer(one)) for one in maps]
        self.buffers = {rank: WindowBuffer(world.machine, self.addresses[rank], nbytes, name, rank, regions, maps)}
        self._spans = [add_window(address, nbytes, name, peer, regions, maps)
                       for peer, address in enumerate(self.addresses) if peer != rank]

    def free(self, together, timeout, heaps=None):
        """Kernels must not touch it any more; results that lie in it (heaps) may be looked at for ever."""
        for buffer in self.buffers.values():
            buffer.free()
        for span in self._spans:
            remove_window(span)


def _mapped(path):
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)
