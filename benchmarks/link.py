"""The bandwidth of peer writes, with all ranks at once, by a plain copy kernel. The floor is computed from it."""

from benchmarks.clock import Clock
from epmoe import device
from epmoe.device import block_dim, block_idx, grid_dim, i32, kernel, load16_nc, load_u64, store16, thread_idx, u64
from epmoe.kernels.params import ParameterBlock

BYTES, SIMULATOR_BYTES = 64 << 20, 4096  # to each peer
THREADS, SIMULATOR_THREADS, SIMULATOR_BLOCKS = 1024, 64, 2
REPEATS = 20


def copy_kernel(n_ranks, nbytes):
    """Kernel (params, 0, my_rank): own source to every peer's memory, four vectors of 16 bytes in flight a thread."""
    block = ParameterBlock(("source", 1), ("targets", n_ranks))
    p_targets, n_vectors = block.offset("targets"), nbytes // 16

    @kernel(max_threads=THREADS)
    def copy(params, unused, my_rank):
        source, everybody = load_u64(params), i32(grid_dim() * block_dim())
        step = i32(1)
        while step < max(2, n_ranks):  # alone, a rank writes to itself
            peer = i32((my_rank + step) % n_ranks)
            target = u64(load_u64(params + u64(p_targets) + u64(8) * u64(peer)) + u64(nbytes) * u64(my_rank))
            i = i32(block_idx() * block_dim() + thread_idx())
            while i < n_vectors:
                j, k, m = i32(i + everybody), i32(i + 2 * everybody), i32(i + 3 * everybody)
                a = load16_nc(source + u64(16) * u64(i))
                b = load16_nc(source + u64(16) * u64(min(j, n_vectors - 1)))
                c = load16_nc(source + u64(16) * u64(min(k, n_vectors - 1)))
                d = load16_nc(source + u64(16) * u64(min(m, n_vectors - 1)))
                store16(target + u64(16) * u64(i), a[0], a[1], a[2], a[3])
                if j < n_vectors:
                    store16(target + u64(16) * u64(j), b[0], b[1], b[2], b[3])
                if k < n_vectors:
                    store16(target + u64(16) * u64(k), c[0], c[1], c[2], c[3])
                if m < n_vectors:
                    store16(target + u64(16) * u64(m), d[0], d[1], d[2], d[3])
                i = i32(i + 4 * everybody)
            step = i32(step + 1)

    return copy


def peer_write_gbps(world, line, timeout=60.0):
    """GB/s that one rank writes to its peers while all others do the same: slowest rank, median over repeats."""
    machine, n = world.machine, world.n_ranks
    nbytes = SIMULATOR_BYTES if device.SIM else BYTES
    copy = copy_kernel(n, nbytes)
    memory = world.allocate(nbytes * n, "link", (), timeout)
    sources, blocks = {}, {}
    for rank in world.ranks:
        sources[rank] = machine.alloc(nbytes, "link source", rank)
        words = ParameterBlock(("source", 1), ("targets", n)).pack(
            {"source": sources[rank].address, "targets": list(memory.addresses)}
        )
        blocks[rank] = machine.alloc(words.nbytes, "link parameters", rank)
        blocks[rank].write(words)
    stream = world.stream_of(world.ranks[0])
    clock = Clock(machine, stream)
    grid, threads = (SIMULATOR_BLOCKS, SIMULATOR_THREADS) if device.SIM else (machine.n_sms, THREADS)
    world.barrier("start", timeout)
    for _ in range(2 if device.SIM else REPEATS):
        line.align(stream)
        clock.start()
        for rank in world.ranks:
            machine.launch(copy, grid, threads, (blocks[rank].address, 0, rank), stream=world.stream_of(rank))
        clock.stop()
    times = clock.times_us()
    of_ranks = world.tell(times, timeout)
    slowest = sorted(max(t) for t in zip(*of_ranks))[len(times) // 2]
    memory.free(True, timeout)
    for buffer in (*sources.values(), *blocks.values()):
        buffer.free()
    # virtual ranks on one device write one after another, in all len(ranks) times the bytes
    return nbytes * max(1, n - 1) * len(world.ranks) / slowest / 1e3
