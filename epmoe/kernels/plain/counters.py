"""Addresses of the words of ep_counters: for each region a device function of ep_counters and an index.

ep_counters is the address of the first counter. A segment is one (local_expert, rank), with dst_rank in reserved and
finished, and src_rank in A and B. Its index is local_expert * n_ranks + rank; under skip_a2a, local_expert.

The last block of dispatch_wait zeroes reserved, finished, rank_completion, D, E, F and G. combine_async zeroes A. Each
block of combine_wait zeroes its combine_ready. Nothing zeroes B and C: the next dispatch_wait writes them first.
"""

from types import ModuleType

from epmoe import layout
from epmoe.device import device_fn, i32, u64

from ..params import namespace


def words(cfg) -> ModuleType:
    """Namespace of device functions (ep_counters, i) -> address of a counter, and segment(local_expert, rank) -> index.

    In reserved, finished, b, and the words a_end (READY + end row) and a_count of region A, i is the index of a
    segment; in c a local_expert; in combine_ready a block; in d, e, f, g it is 0. rank_completion counts the signals
    sent to place i of the p2p world; no plain kernel reads it. n_async: words of the dispatch_async region, which
    begins with reserved.
    """
    at = {r.name: r.offset for r in layout.counter_regions(cfg)}
    ranks, skip_a2a = cfg.n_src_ranks, cfg.skip_a2a

    @device_fn
    def segment(local_expert, rank):
        index = i32(local_expert)
        if not skip_a2a:
            index = i32(local_expert * ranks + rank)
        return index

    return namespace(
        "words", segment=segment, reserved=_word(at["reserved"]), finished=_word(at["finished"]),
        rank_completion=_word(at["rank_completion"]), a_end=_word(at["A"], 8), a_count=_word(at["A"] + 4, 8),
        b=_word(at["B"]), c=_word(at["C"]), d=_word(at["D"]), e=_word(at["E"]), f=_word(at["F"]), g=_word(at["G"]),
        combine_ready=_word(at["combine_ready"]), n_async=at["A"] // 4)


def _word(offset: int, step: int = 4):
    return device_fn(lambda ep_counters, i: u64(ep_counters) + u64(offset + step * i))
