"""A machine and a world on which nothing runs. Calls do all their work on the host, and record the kernels they need.

Many processes can then compile the kernels of a run in advance, without a list of them.
"""

import contextlib

import numpy as np

FIRST_ADDRESS = 1 << 40
N_SMS = 132  # needed to make a grid; most kernels do not depend on it


def _nothing(self, *arguments, **options):
    """Nothing: there is no device, and no other rank."""


class DryBuffer:
    """A Buffer without memory. Writes are lost, and reads are zero."""

    def __init__(self, machine, address, nbytes, name, rank):
        self.machine, self.address = machine, address
        self.nbytes, self.name, self.rank = int(nbytes), name, rank

    write = fill = free = _nothing

    def read(self, dtype, shape, offset=0):
        return np.zeros(shape, dtype)

    array = read  # in the simulator


class DryStream:
    """A stream without work."""

    handle = 0
    wait = synchronize = _nothing

    def __init__(self, machine):
        self.machine = machine

    def capture(self):
        """No capture into a graph."""
        return 0

    def wait_for(self, word, number, seconds):
        """Behaves as if the number had arrived at once."""
        return True


class DryLaunch:
    """A launch that never starts."""

    def __init__(self, words, n_words):
        self.words = [*words, *[0] * (n_words - len(words))]

    start = _nothing


class DryMachine:
    """Stands in for a GpuMachine in calls. `kernels` has each launched kernel once."""

    compute_capability = 9, 0
    ordinal = 0
    has_captured = False
    streams = ()
    release = synchronize = activate = _nothing

    def __init__(self, n_sms):
        self.n_sms = self.all_sms = n_sms
        self.kernels, self._end = {}, FIRST_ADDRESS

    def alloc(self, nbytes, name, rank=0, *, regions=None):
        address, self._end = self._end, self._end + (int(nbytes) + 511) // 256 * 256
        return DryBuffer(self, address, nbytes, name, rank)

    host_memory = alloc

    def adopt(self, array, name, rank=0, *, regions=None):
        """An address for an array of the caller, in the simulator."""
        return self.alloc(array.nbytes, name).address

    def prepare(self, kernel, *arguments, **options):
        """Record the kernel."""
        self.kernels[kernel] = None

    launch = prepare

    def prepared(self, kernel, grid, block, words, *numbers, **options):
        """Record the kernel. Its launch does nothing."""
        self.kernels[kernel] = None
        return DryLaunch(words, kernel.n_words)


class DryMemory:
    """Addresses of all ranks, without memory."""

    free = _nothing

    def __init__(self, buffer, n_ranks):
        self.buffers, self.addresses = {0: buffer}, [buffer.address] * n_ranks


class DryWorld:
    """Rank 0 of n_ranks processes, without the other processes."""

    lists, shmem = False, True
    rank, ranks = 0, range(1)
    agree = same = connect = disconnect = barrier = _nothing

    def __init__(self, n_ranks, n_sms=N_SMS):
        self.n_ranks, self.machine = n_ranks, DryMachine(n_sms)
        self._stream = DryStream(self.machine)

    def size(self):
        return self.n_ranks

    def allocate(self, nbytes, name, regions, timeout):
        return DryMemory(self.machine.alloc(nbytes, name), self.n_ranks)

    def tell(self, value, timeout):
        return [value] * self.n_ranks

    def stream_of(self, rank, fused=False):
        return self._stream

    def share(self, launch):
        """The LaunchConfig unchanged: each rank has a whole device."""
        return launch

    def launching(self, fused):
        return contextlib.nullcontext()
