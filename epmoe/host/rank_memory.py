"""One rank's memory: its regions and its peers' addresses, the pool of its results, and the bytes of each buffer."""

from functools import lru_cache
from typing import NamedTuple

import ml_dtypes
import numpy as np

from epmoe import layout
from epmoe.host.inputs import BF16, COMBINE_DTYPE
from epmoe.host.memory_pool import Arrangement, MemoryPool
from epmoe.kernels import formats, plain
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

SCALE_GROUP = 128  # elements of blockwise FP8 that share a scale


def dispatch_arrays(cfg: EPConfig):
    """({name: (shape, dtype)} of a Dispatched's arrays at capacity, capacity in rows)."""
    fmt = formats.of(cfg)
    rows = -(-plain.capacity(cfg) // fmt.pad_rows) * fmt.pad_rows
    return fmt.outputs(cfg, rows) | {
        "row_offsets": ((cfg.n_groups + 1,), np.uint32),
        "expert_ids": ((cfg.n_groups,), np.int32),
        "src_info": ((rows, 2), np.int32),
        "recv_count": ((cfg.n_local_experts, cfg.n_src_ranks), np.int32),
        "topk_ids": ((cfg.max_tokens_per_rank, cfg.top_k), np.int32),
    }, rows


def combine_arrays(cfg: EPConfig, reduced):
    """{name: (shape, dtype)} of a combine result at capacity. reduced: a row for each token; else for each pair."""
    rows = (cfg.max_tokens_per_rank,) if reduced else (cfg.max_tokens_per_rank, cfg.top_k)
    return {"output_tokens": ((*rows, cfg.hidden), COMBINE_DTYPE[cfg.combine_dtype])}


def results(cfg: EPConfig):
    """Arrangements for results of dispatch, of combine with router weights, and of combine without."""
    return [
        Arrangement("dispatch result", dispatch_arrays(cfg)[0], is_exact=True),
        Arrangement("combine result", combine_arrays(cfg, True), is_exact=True),
        Arrangement("unreduced combine result", combine_arrays(cfg, False), is_exact=True),
    ]


@lru_cache(256)
def silu_result(rows, width, output_format):
    """The Arrangement for a result of fused_silu."""
    is_bf16 = output_format == "bf16"
    arrays = {"output_tokens": ((rows, width), BF16 if is_bf16 else ml_dtypes.float8_e4m3fn)}
    if not is_bf16:
        arrays["output_scales"] = (width // SCALE_GROUP, rows), np.float32
    return Arrangement("SwiGLU result", arrays)


class RankMemory:
    """One rank of this process: its regions, its peers' addresses and its pool of results."""

    def __init__(self, cfg: EPConfig, machine, rank, memory):
        self.cfg, self.rank = cfg, rank
        self._buffer = memory.buffers[rank]
        self._addresses = memory.addresses
        self._regions = {r.name: r for r in layout.regions(cfg)}
        self._words = {name: words for name, *words, _ in layout.named_words(cfg)}
        self.dispatch_result, self.reduced_result, self.unreduced_result = results(cfg)
        self.arena = MemoryPool(machine, rank)
        first = cfg.world(rank) * cfg.p2p_world_size
        self._world = range(first, first + cfg.p2p_world_size)

    def address(self, name):
        """Address of one of this rank's regions; 0 if the configuration does not have it."""
        return self._buffer.address + self._regions[name].offset if name in self._regions else 0

    def peers(self, name):
        """Addresses of that region on every rank of this rank's p2p world."""
        return [self._addresses[peer] + self._regions[name].offset for peer in self._world]

    def regions(self, kind, buf="recv_buf"):
        """Memory arguments of kernels of `kind`, dispatch or combine: {name: address, or addresses on all peers}."""
        buf, count = f"{kind}_{buf}", f"{kind}_recv_count"
        return dict(
            send_buf_p=self.address(f"{kind}_send_buf"),
            recv_buf_ptrs=self.peers(buf),
            recv_count_ptrs=self.peers(count),
            recv_buf_p=self.address(buf),
            recv_count_p=self.address(count),
            ep_counters=self.address("ep_counters"),
            status=self.address("status"),
        )

    def read(self, name):
        """A copy of a region, or of a counter region (reserved, finished, A, ...); waits for the kernels."""
        if not isinstance(name, str) or name not in self._words:
            raise EPValueError(f"there is no region {name!r}; there are {', '.join(self._words)}")
        offset, shape, dtype = self._words[name]
        return self._buffer.read(dtype, shape, offset)

    def initialise(self):
        """Write every region's initial value, as before the first round."""
        for r in self._regions.values():
            if r.initial is not None:
                self.clear(r.name)

    def clear(self, name):
        """Write a region's initial value."""
        r = self._regions[name]
        self._buffer.write(np.full(r.shape, r.initial, r.dtype), r.offset)


class Use(NamedTuple):
    """One buffer of a rank: bytes planned by the configuration, and bytes allocated now."""

    buffer: str
    planned_bytes: int
    allocated_bytes: int


class MemoryTable(list):
    """Rows of `Use`; prints as a table, without a column of allocated bytes if there are none.

    The plan counts each kind of result once; holding more results takes more.
    """

    planned_bytes = property(lambda self: sum(row.planned_bytes for row in self), doc="Sum of the planned bytes.")
    allocated_bytes = property(lambda self: sum(row.allocated_bytes for row in self), doc="Sum of the allocated bytes.")

    def __str__(self):
        rows = [*self, Use("total", self.planned_bytes, self.allocated_bytes)]
        lines = [f"{'bytes of one rank':26}{'planned':>16}{'allocated':>16}"]
        lines += [f"{b:26}{planned:>16,}{now:>16,}" for b, planned, now in rows]
        return "\n".join(lines if self.allocated_bytes else [line[:42] for line in lines])


def plan(cfg: EPConfig, allocated=None) -> MemoryTable:
    """Memory of one rank of this configuration; allocates nothing.

    allocated: {buffer: bytes} that a rank has allocated now besides its regions; None: there is no rank yet.
    """
    planned = {r.name: r.nbytes for r in layout.regions(cfg)}
    planned["alignment of regions"] = layout.total_bytes(cfg) - sum(planned.values())
    has = {} if allocated is None else planned | allocated
    planned |= {result.name: result.nbytes for result in results(cfg)}
    return MemoryTable(Use(name, planned.get(name, 0), has.get(name, 0)) for name in planned | has)
