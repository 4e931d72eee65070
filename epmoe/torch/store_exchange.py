"""Exchanges plain data between the ranks of a process group, through the group's own store, with a timeout.

torch's object collectives unpickle data from other processes, wait for the group's timeout, and do not name the missing
rank; this does. There are few ranks, and exchanges happen only when memory or arguments are new, never in a
steady-state call.
"""

import time
import weakref

import torch.distributed as dist

from epmoe.worlds.exchange import RESET, Gathering
from epmoe.worlds.plain_data import decode, encode
from epmoe_ref.errors import PeerTimeout

NAP_S = 0.0005
# process group -> number of worlds made of it, the same on all ranks
_n_worlds = weakref.WeakKeyDictionary()


def store_of(group):
    """The store of a process group, with a prefix that is unique to one world of the group. count() it when all met."""
    number = _n_worlds.get(group, 0) + 1
    # the only place that all versions of torch have
    of_group = dist.distributed_c10d._world.pg_map[group][1]
    return dist.PrefixStore(f"epmoe/{number}", of_group)


def count(group):
    """Note that the ranks of a new world have met. Otherwise a rank that tries again would look elsewhere."""
    _n_worlds[group] = _n_worlds.get(group, 0) + 1


class StoreExchange(Gathering):
    """Collects a value from every rank. Keys hold the number of resets, so that older exchanges are ignored."""

    def __init__(self, store, rank, size):
        super().__init__(rank, size)
        self._store = store
        self._number = {}  # channel -> exchanges of it so far

    def gather(self, channel, value, timeout):
        """[value of each rank]; collective. Raises a PeerTimeout that names the ranks that did not arrive in time."""
        try:
            if channel not in self._begun:
                number = self._number.get(channel, -1) + 1
                # published first: after an interruption it is published again
                self._store.set(self._key(channel, self.rank, number), encode(value))
                self._number[channel], self._begun[channel] = number, {self.rank: value}
            values, deadline = self._begun[channel], time.monotonic() + timeout
            while not self._look(channel, values):
                if time.monotonic() > deadline:
                    raise self._late(channel, values, timeout)
                time.sleep(NAP_S)
            self._leave(channel, deadline)
        except RuntimeError as error:  # torch's, if the process that serves the store has ended
            raise PeerTimeout(
                f"rank {self.rank}, {channel}: whoever serves the store of this process group has ended ({error})"
            ) from error
        del self._begun[channel]
        if channel == RESET:
            self._n_resets += 1
            self._begun.clear()
            self._number.clear()
        return [values[rank] for rank in range(self.size)]

    def _key(self, channel, what, number=None):
        number = self._number[channel] if number is None else number
        return f"{self._n_resets}/{channel}/{number}/{what}"

    def _look(self, channel, values):
        for peer in range(self.size):
            key = self._key(channel, peer)
            if peer not in values and self._store.check([key]):
                values[peer] = decode(self._store.get(key))
        return len(values) == self.size

    def _leave(self, channel, deadline):
        """Rank 0 leaves last: if it serves the store, the store ends with it, perhaps before others have read."""
        left = self._key(channel, "left")
        self._store.add(left, 1)
        if self.rank == 0:
            while self._store.add(left, 0) < self.size and time.monotonic() < deadline:
                time.sleep(NAP_S)
            for what in (*range(self.size), "left"):
                self._store.delete_key(self._key(channel, what))
