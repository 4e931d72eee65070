"""Ranks begin a phase together, with a cold L2: a buffer is written, and all ranks meet on the device.

The meeting kernel meets twice. At the first meeting all hosts have put this iteration on their streams; then it waits
HOLD_US, in which they put the phase itself behind it; the second meeting lets all ranks go within a flag's flight,
about a microsecond. So neither a host that is late nor its launch is counted as the phase's time.
"""

import numpy as np
from epmoe import device
from epmoe.device import (globaltimer, i32, kernel, ld_acquire_sys_u32, ld_relaxed_sys_u32, load_u64, nanosleep,
                          st_release_sys_u32, store_u32, syncthreads, thread_idx, u32, u64)
from epmoe.kernels.params import ParameterBlock
from epmoe_ref.errors import PeerTimeout

FLUSH_BYTES = 256 << 20
HOLD_US = 300
TIMEOUT_S = 20


def meeting_kernel(n_ranks, my_hold_us):
    """Kernel (params, epoch, my_rank), a thread a rank: params = addresses of all ranks' flags, then of `expired`."""
    block = ParameterBlock(("flags", n_ranks), ("expired", 1))
    p_expired, timeout_ns, hold_ns = block.offset("expired"), TIMEOUT_S * 10**9, my_hold_us * 1000

    @device.device_fn
    def meet(params, epoch, my_rank):
        rank = i32(thread_idx())
        if rank < n_ranks:
            st_release_sys_u32(load_u64(params + u64(8) * u64(rank)) + u64(4) * u64(my_rank), u32(epoch))
            mine = load_u64(params + u64(8) * u64(my_rank)) + u64(4) * u64(rank)
            begin = globaltimer()
            while i32(u32(ld_relaxed_sys_u32(mine) - u32(epoch))) < 0:
                if globaltimer() - begin > u64(timeout_ns):
                    store_u32(load_u64(params + u64(p_expired)), u32(rank + 1))
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
    """Where the ranks of a world begin together. On virtual ranks and in the simulator there is nothing to meet."""

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
        words = block.pack({"flags": list(self._flags.addresses)[:n], "expired": own.address + 2048})
        self._own, self._parameters = own, self.machine.alloc(words.nbytes, "start line")
        self._parameters.write(words)
        world.barrier("start", timeout)         # all flags are 0 before the first meeting

    def align(self, stream):
        """Put the flush and the meeting on the stream."""
        if not self._needed:
            return
        from cuda.bindings import driver as cu

        from epmoe.device.gpu_driver import check

        self._epoch += 1
        check(cu.cuMemsetD32Async(self._flush.address, self._epoch, FLUSH_BYTES // 4, stream.handle))
        self.machine.launch(self._kernel, 1, 128, (self._parameters.address, self._epoch, self._rank), stream=stream)

    def meet_again(self, timeout=60.0):
        """After a case that failed on some rank: all ranks count their meetings from the same number on; collective."""
        self.machine.synchronize()
        self._epoch = max(self.world.tell(self._epoch, timeout)) + 1
        if self._needed:
            self._own.fill(0, 2048, 4)
        self.world.barrier("start", timeout)

    def check(self):
        """Raise if a rank did not come to a meeting; waits for the kernels."""
        if self._needed:
            expired = int(self._own.read(np.uint32, (1,), 2048)[0])
            if expired:
                raise PeerTimeout(f"rank {self._rank}: rank {expired - 1} did not come to the start line within "
                                  f"{TIMEOUT_S} s")
