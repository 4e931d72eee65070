"""Reaches other ranks: addresses of their memory, signals, and puts to other p2p worlds (SHMEM).

Inside a p2p world a message is plain stores into the peer's memory. A release store, the signal, orders them.

A far rank belongs to another p2p world. A warp sends it bytes from symmetric memory by a put, and a SHMEM signal. SHMEM
keeps no order between the two, so each put is completed before its warp counts the message as finished. The thread that
finds the count complete has acquired all puts. Its own fence at system scope carries this to the signal, which by
itself orders nothing.
"""

from functools import cache

from epmoe.device import device_fn, load_u64, st_relaxed_sys_u64, st_release_sys_u64, u64

from .. import stamps
from ..params import ParameterBlock, namespace, record_of
from ..prefetch import fetch_sectors, n_sectors


def parameter_block(cfg, *fields) -> ParameterBlock:
    """A kernel's words: those of every kernel of pairs, then `fields`.

    Its context: addresses of recv_buf and recv_count of each rank of the p2p world.
    """
    own = "send_buf_p", "recv_buf_p", "recv_count_p", "ep_counters", "status", "timeout_ns", "trace"
    return ParameterBlock(*((name, 1) for name in own), *fields, context=(
        ("recv_buf_ptrs", cfg.p2p_world_size), ("recv_count_ptrs", cfg.p2p_world_size)))


def beginning(build, block, tails=()):
    """Device function (params, num_tokens, my_rank) -> the record of the call; peers' addresses are prefetched."""
    record, mark, n = record_of(block, tails), stamps.make(build.trace), n_sectors(8 * block.context_words)

    @device_fn
    def begin(params, num_tokens, my_rank):
        call = record(params, num_tokens, my_rank)
        mark(call, stamps.START)
        fetch_sectors(n, call.context)
        return call

    return begin


def crosses_worlds(cfg) -> bool:
    """Whether messages leave a p2p world. Kernels then need SHMEM."""
    return cfg.use_shmem and cfg.n_worlds > 1 and not cfg.skip_a2a


@cache
def make(cfg):
    """Namespace "peers" of device functions. call: a kernel's record, of which context and my_rank are used.

    recv_buf(call, rank): address of that rank's recv_buf; for a far rank, this rank's own, which names it in puts.
    signal(call, rank, index, count): writes count into word `index` of that rank's recv_count. A thread that acquires
        the word sees what this thread has written, or acquired from other threads, and completed puts.
    write_word(call, rank, index, value): writes value into word `index` of recv_count of a near rank, without any
    order. crosses: whether there are far ranks. is_far(call, rank): whether the rank is one. For far ranks only:
    put(place, staged, n_bytes, rank): a warp copies n_bytes from `staged`, in symmetric memory, to the place in a far
        rank's memory. It returns when they are there. Needs a syncwarp before it if other lanes wrote the bytes.
    """
    world_size, crosses = cfg.p2p_world_size, crosses_worlds(cfg)
    shmem_put_nbi_warp = shmem_quiet = shmem_fence = shmem_signal_set = None
    if crosses:
        from epmoe.device.shmem import shmem_fence, shmem_put_nbi_warp, shmem_quiet, shmem_signal_set

    @device_fn
    def is_far(call, rank):
        return crosses and rank // world_size != call.my_rank // world_size

    @device_fn
    def recv_buf(call, rank):
        if is_far(call, rank):
            rank = call.my_rank
        return u64(load_u64(call.context + u64(8) * u64(rank % world_size)))

    @device_fn
    def word_at(call, rank, index):
        """Address of a word of that rank's recv_count."""
        return u64(load_u64(call.context + u64(8 * world_size) + u64(8) * u64(rank % world_size))) + u64(8) * u64(index)

    @device_fn
    def write_word(call, rank, index, value):
        st_relaxed_sys_u64(word_at(call, rank, index), u64(value))

    @device_fn
    def signal(call, rank, index, count):
        if is_far(call, rank):
            if crosses:
                own = word_at(call, call.my_rank, index)
                shmem_fence()           # what was acquired from other warps by `finished`, before the signal
                shmem_signal_set(own, u64(count), rank)
        else:
            st_release_sys_u64(word_at(call, rank, index), u64(count))

    @device_fn
    def put(place, staged, n_bytes, rank):
        if crosses:
            shmem_put_nbi_warp(place, staged, n_bytes, rank)
            shmem_quiet()

    return namespace("peers", recv_buf=recv_buf, signal=signal, write_word=write_word, crosses=crosses, is_far=is_far,
                     put=put)
