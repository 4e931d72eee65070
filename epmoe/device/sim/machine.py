"""SimMachine, the host side of the simulator: buffers, streams and launches."""

import contextlib
import os
import random
import sys

import numpy as np

from epmoe_ref.errors import EPStateError, EPValueError, UnavailableError

from .. import launch_shape
from ..forks import belongs_here
from .detector import Detector
from .memory import MEMORY, POISON, Span, aligned_bytes
from .network import Network
from .race_report import site
from .real_time import RealTime
from .run import SHARED_PER_BLOCK, Run, resident_blocks
from .threads import Launch


class Kernel:
    """An entry point of the device, made by @kernel. `fn` is the plain function. shmem: ignored here."""

    def __init__(self, fn, max_threads, n_words=0, shmem=False):
        self.fn, self.name, self.max_threads, self.n_words = fn, fn.__name__, max_threads, n_words
        self.__doc__ = fn.__doc__

    def __repr__(self):
        return "<kernel %s>" % self.name

    def __call__(self, *args):
        raise EPValueError("%s is a kernel: start it with machine.launch(%s, grid, block, ...)" % (2 * (self.name,)))


def check_arguments(kernel, args):
    """Refuse arguments that the kernel's first line would fail on."""
    if len(args) != 3:
        raise EPValueError("%d arguments for %s: give (params, num_tokens, my_rank)" % (len(args), kernel.name))
    if not isinstance(args[0], (int, np.integer, tuple)):
        raise EPValueError(
            "params of %s is of type %s: give an address, such as buffer.address"
            % (kernel.name, type(args[0]).__name__)
        )


def device_fn(fn):
    """Decorator for functions that kernels call. In the simulator it does nothing."""
    return fn


class Buffer:
    """Memory of a rank, 256-byte aligned. Its contents are unspecified (0xA5 here) until written."""

    def __init__(self, machine, nbytes, name, rank, regions):
        if not 0 <= rank < machine.n_ranks:
            raise EPValueError("%s of rank %d: ranks are 0 to %d" % (name, rank, machine.n_ranks - 1))
        self.machine, self.nbytes, self.name, self.rank = machine, int(nbytes), name, rank
        try:
            self._data = aligned_bytes(max(self.nbytes, 1))[: self.nbytes]
            self._data[:] = POISON
        except MemoryError:
            raise UnavailableError(
                "%d bytes for %s of rank %d cannot be allocated on this machine: choose smaller sizes"
                % (self.nbytes, name, rank)
            ) from None
        self.address = self._data.ctypes.data
        self._span = MEMORY.add(Span(self.address, self.nbytes, name, rank, regions=regions, keep=self._data))

    def _slice(self, offset, nbytes):
        if self._data is None:
            raise EPStateError("%s of rank %d was freed: read it before" % (self.name, self.rank))
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise EPValueError(
                "bytes %d to %d of %s, which has %d bytes" % (offset, offset + nbytes, self.name, self.nbytes)
            )
        return self._data[offset : offset + nbytes]

    def write(self, array, offset=0):
        """Copy an array into the buffer, from byte `offset` on."""
        source = np.ascontiguousarray(array)
        raw = source.reshape(-1).view(np.uint8)
        self.machine.host_access(self._span, self.address + offset, raw.size, True)
        self._slice(offset, raw.size)[:] = raw

    def read(self, dtype, shape, offset=0):
        """A copy of part of the buffer as an array, after all launches have ended."""
        self.machine.synchronize()
        return self.array(dtype, shape, offset).copy()

    def fill(self, byte, offset=0, nbytes=None):
        """Set bytes to one value."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        self.machine.host_access(self._span, self.address + offset, nbytes, True)
        self._slice(offset, nbytes)[:] = byte

    def array(self, dtype, shape, offset=0):
        """A NumPy view of part of the buffer."""
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        count = int(np.prod(shape, dtype=np.int64))
        return self._slice(offset, count * dtype.itemsize).view(dtype).reshape(shape)

    def free(self):
        """Free the memory. A kernel that still touches it gets an error."""
        if self._span is not None:
            MEMORY.remove(self._span)
            self._span = self._data = None


class Stream:
    """Launches of one rank that run one after another."""

    def __init__(self, machine, rank):
        self.machine, self.rank = machine, rank
        self.queue = []

    def capture(self):
        """0: the simulator has no graph capture."""
        return 0

    def synchronize(self):
        """Run all queued launches."""
        self.machine.synchronize()

    def wait_for(self, word, number, seconds):
        """Run all queued launches. Returns whether word[0] is this number then."""
        self.machine.synchronize()
        return word[0] == number


class PreparedLaunch:
    """A launch whose last words are stored into `words`, or given to start(), before each start."""

    def __init__(self, machine, kernel, grid, block, words, numbers, how):
        self._machine, self._kernel, self._grid, self._block = machine, kernel, grid, block
        self.words = [*words, *[0] * (kernel.n_words - len(words))]
        self._n_given, self._numbers, self._how = len(words), numbers, how

    def start(self, *words):
        """Queue it."""
        if words:
            self.words[self._n_given :] = words
        params = tuple(map(int, self.words))
        if len(params) != self._kernel.n_words:
            raise EPValueError("%s takes %d words, not %d" % (self._kernel.name, self._kernel.n_words, len(params)))
        self._machine.launch(self._kernel, self._grid, self._block, (params, *self._numbers), **self._how)


class SimMachine:
    """A simulated machine with n_ranks virtual ranks (or, with `rank`, this process's part of one).

    seed: None for round-robin, an integer for a random schedule that replays exactly; default: EPMOE_SEED or 0.
    racecheck: run the race detector; default: EPMOE_RACECHECK. stale: strong loads may return older permitted values.
    n_sms: multiprocessors of a rank. resident_limit: the most blocks of a rank at once. A larger grid is not refused,
    but its other blocks wait (to show the consequences). expire_waits: when every thread waits, let time pass until the
    kernels' own timeouts fire, instead of reporting a deadlock. stop_at_first_race: if False, `races` collects them.
    recorder: a recorder.Recorder of every operation on global memory (the race detector runs with it), or None.
    """

    has_captured = False
    shared_limit = SHARED_PER_BLOCK

    def __init__(
        self,
        n_ranks,
        *,
        rank=None,
        seed=...,
        racecheck=None,
        stale=False,
        n_sms=None,
        resident_limit=None,
        expire_waits=False,
        stop_at_first_race=True,
        recorder=None,
    ):
        self.n_ranks, self.rank = n_ranks, rank
        if seed is ...:
            text = os.environ.get("EPMOE_SEED", "0").strip()
            if text.lower() != "none" and not text.lstrip("-").isdecimal():
                raise EPValueError("EPMOE_SEED=%s must be a whole number, or none for plain round-robin" % text)
            seed = None if text.lower() == "none" else int(text)
        self.seed = seed
        self.random = None if seed is None else random.Random(seed)
        if racecheck is None:
            racecheck = os.environ.get("EPMOE_RACECHECK", "").strip()
            if racecheck not in ("", "0", "1"):
                raise EPValueError("EPMOE_RACECHECK=%s must be 0 or 1" % racecheck)
            racecheck = racecheck == "1"
        self.racecheck = bool(racecheck)
        self.stale = stale
        self.n_sms = 8 if n_sms is None else int(n_sms)
        self.resident_limit, self.expire_waits = resident_limit, expire_waits
        self.slow_ranks = ()  # their blocks are SLOW times as slow as others'
        self.stop_at_first_race = stop_at_first_race
        self.recorder = recorder
        self.races = []
        self.touched_by_host = []
        self.borrowed = []  # addresses of the arrays that launches in flight use
        self.streams = []
        self.held = 0
        self.count = 0  # launches so far
        self.steps = 0  # operations so far
        self.elapsed_ns = 0
        # other processes wait for this one, and it waits for them
        self.real_time = None if rank is None else RealTime()
        self._adopted = {}
        self.network = Network(waits=rank is None)
        belongs_here(self)

    def describe(self):
        """One line about the machine."""
        return "simulator, %s%s" % (
            "round-robin schedule" if self.seed is None else "seed %d" % self.seed,
            ", race detector" if self.racecheck else "",
        )

    # ------------------------------------------------------------------ memory
    def alloc(self, nbytes, name, rank=0, *, regions=None):
        """A new Buffer. regions: (name, offset, shape, dtype, index names) of its parts, for reports."""
        return Buffer(self, nbytes, name, rank, regions)

    def host_memory(self, nbytes, name, rank=0):
        """Memory that both the host and kernels reach: a Buffer."""
        return Buffer(self, nbytes, name, rank, None)

    def adopt(self, array, name, rank=0, *, regions=None):
        """Let kernels touch an array of the caller, in place. Returns its address. release(address) ends it."""
        if not array.flags.c_contiguous:
            raise EPValueError(
                "%s is not C-contiguous (strides %s); make it so with np.ascontiguousarray" % (name, array.strides)
            )
        address, nbytes = array.ctypes.data, array.nbytes
        if not nbytes:
            return address
        known = self._adopted.get(address)
        if known is not None and known.high - known.low == nbytes:
            known.users += 1
        else:
            if known is not None:
                raise EPValueError("%s begins where %s does, which is in use with another size" % (name, known.name))
            self._adopted[address] = MEMORY.add(
                Span(address, nbytes, name, rank, readonly=not array.flags.writeable, regions=regions, keep=array)
            )
        return address

    def release(self, address):
        """End one adopt()."""
        span = self._adopted.get(address)
        if span is None:
            return
        span.users -= 1
        if not span.users:
            del self._adopted[address]
            MEMORY.remove(span)

    def host_access(self, span, address, nbytes, write):
        """The host touches memory. While launches are in flight that may be a race."""
        if self.racecheck and self.in_flight():
            caller = sys._getframe(2)
            at = site(caller.f_code, caller.f_lasti)
            span.host_accesses.append((address, address + nbytes, write, self.count, at))
            self.touched_by_host.append(span)

    # ------------------------------------------------------------------ launches
    def stream(self, rank=0):
        """A new stream of this rank."""
        if not 0 <= rank < self.n_ranks:
            raise EPValueError("a stream of rank %d: ranks are 0 to %d" % (rank, self.n_ranks - 1))
        s = Stream(self, rank)
        self.streams.append(s)
        return s

    def capacity(self, threads, shared_bytes=0):
        """How many blocks of this size one rank holds at once."""
        n = resident_blocks(threads, shared_bytes, self.n_sms)
        return n if self.resident_limit is None else min(n, self.resident_limit)

    def max_resident_blocks(self, kernel, threads, shared_bytes=0):
        """How many blocks of this kernel one rank holds at once."""
        return resident_blocks(threads, shared_bytes, self.n_sms)

    def launch(self, kernel, grid, block, args, *, stream, shared_bytes=0, programmatic=False):
        """Queue a launch of grid blocks of `block` threads. It runs with all others at synchronize().

        programmatic: it runs after the previous launch, as others do, but may rely on it only after griddep_wait.
        """
        if not isinstance(kernel, Kernel):
            raise EPValueError("%r is no kernel: decorate it with @kernel" % kernel)
        if getattr(stream, "machine", None) is not self:
            raise EPValueError("stream=%r is no stream of this machine: machine.stream(rank) makes one" % (stream,))
        if type(kernel) is Kernel:
            check_arguments(kernel, args)
        grid, block = launch_shape.checked(self, kernel, grid, block, shared_bytes)
        self.count += 1
        stream.queue.append(Launch(self.count, kernel, grid, block, tuple(args), stream, shared_bytes, programmatic))

    def prepared(self, kernel, grid, block, words, num_tokens, my_rank, **how):
        """A launch whose params are `words`, then those given to start(*more). how: as for launch."""
        return PreparedLaunch(self, kernel, grid, block, words, (num_tokens, my_rank), how)

    def in_flight(self):
        return any(s.queue for s in self.streams)

    def synchronize(self):
        """Run all queued launches to their end."""
        if not self.in_flight():
            return
        streams = [s.queue for s in self.streams if s.queue]
        for s in self.streams:
            s.queue = []
        try:
            Run(self, streams).go()
        finally:
            for span in self.touched_by_host:
                span.host_accesses = []
            self.touched_by_host = []
            while self.borrowed:
                self.release(self.borrowed.pop())

    @contextlib.contextmanager
    def hold(self):
        """Run the launches inside together when the outermost hold() ends. An exception drops them."""
        self.held += 1
        try:
            yield self
        except BaseException:
            for s in self.streams:
                s.queue = []
            raise
        finally:
            self.held -= 1
        if not self.held:
            self.synchronize()

    def new_detector(self, queues):
        """The race detector of one run, or None. queues: the launches of each stream."""
        if self.recorder is not None:
            return self.recorder.watch(self, queues)
        if not self.racecheck and not self.stale:
            return None
        return Detector(self, queues, self.random or random.Random(0) if self.stale else None)
