"""How bytes and signals reach a peer; only this module depends on it.

Inside a p2p world: plain stores into the peer's mapped memory, and a release at system scope. To ranks of other p2p
worlds (use_shmem): SHMEM puts out of a symmetric send_buf, and a SHMEM signal. One count signal covers the puts of many
warps, in this order. Every lane of a warp completes its puts. Then its warp, or after a barrier a thread for the whole
block, counts them in `finished`, release at device scope. The thread that finds the count complete has acquired all of
them. Its own fence at system scope carries this to the signal, which by itself orders nothing. A put that was not
completed may arrive after the signal; its source is read until then.
"""

from typing import NamedTuple

from epmoe.device import device_fn, st_relaxed_sys_u64, st_release_sys_u64, u64

from .params import in_context


class Transport(NamedTuple):
    """Device functions made for one kernel.

    recv_buf(params, rank, my_rank): address of that rank's recv_buf; for a far rank, of its own one, which names it in
        puts.
    signal(params, rank, my_rank, index, count): writes count into word `index` of that rank's recv_count. What this
        thread has written, or acquired from other threads, is visible to a thread that acquires the word; puts if done.
    tell(params, rank, index, value): writes value into word `index` of the recv_count of a rank of the same world,
        which says nothing of what else this thread has written.
    crosses: whether there are far ranks, those of other p2p worlds. The rest is used only if there are.
    is_far(rank, my_rank): whether it is one.
    put(place, staged, n_bytes, rank): a warp starts to copy n_bytes from `staged`, in symmetric memory, to the place in
        a far rank's memory; behind a syncwarp, if other lanes wrote the bytes.
    complete(): every lane, before the puts of its warp are counted as finished, and before their sources are reused.
    """

    recv_buf: callable
    signal: callable
    tell: callable
    crosses: bool
    is_far: callable
    put: callable
    complete: callable


def crosses_worlds(cfg) -> bool:
    """Whether messages leave a p2p world; kernels for which they do need SHMEM."""
    return cfg.use_shmem and cfg.n_worlds > 1 and not cfg.skip_a2a


def make(cfg, block) -> Transport:
    """The transport of a configuration, for one parameter block."""
    buf_of, counts_of = in_context(block, "recv_buf_ptrs"), in_context(block, "recv_count_ptrs")
    world_size = cfg.p2p_world_size

    @device_fn
    def recv_buf(params, rank, my_rank):
        return buf_of(params, rank % world_size)

    @device_fn
    def word_at(params, rank, index):
        """Address of a word of that rank's recv_count."""
        return counts_of(params, rank % world_size) + u64(8) * u64(index)

    @device_fn
    def tell(params, rank, index, value):
        st_relaxed_sys_u64(word_at(params, rank, index), u64(value))

    @device_fn
    def signal(params, rank, my_rank, index, count):
        st_release_sys_u64(word_at(params, rank, index), u64(count))

    if crosses_worlds(cfg):
        return _with_shmem(recv_buf, signal, tell, counts_of, world_size)
    return Transport(recv_buf, signal, tell, False, _is_never_far, _do_nothing, _do_nothing)


def _with_shmem(recv_buf_here, signal_here, tell, counts_of, world_size) -> Transport:
    from epmoe.device.shmem import shmem_fence, shmem_put_nbi_warp, shmem_quiet, shmem_signal_set

    @device_fn
    def is_far(rank, my_rank):
        return rank // world_size != my_rank // world_size

    @device_fn
    def recv_buf(params, rank, my_rank):
        if is_far(rank, my_rank):
            return recv_buf_here(params, my_rank, my_rank)
        return recv_buf_here(params, rank, my_rank)

    @device_fn
    def signal(params, rank, my_rank, index, count):
        if is_far(rank, my_rank):
            own = counts_of(params, my_rank % world_size)
            shmem_fence()               # what was acquired from other warps by `finished`, before the signal
            shmem_signal_set(own + u64(8) * u64(index), u64(count), rank)
        else:
            signal_here(params, rank, my_rank, index, count)

    @device_fn
    def put(place, staged, n_bytes, rank):
        shmem_put_nbi_warp(place, staged, n_bytes, rank)

    @device_fn
    def complete():
        shmem_quiet()

    return Transport(recv_buf, signal, tell, True, is_far, put, complete)


@device_fn
def _is_never_far(rank, my_rank):
    return False


@device_fn
def _do_nothing(*args):
    return
