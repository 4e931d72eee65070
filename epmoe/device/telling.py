"""Results that kernels send to the host. A small kernel copies arrays into mapped host memory, and the host polls it.

The kernel follows those that write the arrays, on the same stream. So the host waits only for these. It copies nothing
and synchronises with no stream.
"""

from itertools import accumulate, pairwise
from threading import RLock

import numpy as np

from epmoe_ref.errors import EPStateError, PeerTimeout

from . import SIM, block_dim, kernel, load_u32, st_release_sys_u64, store_u32, syncthreads, thread_idx, u64

THREADS = 32 if SIM else 256
MOST_ARRAYS = 3  # that one launch copies
HEADER = 64  # bytes before the arrays; they begin with the number of the last launch that has finished copying
MOST_WAITS = 4  # of a call, one after another, each for at most timeout
PATIENCE = 300.0  # more seconds, for work on the stream before the call


@kernel(max_threads=THREADS, words=3 + 2 * MOST_ARRAYS)
def tell_host(params, num_tokens, my_rank):
    """One block: copies up to three arrays of 32-bit words one after another, then stores the number of this launch."""
    word, number, to, first, n_first, second, n_second, third, n_third = params
    n_two, i = u64(n_first + n_second), u64(thread_idx())
    while i < u64(n_two + n_third):
        source = u64(first + u64(4) * i)
        if i >= n_two:
            source = u64(third + u64(4) * u64(i - n_two))
        elif i >= n_first:
            source = u64(second + u64(4) * u64(i - n_first))
        store_u32(to + u64(4) * i, load_u32(source))
        i = u64(i + u64(block_dim()))
    syncthreads()
    if thread_idx() == 0:
        st_release_sys_u64(word, number)


class HostWords:
    """Host memory into which one kernel of each rank here copies its results, and then stores the number of the call.

    ranks: of this process. stream: the call's. When all work on it has run, these kernels have ended. number: the
    call's. addresses: for each rank's kernel. told: each rank's results, memoryviews of bytes, valid until the next call
    or prepare().
    """

    def __init__(self, machine, ranks, stream):
        self._machine, self._ranks, self._stream = machine, list(ranks), stream
        self._nbytes, self.number, self.addresses, self._memory = 0, 0, [], None
        self.told = []

    def prepare(self, nbytes):
        """Allocate memory for `nbytes` of each rank, besides the number. Call it before a launch."""
        nbytes = HEADER + -(-nbytes // HEADER) * HEADER
        if nbytes > self._nbytes:
            self.free()
            total = len(self._ranks) * nbytes
            self._memory = self._machine.host_memory(total, "what the host is told", self._ranks[0])
            told = self._memory.array(np.uint8, total)
            told[:] = 0  # calls count from 1
            parts = [told[i : i + nbytes] for i in range(0, total, nbytes)]
            self._words = [memoryview(part[:8].view(np.uint64)) for part in parts]
            self.told = [memoryview(part[HEADER:]) for part in parts]
            at = self._memory.address
            self.addresses = list(range(at, at + total, nbytes))
            self._nbytes = nbytes  # the last: an interruption leaves no half of it

    def begin(self):
        """Begin a new call; returns its number and the addresses."""
        self.number += 1
        return self.number, self.addresses

    def wait(self, timeout):
        """Wait until each rank's results are in `told`. timeout [s]: of the calls that are waited for.

        Errors: PeerTimeout if the stream does not get there in time; EPError of the device, or if the stream has ended
        and a kernel has stored nothing.
        """
        seconds = MOST_WAITS * timeout + PATIENCE
        for word in self._words:
            if not self._stream.wait_for(word, self.number, seconds):
                raise PeerTimeout(
                    f"rank {self._ranks[0]}: the GPU has sent the host nothing for {seconds:g} s: work on the "
                    "stream before the call has not ended, or one of its kernels cannot begin; when the "
                    "stream runs again, call reset() on all ranks"
                )

    def free(self):
        """Free the host memory. The launches must have ended."""
        if self._memory is not None:
            self._memory.free()
            self._memory, self._nbytes, self.told = None, 0, []


class Telling:
    """Copies arrays in device memory to the host, whatever kernels wrote them, with tell_host. rank: of the stream."""

    def __init__(self, machine, rank, stream):
        self._machine, self._rank, self._stream = machine, rank, stream
        self._one_at_a_time, self._waits = RLock(), False  # any thread may ask for results
        self.words, self._launch = HostWords(machine, [rank], stream), None

    def tell(self, arrays, timeout):
        """[the bytes of each array, uint8], as they are when all work now on the stream has run.

        arrays: [(address, bytes, a multiple of 4)]. Errors: as HostWords.wait; EPStateError if the handler of a signal
        calls it while this thread waits here.
        """
        with self._one_at_a_time:
            if self._waits:
                raise EPStateError(
                    f"rank {self._rank}: a signal handler called trimmed() while trimmed() was waiting in the same "
                    "thread: let the handler set a flag, and call trimmed() when the first has returned"
                )
            self._waits = True
            try:
                return self._tell(arrays, timeout)
            finally:
                self._waits = False

    def _tell(self, arrays, timeout):
        if self._launch is None:
            how = dict(stream=self._stream)
            self._launch = self._machine.prepared(tell_host, 1, THREADS, (), 0, self._rank, **how)
        ends = list(accumulate([nbytes for _, nbytes in arrays], initial=0))
        self.words.prepare(ends[-1])
        for i in range(0, len(arrays), MOST_ARRAYS):
            words = [0] * (2 * MOST_ARRAYS)
            for j, (address, nbytes) in enumerate(arrays[i : i + MOST_ARRAYS]):
                words[2 * j : 2 * j + 2] = address, nbytes // 4
            number, (to,) = self.words.begin()
            self._launch.start(to, number, to + HEADER + ends[i], *words)
        self.words.wait(timeout)
        told = np.array(self.words.told[0])
        return [told[a:b] for a, b in pairwise(ends)]

    def free(self):
        """Free the host memory. The launches must have ended."""
        self.words.free()
