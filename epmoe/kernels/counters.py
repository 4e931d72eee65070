"""Byte offsets of the words of ep_counters, which the kernels take as constants."""

from functools import cache
from typing import NamedTuple

from epmoe import layout
from epmoe_ref.config import EPConfig


class CounterWords(NamedTuple):
    """Byte offsets from the start of ep_counters; an entry of a region is 4 bytes, of region A 8.

    reserved, finished: per (local expert, dst_rank). a: (READY + end row, count) per (local expert, source
    rank). b: inclusive prefix sums over src_ranks within an expert. d: blocks that have finished. f: send_buf_ready.
    g: shared_expert_started. c (claimed tiles), e (ready flag) and combine_ready (one flag a reducing block) stay 0:
    these kernels do without.
    """

    reserved: int
    finished: int
    a: int
    b: int
    c: int
    d: int
    e: int
    f: int
    g: int
    combine_ready: int


@cache
def words(cfg: EPConfig) -> CounterWords:
    """The offsets for this configuration."""
    at = {r.name: r.offset for r in layout.counter_regions(cfg)}
    return CounterWords(at["reserved"], at["finished"], *(at[name] for name in "ABCDEFG"), at["combine_ready"])
