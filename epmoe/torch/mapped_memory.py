"""Symmetric memory of ranks that are simulated in processes of one host, without MPI: files that all of them map."""

import ctypes
import mmap
import os
import re
import stat
import sys
import tempfile

from epmoe.device.sim.window import WindowBuffer, add_window, remove_window
from epmoe_ref.errors import UnavailableError

NAMELESS = sys.platform == "linux"
PATH = re.compile(
    r"/proc/\d+/fd/\d+" if NAMELESS else re.escape(tempfile.gettempdir()) + "/epmoe-[^/]+"
)
_maps = []  # never unmapped: results of the pool may be looked at after it is gone


class MappedMemory:
    """This rank's part as a Buffer, everybody's addresses in this process; see SymmetricMemory.

    On Linux the files have no name and no place in /dev/shm: none is left behind and none is limited by its size.
    Peers open them through /proc, which the system lets only processes of the same user do; whatever they open must be
    such a file, of that size. Elsewhere the files have names in a temporary folder until all ranks have mapped them.
    Maps begin with a page, so addresses are aligned.
    """

    def __init__(self, world, nbytes, name, regions, timeout):
        self._world, rank, nbytes = world, world.rank, max(1, nbytes)
        file, path = _new_file()
        try:
            os.truncate(file, nbytes)
            told = world.exchange.gather("allocation", (path, nbytes), timeout)
            maps = [_mapped(peer, *of_peer) for peer, of_peer in enumerate(told)]
            world.exchange.gather("allocation", None, timeout)
        finally:
            os.close(file)
            if not NAMELESS:
                os.unlink(path)
        _maps.extend(maps)
        self.addresses = [ctypes.addressof(ctypes.c_uint8.from_buffer(one)) for one in maps]
        self.buffers = {
            rank: WindowBuffer(
                world.machine, self.addresses[rank], nbytes, name, rank, regions, maps
            )
        }
        self._spans = [
            add_window(self.addresses[peer], len(maps[peer]), name, peer, regions, maps)
            for peer in range(world.n_ranks)
            if peer != rank
        ]

    def free(self, together, timeout, heaps=None):
        """Kernels must not touch it any more; results that lie in it (heaps) may be looked at for ever."""
        for buffer in self.buffers.values():
            buffer.free()
        for span in self._spans:
            remove_window(span)


def _new_file():
    """A new file of this process, and the path by which peers open it."""
    if NAMELESS:
        file = os.memfd_create("epmoe")
        os.fchmod(file, 0o600)
        return file, f"/proc/{os.getpid()}/fd/{file}"
    return tempfile.mkstemp(prefix="epmoe-")


def _mapped(peer, path, nbytes):
    """A peer's file, mapped: of this user, of this size, and of the kind that ranks make, or it is refused."""
    try:
        if not PATH.fullmatch(path):
            raise OSError("ranks name theirs otherwise")
        # a link would lead to a file of somebody else's choice; links in /proc/.../fd are the kernel's
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if NAMELESS else os.O_NOFOLLOW))
    except OSError as error:
        raise UnavailableError(
            f"the memory of rank {peer}, {path}, cannot be opened ({error}): its process must be of "
            "the same user and in the same container, where /proc shows it"
        ) from None
    try:
        seen = os.fstat(file)
        is_ours = (
            stat.S_ISREG(seen.st_mode)
            and seen.st_uid == os.getuid()
            and seen.st_nlink == (not NAMELESS)
        )
        if not is_ours or seen.st_size != nbytes:
            raise UnavailableError(
                f"what rank {peer} names as its memory ({path}) is no file that a rank has made: it "
                f"has {seen.st_size} bytes, {nbytes} were told, owner {seen.st_uid}, "
                f"{seen.st_nlink} names"
            )
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)
