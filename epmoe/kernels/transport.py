"""How bytes and signals reach a peer: here by plain stores into its mapped memory, and a release at system scope.

The two functions are all that a kernel knows of its peers.
"""

from typing import NamedTuple

from epmoe.device import device_fn, load_u64, st_release_sys_u64, u64
from epmoe_ref.errors import EPValueError


class Transport(NamedTuple):
    """Device functions made for one kernel.

    recv_buf(params, rank): address of that rank's recv_buf.
    signal(params, rank, index, count): writes count into word `index` of that rank's recv_count. Whatever this thread
        has written, or acquired from other threads, is visible to who acquires the word.
    """

    recv_buf: callable
    signal: callable


def make(cfg, block) -> Transport:
    """The transport inside one p2p world."""
    if cfg.use_shmem:
        raise EPValueError("use_shmem=True: these kernels reach peers by stores to mapped memory only; set it to False")
    bufs, counts = block.offset("recv_buf_ptrs"), block.offset("recv_count_ptrs")
    world_size = cfg.p2p_world_size

    @device_fn
    def recv_buf(params, rank):
        return u64(load_u64(params + u64(bufs) + u64(8) * u64(rank % world_size)))

    @device_fn
    def signal(params, rank, index, count):
        word = u64(load_u64(params + u64(counts) + u64(8) * u64(rank % world_size))) + u64(8) * u64(index)
        st_release_sys_u64(word, u64(count))

    return Transport(recv_buf, signal)
