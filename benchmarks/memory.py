"""Arrays of every rank of this process in device memory, in the form that the calls under test take."""

from epmoe.host.memory_pool import Arrangement, MemoryPool


class Arrays:
    """Named arrays, {name: (shape, dtype)}, the same on every rank. Contents are unspecified until written."""

    def __init__(self, world, shapes):
        self.world = world
        arrangement = Arrangement("benchmark", shapes, is_exact=True)
        self._arenas = {rank: MemoryPool(world.machine, rank) for rank in world.ranks}
        self._loans = {rank: arena.lend(arrangement) for rank, arena in self._arenas.items()}
        self._made, self._each = {}, {}

    def write(self, name, of_rank):
        """Write an array of every rank. of_rank(rank) gives its values."""
        for rank, loan in self._loans.items():
            loan.buffer.write(of_rank(rank), loan.fields[name].offset)

    def fill(self, name, byte):
        """Set every byte of an array of every rank."""
        for loan in self._loans.values():
            loan.buffer.fill(byte, loan.fields[name].offset, loan.fields[name].nbytes)

    def of(self, rank, name):
        """One rank's array, the same object each time, so that no call under test includes making it."""
        made = self._made.get((rank, name))
        if made is None:
            made = self._made[rank, name] = self._loans[rank].array(name)
        return made

    def each(self, name):
        """The array of each rank, a list or this rank's own, depending on the world. The same object each time."""
        made = self._each.get(name)
        if made is None:
            made = self._each[name] = self.of_ranks(self.of(rank, name) for rank in self.world.ranks)
        return made

    def of_ranks(self, values):
        """A list, or its only entry, depending on the world."""
        values = list(values)
        return values if self.world.lists else values[0]

    def close(self):
        """Free unused arrays. The kernels must have ended."""
        self._made = self._each = None
        for arena in self._arenas.values():
            arena.close()
        self._loans = None
