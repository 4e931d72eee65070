"""The required counters after dispatch and after combine, from the protocol."""

import numpy as np

READY = 1024
MAX_FINITE = 2**64 - 1


def region_a(world, received):
    """The words of region A that combine_async reads: (READY + end row, count) of each (local expert, src_rank)."""
    words = [0] * (2 * world.n_experts)
    first_group = 1 if world.fused_shared_expert else 0
    for local_expert, counts in enumerate(received.recv_count):
        end = received.row_offsets[first_group + local_expert]
        for src, count in enumerate(counts):
            end += count
            i = local_expert * len(counts) + src
            words[2 * i], words[2 * i + 1] = READY + end, count
    return words


def counter_words(world, rank, ep):
    """A rank's counters as one array, each region at its offset from the EPLocalSyncCounters page."""
    n = world.n_experts
    start = 2 * n + 8
    offsets = {
        "reserved": 0,
        "finished": n,
        "rank_completion": 2 * n,
        "A": start,
        "B": start + 2 * n,
        "C": start + 3 * n,
        "D": start + 4 * n,
        "E": start + 4 * n + 1,
        "F": start + 4 * n + 2,
        "G": start + 4 * n + 3,
        "combine_ready": start + 4 * n + 4,
    }
    words = np.zeros(8 * n + 12, np.int64)
    for name, offset in offsets.items():
        region = np.asarray(ep.region(name, rank)).ravel()
        words[offset : offset + len(region)] = region
    return words


def after_dispatch(world, rank, received, ep):
    """reserved, finished, rank completion, D, E, F, G are 0; A holds the words for combine_async; no signal is left."""
    n = world.n_experts
    words = counter_words(world, rank, ep)
    wanted = [
        ("reserved, finished, rank completion", 0, [0] * (2 * n + 8)),
        ("region A", 2 * n + 8, region_a(world, received)),
        ("regions D to G", 2 * n + 8 + 4 * n, [0] * 4),
    ]
    return _first(rank, "dispatch_wait", words, wanted) or _signals(rank, ep, "dispatch_recv_count")


def after_combine(world, rank, ep):
    """All counters but the scratch regions B and C are 0; no signal is left."""
    n = world.n_experts
    words = counter_words(world, rank, ep)
    wanted = [
        ("reserved, finished, rank completion, A", 0, [0] * (2 * n + 8 + 2 * n)),
        ("regions D to G, combine_wait", 2 * n + 8 + 4 * n, [0] * (4 + 2 * n)),
    ]
    return (
        _first(rank, "combine_wait", words, wanted)
        or _signals(rank, ep, "combine_recv_count")
        or _signals(rank, ep, "dispatch_recv_count")
    )


def _first(rank, kernel, words, wanted):
    for name, start, values in wanted:
        for i, value in enumerate(values):
            if words[start + i] != value:
                return f"rank {rank}, after {kernel}: word {i} of {name} is {words[start + i]}, expected {value}"
    return None


def _signals(rank, ep, name):
    left = np.asarray(ep.region(name, rank))
    if (left != np.uint64(MAX_FINITE)).any():
        at = tuple(int(i) for i in np.argwhere(left != np.uint64(MAX_FINITE))[0])
        return f"rank {rank}: {name}{list(at)} is {left[at]} after its wait, expected MAX_FINITE"
    return None
