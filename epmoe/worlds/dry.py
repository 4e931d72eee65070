"""A machine and a world on which nothing runs. Calls do all their work on the host, and record the kernels they need.

Many processes can then compile the kernels of a run in advance, without a list of them.
"""

import contextlib

import numpy as np

FIRST_ADDRESS = 1 << 40
N_SMS = 132  # needed to make a grid; most kernels do not depend on it


class DryBuffer:
    """A Buffer without memory. Writes are lost, and reads are zero."""

    def __init__(self, machine, address, nbytes, name, rank):
        self.machine, self.address = machine, address
        self.nbytes, self.name, self.rank = int(nbytes), name, rank

    def write(self, array, offset=0):
        """Nothing."""

    def fill(self, byte, offset=0, nbytes=None):
        """Nothing."""

    def read(self, dtype, shape, offset=0):
        """Zeros."""
        return np.zeros(shape, dtype)

    def array(self, dtype, shape, offset=0):
        """Zeros, in the simulator."""
        return np.zeros(shape, dtype)

    def free(self):
        """Nothing."""


class DryStream:
    """A stream without work."""

    handle = 0

    def __init__(self, machine):
        self.machine = machine

    def capture(self):
        """No capture into a graph."""
        return 0

    def wait(self, other):
        """Nothing."""

    def synchronize(self):
        """Nothing."""

    def wait_for(self, word, number, seconds):
        """Behaves as if the number had arrived at once."""
        return True


class DryLaunch:
    """A launch that never starts."""

    def __init__(self, words, n_words):
        self.words = [*words, *[0] * (n_words - len(words))]

    def start(self, *words):
        """Nothing."""


class DryMachine:
    """Stands in for a GpuMachine in calls. `kernels` has each launched kernel once."""

    is_simulator = False
    compute_capability = 9, 0
    ordinal = 0
    has_captured = False
    streams = ()

    def __init__(self, n_sms):
        self.n_sms = self.all_sms = n_sms
        self.kernels, self._end = {}, FIRST_ADDRESS

    def describe(self):
        """One line about the machine."""
        return f"nothing, {self.n_sms} multiprocessors"

    def alloc(self, nbytes, name, rank=0, *, regions=None):
        """A DryBuffer with its own addresses."""
        address, self._end = self._end, self._end + (int(nbytes) + 511) // 256 * 256
        return DryBuffer(self, address, nbytes, name, rank)

    def host_memory(self, nbytes, name, rank=0):
        """A DryBuffer. It holds zeros."""
        return self.alloc(nbytes, name, rank)

    def adopt(self, array, name, rank=0, *, regions=None):
        """An address for an array of the caller, in the simulator."""
        return self.alloc(array.nbytes, name).address

    def release(self, address):
        """Nothing."""

    def launch(self, kernel, grid, block, args, *, stream, **options):
        """Record the kernel."""
        self.kernels[kernel] = None

    def prepare(self, kernel):
        """Record the kernel."""
        self.kernels[kernel] = None

    def prepared(self, kernel, grid, block, words, num_tokens, my_rank, **options):
        """Record the kernel. Its launch does nothing."""
        self.kernels[kernel] = None
        return DryLaunch(words, kernel.n_words)

    def synchronize(self):
        """Nothing."""

    def activate(self):
        """Nothing."""


class DryMemory:
    """Addresses of all ranks, without memory."""

    def __init__(self, buffer, n_ranks):
        self.buffers, self.addresses = {0: buffer}, [buffer.address] * n_ranks

    def free(self, together, timeout, heaps=None):
        """Nothing."""


class DryWorld:
    """Rank 0 of n_ranks processes, without the other processes."""

    lists, shmem = False, True
    rank, ranks = 0, range(1)

    def __init__(self, n_ranks, n_sms=N_SMS):
        self.n_ranks, self.machine = n_ranks, DryMachine(n_sms)
        self._stream = DryStream(self.machine)

    def size(self):
        """n_ranks."""
        return self.n_ranks

    def agree(self, cfg, timeout, **options):
        """There is no other rank to compare with."""

    def same(self, what, facts, timeout):
        """There is no other rank to compare with."""

    def allocate(self, nbytes, name, regions, timeout):
        """DryMemory."""
        return DryMemory(self.machine.alloc(nbytes, name), self.n_ranks)

    def connect(self, memory):
        """Nothing."""

    def disconnect(self, memory):
        """Nothing."""

    def barrier(self, occasion, timeout):
        """Nothing."""

    def tell(self, value, timeout):
        """[value for every rank]: all have this one."""
        return [value] * self.n_ranks

    def stream_of(self, rank, fused=False):
        """The stream."""
        return self._stream

    def share(self, launch):
        """The LaunchConfig unchanged: each rank has a whole device."""
        return launch

    def launching(self, fused):
        """Launches need nothing around them."""
        return contextlib.nullcontext()
