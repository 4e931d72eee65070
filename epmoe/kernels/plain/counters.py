"""The words of ep_counters, by the name of their region: functions from ep_counters and an index to an address.

ep_counters is the address of the counters' first word. A segment is one (local_expert, rank): dst_rank in
reserved and finished, src_rank in A and B. Its index is local_expert * n_ranks + rank; under skip_a2a, local_expert.

The last block of dispatch_wait zeroes reserved, finished, rank_completion, D, E, F and G. combine_async zeroes A. Each
block of combine_wait zeroes its combine_ready. B and C are left; the next dispatch_wait writes them before it reads.
"""

from types import ModuleType

from epmoe import layout
from epmoe.device import device_fn, i32, u64

from ..params import namespace

READY = 1024    # of region A: a written end row differs from an unwritten one; also the value of raised flags


def words(cfg) -> ModuleType:
    """Addresses of counters: namespace of device functions (ep_counters, i), and `segment`.

    reserved, finished, b: by segment. a_end, a_count: the two words of region A, by segment. c: by local_expert.
    rank_completion: by place in the p2p world; signals sent there, read by no plain kernel. d, e, f, g: i is 0.
    combine_ready: by block. n_async: words of the dispatch_async region, which begins with reserved.
    """
    at = {r.name: r.offset for r in layout.counter_regions(cfg)}
    ranks, single = cfg.n_src_ranks, cfg.skip_a2a

    @device_fn
    def segment(local_expert, rank):
        index = i32(local_expert)
        if not single:
            index = i32(local_expert * ranks + rank)
        return index

    return namespace(
        "words", segment=segment, reserved=_word(at["reserved"]), finished=_word(at["finished"]),
        rank_completion=_word(at["rank_completion"]), a_end=_word(at["A"], 8), a_count=_word(at["A"] + 4, 8),
        b=_word(at["B"]), c=_word(at["C"]), d=_word(at["D"]), e=_word(at["E"]), f=_word(at["F"]), g=_word(at["G"]),
        combine_ready=_word(at["combine_ready"]), n_async=at["A"] // 4)


def _word(offset: int, step: int = 4):
    return device_fn(lambda ep_counters, i: u64(ep_counters) + u64(offset + step * i))
