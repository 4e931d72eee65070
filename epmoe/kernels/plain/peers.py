"""Writes into the memory of other ranks: rows of bytes, and signals.

In one p2p world rows are plain stores, and a signal is a store with release at system scope. Across worlds rows are
SHMEM puts, and a signal is a signal operation. A put is complete when the warp has called quiet(). The counter
`finished`, or a block barrier, tells this to the thread that signals.
"""

from types import ModuleType
from typing import NamedTuple

from epmoe.device import device_fn, st_release_sys_u64, u64

from ..formats.row_copy import copy_part
from ..pairs.peers import crosses_worlds
from .counters import namespace


class Peers(NamedTuple):
    """Addresses of the receive buffers and count words of every rank of the p2p world, and the number of this rank."""

    recv_buf_ptrs: tuple
    recv_count_ptrs: tuple
    my_rank: int


def make(cfg, row_bytes: int) -> ModuleType:
    """Namespace "to_peers" for rows of row_bytes. A warp calls write, one thread calls signal. to: Peers.

    is_near(dst_rank, my_rank): whether both are in one p2p world.
    write(to, dst_rank, offset, src, lane): copies row_bytes from src to byte `offset` of dst_rank's recv_buf. When it
        returns, the calling lane's part is complete. Across worlds src must be in symmetric memory.
    signal(to, dst_rank, index, count): stores the count in word `index` of dst_rank's recv_count, after everything that
        this thread has written, or acquired from others.
    """
    p2p_world_size, copy, everybody_is_near = cfg.p2p_world_size, copy_part(row_bytes), not crosses_worlds(cfg)

    @device_fn
    def is_near(dst_rank, my_rank):
        return everybody_is_near or dst_rank // p2p_world_size == my_rank // p2p_world_size

    @device_fn
    def write_near(to, dst_rank, offset, src, lane):
        copy(u64(to.recv_buf_ptrs[dst_rank % p2p_world_size]) + u64(offset), src, 0, 1, lane)

    @device_fn
    def signal_near(to, dst_rank, index, count):
        st_release_sys_u64(u64(to.recv_count_ptrs[dst_rank % p2p_world_size]) + u64(8) * u64(index), u64(count))

    if everybody_is_near:
        return namespace("to_peers", is_near=is_near, write=write_near, signal=signal_near)
    from epmoe.device.shmem import shmem_fence, shmem_put_nbi_warp, shmem_quiet, shmem_signal_set

    @device_fn
    def write(to, dst_rank, offset, src, lane):
        if is_near(dst_rank, to.my_rank):
            write_near(to, dst_rank, offset, src, lane)
        else:
            own = u64(to.recv_buf_ptrs[to.my_rank % p2p_world_size])        # a put takes this rank's address of it
            shmem_put_nbi_warp(own + u64(offset), src, row_bytes, dst_rank)
            shmem_quiet()

    @device_fn
    def signal(to, dst_rank, index, count):
        if is_near(dst_rank, to.my_rank):
            signal_near(to, dst_rank, index, count)
        else:
            own = u64(to.recv_count_ptrs[to.my_rank % p2p_world_size])
            shmem_fence()       # the puts of other warps, which this thread has acquired, come before the signal
            shmem_signal_set(own + u64(8) * u64(index), u64(count), dst_rank)

    return namespace("to_peers", is_near=is_near, write=write, signal=signal)
