"""Symmetric memory of simulated ranks in processes of one host: MPI shared-memory windows."""

from functools import partial
from typing import NamedTuple

from epmoe.device.sim.window import WindowBuffer, add_window, remove_window
from epmoe.worlds import shared_room
from epmoe.worlds.symmetric import free_unused

ALIGNMENT = 256  # bytes


class Window(NamedTuple):
    """An MPI window with a segment for each rank. `number` counts the windows of a world and is equal on all ranks."""

    number: int
    nbytes: int
    mpi: object
    addresses: list  # of every rank's segment, in this process


class _Part(WindowBuffer):
    """This rank's segment. when_freed: a function to call when it is freed, or None."""

    when_freed = None

    def free(self):
        super().free()
        if self.when_freed is not None:
            self.when_freed()
            self.when_freed = None


class WindowMemory:
    """This rank's part as a Buffer, and this process's addresses of all ranks' parts. See SymmetricMemory."""

    def __init__(self, world, nbytes, name, regions, timeout):
        self._world, rank = world, world.rank
        self._window = _window(world, nbytes, timeout)
        self.addresses, keep = self._window.addresses, self._window.mpi
        self.buffers = {
            rank: _Part(world.machine, self.addresses[rank], nbytes, name, rank, regions, keep)
        }
        self._spans = [
            add_window(address, nbytes, name, peer, regions, keep)
            for peer, address in enumerate(self.addresses)
            if peer != rank
        ]

    def free(self, together, timeout, heaps=None):
        """Keep the window for the next allocation. After an error do not reuse it: peers may still write to it.

        Returning it to MPI is collective and may wait for ever, so that happens when the process ends. heaps: as for
        SymmetricMemory.
        """
        for span in self._spans:
            remove_window(span)
        for buffer in self.buffers.values():
            buffer.when_freed = (
                partial(self._world.free_windows.append, self._window) if together else None
            )
        free_unused(self.buffers, heaps)


def _window(world, nbytes, timeout):
    """A free window that is large enough, if all ranks have the same one, else a new one; collective."""
    known = next((w for w in world.free_windows if w.nbytes >= nbytes), None)
    numbers = world.exchange.gather("allocation", known and known.number, timeout)
    if known is not None and numbers == [known.number] * world.n_ranks:
        world.free_windows.remove(known)
        return known
    from mpi4py import MPI

    # the same on all ranks, so no rank waits for one that refused
    rooms = world.exchange.gather("allocation", shared_room.room(), timeout)
    least = min((one for one in rooms if one is not None), default=None)
    shared_room.expect_room(
        world.n_ranks * (nbytes + ALIGNMENT), least, f"memory of {world.n_ranks} ranks"
    )
    world.n_windows += 1
    mpi = MPI.Win.Allocate_shared(nbytes + ALIGNMENT, 1, comm=world.host)  # all ranks are here
    segments = [mpi.Shared_query(peer)[0].address for peer in range(world.n_ranks)]
    # A segment may have different addresses in different processes, so its owner decides where it is aligned.
    offsets = world.exchange.gather("allocation", -segments[world.rank] % ALIGNMENT, timeout)
    return Window(
        world.n_windows,
        nbytes,
        mpi,
        [segment + offset for segment, offset in zip(segments, offsets)],
    )
