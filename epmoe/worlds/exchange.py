"""Exchanges values between ranks through MPI, with a timeout. Every rank gives a value and gets the values of all.

MPI's own collectives wait for ever and do not say for which rank. Here each rank sends its value to every other rank
and probes for theirs, so an error can name a rank that never arrives. There are at most a few dozen ranks, and
exchanges happen at the beginning, at the end, and when arguments or memory are new, never in a steady-state call.
Values are plain data (plain_data.py).
"""

import time

from epmoe.device.forks import belongs_here
from epmoe.worlds.plain_data import decode, encode
from epmoe_ref.errors import PeerTimeout

# One channel (MPI tag, in a range that programs seldom use) for each purpose. So a rank that left one exchange after a
# timeout and started another is not taken for a participant of the first.
CHANNELS = (
    "meeting",
    "devices",
    "configuration",
    "allocation",
    "start",
    "reset",
    "leaving",
    "unmapping",
    "telling",
    "late calls",
)
RESET = "reset"  # discards all values sent before all ranks met here
FIRST_TAG = 31200
NAP_S = 0.0005
YIELDS = 50


class Gathering:
    """An exchange by any means. A subclass has gather()."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self._begun = {}  # channel -> {rank: value} of an unfinished exchange, which the next gather() continues
        self._n_resets = 0  # older messages are discarded
        belongs_here(self)

    def hear(self, channel, value, timeout):
        """{rank: value} of this rank and of those that arrive in time. A rank that does not arrive is no error."""
        try:
            return dict(enumerate(self.gather(channel, value, timeout)))
        except PeerTimeout:
            return dict(self._begun.get(channel, {self.rank: value}))

    def _late(self, channel, values, timeout):
        """The PeerTimeout that names the ranks that have not arrived."""
        missing = ", ".join(str(p) for p in range(self.size) if p not in values)
        return PeerTimeout(
            f"rank {self.rank}, {channel}: rank {missing} did not come; gave up after timeout={timeout:g} s: has it ended, "
            "or made another call?"
        )


class Exchange(Gathering):
    """Values of all ranks of an MPI communicator. mpi: mpi4py.MPI."""

    def __init__(self, comm, mpi):
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.comm, self._mpi = comm, mpi
        self._early = {}  # channel -> {rank: value} of those that came() saw
        self._sends = []  # [(request, message)]

    def gather(self, channel, value, timeout):
        """[the value of each rank]; collective. Raises PeerTimeout, naming the ranks that did not arrive in time."""
        tag = FIRST_TAG + CHANNELS.index(channel)
        if channel not in self._begun:
            message = encode((self._n_resets, value))
            self._begun[channel] = {self.rank: value}
            self._look_at_sends()
            for peer in range(self.size):
                if peer != self.rank:
                    self._sends.append((self.comm.Isend([message, self._mpi.BYTE], peer, tag), message))
        values = self._begun[channel]
        values |= self._early.pop(channel, {})
        deadline, looks = time.monotonic() + timeout, 0
        while True:
            self._receive(tag, values)
            if len(values) == self.size:
                break
            if time.monotonic() > deadline:
                raise self._late(channel, values, timeout)
            looks += 1
            time.sleep(0 if looks < YIELDS else NAP_S)
        del self._begun[channel]
        if channel == RESET:
            self._n_resets += 1
            self._begun.clear()
            self._early.clear()
        self._deliver(deadline)
        return [values[rank] for rank in range(self.size)]

    def came(self, channel):
        """{rank: value} of the peers that have already begun the next exchange. Does not wait."""
        early = self._early.setdefault(channel, {})
        seen = self._begun.get(channel, {self.rank: None}) | early
        early |= self._receive(FIRST_TAG + CHANNELS.index(channel), seen)
        return dict(early)

    def _receive(self, tag, values):
        """Add messages from peers that are not in values. Returns {rank: value} of these."""
        new = {}
        for peer in [p for p in range(self.size) if p not in values]:
            while peer not in new:
                status = self._mpi.Status()
                message = self.comm.Improbe(source=peer, tag=tag, status=status)
                if message is None:
                    break
                raw = bytearray(status.Get_count(self._mpi.BYTE))
                message.Recv([raw, self._mpi.BYTE])
                n_resets, value = decode(raw)
                if n_resets >= self._n_resets:
                    new[peer] = value
        values |= new
        return new

    def _look_at_sends(self):
        self._sends = [one for one in self._sends if not one[0].Test()]

    def _deliver(self, deadline):
        """Wait until this rank's messages have left it, or until the deadline.

        A large message leaves only while its sender is inside MPI. Afterwards the caller may wait long for a kernel that
        the peer launches only when it has the message.
        """
        while time.monotonic() < deadline:
            self._look_at_sends()
            if not self._sends:
                return
            time.sleep(0)
