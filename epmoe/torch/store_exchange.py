"""What ranks of a process group tell each other, with a timeout: values in a TCPStore of their own.

torch's collectives of objects wait as long as the group's timeout and do not say for whom; here a rank that stays away
is named. There are few ranks, and this happens when memory grows, never in a call of the steady state.
"""

import pickle
import time
from datetime import timedelta

import torch.distributed as dist

from epmoe_ref.errors import PeerTimeout

HOST = "127.0.0.1"      # all ranks are on one host
NAP_S = 0.0005


def new_store(port=0):
    """The store, served by this process, which finds a port; with a port, a connection to another process's."""
    return dist.TCPStore(HOST, port, is_master=not port, wait_for_workers=False, timeout=timedelta(seconds=60))


class StoreExchange:
    """Values of all ranks; rank 0 serves the store."""

    def __init__(self, store, rank, size):
        self.rank, self.size, self._store = rank, size, store
        self._number = {}       # channel -> exchanges of it so far
        self._begun = {}        # channel -> {rank: value} of an exchange that timed out; the next one goes on with it

    def gather(self, channel, value, timeout):
        """[the value of each rank]; collective. Raises PeerTimeout that names the ranks that did not come in time."""
        values = self._begun.pop(channel, None)
        try:
            if values is None:
                values, number = {self.rank: value}, self._number.get(channel, 0)
                self._number[channel] = number + 1
                self._store.set(self._key(channel, self.rank), pickle.dumps(value))
            deadline = time.monotonic() + timeout
            while not self._look(channel, values):
                if time.monotonic() > deadline:
                    self._begun[channel] = values
                    missing = ", ".join(str(p) for p in range(self.size) if p not in values)
                    raise PeerTimeout(f"rank {self.rank}, {channel}: rank {missing} did not come; gave up after "
                                      f"timeout={timeout:g} s")
                time.sleep(NAP_S)
            self._leave(channel, deadline)
        except RuntimeError as error:           # torch's, if there is nothing at the other end any more
            raise PeerTimeout(f"rank {self.rank}, {channel}: rank 0, which serves the store of this process group, "
                              f"has ended ({error})") from error
        return [values[rank] for rank in range(self.size)]

    def _key(self, channel, what):
        return f"{channel}/{self._number[channel]}/{what}"

    def _look(self, channel, values):
        for peer in range(self.size):
            key = self._key(channel, peer)
            if peer not in values and self._store.check([key]):
                values[peer] = pickle.loads(self._store.get(key))
        return len(values) == self.size

    def _leave(self, channel, deadline):
        """Rank 0 leaves last: with it ends the store, perhaps before others have read."""
        left = self._key(channel, "left")
        self._store.add(left, 1)
        if self.rank == 0:
            while self._store.add(left, 0) < self.size and time.monotonic() < deadline:
                time.sleep(NAP_S)
            for what in (*range(self.size), "left"):
                self._store.delete_key(self._key(channel, what))
