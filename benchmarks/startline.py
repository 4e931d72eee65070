"""Makes ranks begin a phase together, with a cold L2: a buffer is written, and all ranks meet on the device.

The meeting kernel meets twice. At the first meeting all hosts have put this iteration on their streams. The kernel then
waits HOLD_US, so that the hosts can queue the phase itself. The second meeting releases all ranks within the flight
time of a flag, about a microsecond. So neither a late host nor its launch counts as the phase's time.

A rank that fails attends no more meetings, and writes this into all others' device memory. If its device has failed, it
cannot. The others' hosts then learn it from its host. After that their kernels wait for no rank any more.
"""

import contextlib
import time

import numpy as np

from epmoe import device
from epmoe.device import (
    globaltimer,
    i32,
    kernel,
    ld_acquire_sys_u32,
    ld_relaxed_sys_u32,
    load_u64,
    nanosleep,
    st_release_sys_u32,
    store_u32,
    syncthreads,
    thread_idx,
    u32,
    u64,
)
from epmoe.kernels.params import ParameterBlock
from epmoe_ref.errors import EPError, PeerTimeout

FLUSH_BYTES = 256 << 20
HOLD_US = 300
TIMEOUT_S = 20
POLLS_PER_LOOK = 32  # polls between two checks of the clock and of `expired`
EXPIRED_AT = 2048  # bytes, after the flags: 0; 1 + an absent rank; or this and a rank that failed:
FAILED = 1 << 16
NAP_S = 0.0002


class LeftBehind(PeerTimeout):
    """A peer failed, and this rank does not wait for it. Such an error says nothing about this rank."""


def meeting_kernel(n_ranks, my_hold_us):
    """Kernel (params, epoch, my_rank), a thread a rank. params: addresses of all ranks' flags, then of `expired`."""
    block = ParameterBlock(("flags", n_ranks), ("expired", 1))
    p_expired, timeout_ns, hold_ns = block.offset("expired"), TIMEOUT_S * 10**9, my_hold_us * 1000

    @device.device_fn
    def meet(params, epoch, my_rank):
        rank = i32(thread_idx())
        if rank < n_ranks:
            st_release_sys_u32(load_u64(params + u64(8) * u64(rank)) + u64(4) * u64(my_rank), u32(epoch))
            mine = load_u64(params + u64(8) * u64(my_rank)) + u64(4) * u64(rank)
            expired, begin, polls = u64(load_u64(params + u64(p_expired))), u64(globaltimer()), 0
            while i32(u32(ld_relaxed_sys_u32(mine) - u32(epoch))) < 0:
                polls += 1
                if polls % POLLS_PER_LOOK == 0:
                    if ld_relaxed_sys_u32(expired) != u32(0):  # a peer failed, or was absent before
                        break
                    if u64(globaltimer()) - begin > u64(timeout_ns):
                        store_u32(expired, u32(rank + 1))
                        break
            ld_acquire_sys_u32(mine)
        syncthreads()

    @kernel(max_threads=128)
    def meeting(params, epoch, my_rank):
        meet(params, i32(2 * epoch - 1), my_rank)
        begin = globaltimer()
        while globaltimer() - begin < u64(hold_ns):
            nanosleep(u32(1000))
        meet(params, i32(2 * epoch), my_rank)

    return meeting


class StartLine:
    """Where the ranks of a world begin together. Virtual ranks and simulated ones need no meeting."""

    def __init__(self, world, timeout=60.0):
        self.world, self.machine, self._epoch = world, world.machine, 0
        self._needed = not device.SIM
        if not self._needed:
            return
        self._flush = self.machine.alloc(FLUSH_BYTES, "flush")
        self._meets = not world.lists
        n = world.n_ranks if self._meets else 1
        self._rank = world.ranks[0] if self._meets else 0
        self._kernel = meeting_kernel(n, HOLD_US)
        self.machine.prepare(self._kernel)
        self._flags = world.allocate(max(4096, 4 * n), "start flags", (), timeout)
        own = self._flags.buffers[self._rank]
        own.fill(0)
        block = ParameterBlock(("flags", n), ("expired", 1))
        words = block.pack({"flags": list(self._flags.addresses)[:n], "expired": own.address + EXPIRED_AT})
        self._own, self._parameters = own, self.machine.alloc(words.nbytes, "start line")
        self._parameters.write(words)
        world.barrier("start", timeout)  # all flags are 0 before the first meeting

    def align(self, stream):
        """Put the flush and the meeting on the stream."""
        if not self._needed:
            return
        from epmoe.device.gpu_driver import check, cu

        self._epoch += 1
        check(cu.cuMemsetD32Async(self._flush.address, self._epoch, FLUSH_BYTES // 4, stream.handle))
        self.machine.launch(self._kernel, 1, 128, (self._parameters.address, self._epoch, self._rank), stream=stream)

    def drain(self, stream, failed_peer):
        """Wait until all work on the stream has ended.

        failed_peer: function () -> a rank that reported its failure, or None. If there is one, raises LeftBehind at
        once, and work on the stream no longer meets any rank.
        """
        if not self._needed or not self._meets:
            self.machine.synchronize()
            return
        from epmoe.device.gpu_driver import check, cu

        self.machine.activate()
        while True:
            (code,) = cu.cuStreamQuery(stream.handle)
            if code == cu.CUresult.CUDA_SUCCESS:
                return
            if code != cu.CUresult.CUDA_ERROR_NOT_READY:
                check((code,))
            rank = failed_peer()
            if rank is not None:
                self._write_expired(self._own.address, FAILED + rank)
                raise self._left_by(rank)
            time.sleep(NAP_S)

    def give_up(self):
        """This rank failed and attends no more meetings until meet_again(). No rank waits for it, and it for none."""
        if not self._needed or not self._meets:
            return
        for address in self._flags.addresses:
            with contextlib.suppress(EPError):  # its device may be the cause of the failure
                self._write_expired(address, FAILED + self._rank)

    def _write_expired(self, flags, value):
        """Write into this rank's memory or a peer's, independently of the stream."""
        from epmoe.device.gpu_driver import check, cu

        word, copies = np.array([value], np.uint32), self.machine.copies
        self.machine.activate()
        check(cu.cuMemcpyHtoDAsync(flags + EXPIRED_AT, word.ctypes.data, word.nbytes, copies))
        check(cu.cuStreamSynchronize(copies))

    def _left_by(self, rank):
        return LeftBehind(f"rank {self._rank}: rank {rank} failed, and does not come to the start line")

    def meet_again(self, timeout=60.0):
        """After a case that failed on some rank, let all ranks count meetings from the same number on; collective."""
        self.machine.synchronize()
        self._epoch = max(self.world.tell(self._epoch, timeout)) + 1
        if self._needed:
            self._own.fill(0, EXPIRED_AT, 4)
        self.world.barrier("start", timeout)

    def check(self):
        """Raise if a rank did not come to a meeting, or failed. Waits for the kernels."""
        if self._needed:
            expired = int(self._own.read(np.uint32, (1,), EXPIRED_AT)[0])
            if expired >= FAILED:
                raise self._left_by(expired - FAILED)
            if expired:
                raise PeerTimeout(
                    f"rank {self._rank}: rank {expired - 1} did not come to the start line within {TIMEOUT_S} s"
                )
