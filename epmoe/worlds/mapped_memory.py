"""Symmetric memory of simulated ranks in processes of one host: files that all of them map."""

import mmap
import os
import re
import stat
import sys
import tempfile

import numpy as np

from epmoe.device.sim.window import WindowBuffer, add_window, remove_window
from epmoe.worlds.symmetric import SymmetricMemory
from epmoe_ref.errors import UnavailableError

NAMELESS = sys.platform == "linux"
PATH = re.compile(r"/proc/\d+/fd/\d+" if NAMELESS else re.escape(tempfile.gettempdir()) + "/epmoe-[^/]+")


class MappedMemory(SymmetricMemory):
    """This rank's part as a Buffer, and all ranks' addresses in this process.

    On Linux the files are nameless and not in /dev/shm, so none is left behind and /dev/shm's size does not limit them.
    Peers open them through /proc, which the system allows only to processes of the same user. A peer checks the file's
    kind and size. On other systems the files have names in a temporary folder until all ranks have mapped them.
    Maps begin at a page boundary, so addresses are aligned. A map ends with the last array in it.
    """

    def __init__(self, world, nbytes, name, regions, timeout):
        rank, nbytes = world.rank, max(1, nbytes)
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
        own = WindowBuffer(world.machine, maps[rank], name, rank, regions)
        super().__init__({rank: own}, [one.ctypes.data for one in maps])
        self._spans = [add_window(one, name, peer, regions) for peer, one in enumerate(maps) if peer != rank]

    def free(self, together, timeout, heaps=None, release=None):
        """Kernels must not use peers' memory any more."""
        for span in self._spans:
            remove_window(span)
        super().free(together, timeout, heaps, release)


def _new_file():
    """(a new file of this process, the path by which peers open it)."""
    if NAMELESS:
        file = os.memfd_create("epmoe")
        os.fchmod(file, 0o600)
        return file, f"/proc/{os.getpid()}/fd/{file}"
    return tempfile.mkstemp(prefix="epmoe-")


def _mapped(peer, path, nbytes):
    """A peer's file, as bytes. Errors: UnavailableError unless its user, size and kind are those of a rank's file."""
    try:
        if not PATH.fullmatch(path):
            raise OSError("ranks name theirs otherwise")
        # follow no link that another user could have made; links in /proc/.../fd are the kernel's
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if NAMELESS else os.O_NOFOLLOW))
    except OSError as error:
        raise UnavailableError(
            f"the memory of rank {peer}, {path}, cannot be opened ({error}): its process must be of "
            "the same user and in the same container, where /proc shows it"
        ) from None
    try:
        seen = os.fstat(file)
        is_ours = stat.S_ISREG(seen.st_mode) and seen.st_uid == os.getuid() and seen.st_nlink == (not NAMELESS)
        if not is_ours or seen.st_size != nbytes:
            raise UnavailableError(
                f"what rank {peer} names as its memory ({path}) is no file that a rank has made: it "
                f"has {seen.st_size} bytes, {nbytes} were told, owner {seen.st_uid}, "
                f"{seen.st_nlink} names"
            )
        return np.frombuffer(mmap.mmap(file, nbytes), np.uint8)
    finally:
        os.close(file)
