"""One rank's side of the memory: addresses of its regions and of its peers', and the pools its results come from."""

from functools import cached_property

import ml_dtypes
import numpy as np

from epmoe import layout
from epmoe.host.dispatched import capacity_rows
from epmoe.host.inputs import BF16, COMBINE_DTYPE
from epmoe.host.lending import Arena, Arrangement, arrange
from epmoe.kernels import formats
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

SCALE_GROUP = 128  # elements of blockwise FP8 that share a scale


def dispatch_arrays(cfg: EPConfig):
    """Arrays of a Dispatched with capacity: {name: (shape, dtype)}, and the capacity in rows."""
    fmt = formats.of(cfg)
    rows = capacity_rows(cfg, fmt.pad_rows)
    arrays = dict(fmt.outputs(cfg, rows))
    arrays |= {
        "row_offsets": ((cfg.n_groups + 1,), np.uint32),
        "expert_ids": ((cfg.n_groups,), np.int32),
        "src_info": ((rows, 2), np.int32),
        "recv_count": ((cfg.n_local_experts, cfg.n_src_ranks), np.int32),
        "topk_ids": ((cfg.max_tokens_per_rank, cfg.top_k), np.int32),
    }
    return arrays, rows


def combine_shape(cfg: EPConfig, num_tokens, reduced):
    """Shape of a rank's combined output: with router weights one row a token, without one row a slot."""
    return (num_tokens, cfg.hidden) if reduced else (num_tokens, cfg.top_k, cfg.hidden)


def combine_arrays(cfg: EPConfig, reduced):
    """Array of a combine result with capacity: {name: (shape, dtype)}."""
    return {
        "output_tokens": (
            combine_shape(cfg, cfg.max_tokens_per_rank, reduced),
            COMBINE_DTYPE[cfg.combine_dtype],
        )
    }


def silu_arrays(rows, width, output_format):
    """Arrays of a SwiGLU result: {name: (shape, dtype)}."""
    if output_format == "bf16":
        return {"output_tokens": ((rows, width), BF16)}
    return {
        "output_tokens": ((rows, width), np.dtype(ml_dtypes.float8_e4m3fn)),
        "output_scales": ((width // SCALE_GROUP, rows), np.dtype(np.float32)),
    }


class RankMemory:
    """Regions, peers and result pools of one rank of this process."""

    def __init__(self, cfg: EPConfig, machine, rank, memory):
        self.cfg, self.machine, self.rank = cfg, machine, rank
        self._buffer = memory.buffers[rank]
        self._addresses = memory.addresses
        self._regions = {r.name: r for r in layout.regions(cfg)}
        self._words = {
            name: (offset, shape, dtype)
            for name, offset, shape, dtype, _ in layout.named_words(cfg)
        }
        self._silu_results = {}
        self.arena = Arena(machine, rank)
        first = cfg.world(rank) * cfg.p2p_world_size
        self._world = range(first, first + cfg.p2p_world_size)

    def address(self, name):
        """Address of one of this rank's regions; 0 if the configuration has no such region."""
        return self._buffer.address + self._regions[name].offset if name in self._regions else 0

    def peers(self, name):
        """Addresses of that region at every rank of this rank's p2p world."""
        return [self._addresses[peer] + self._regions[name].offset for peer in self._world]

    @cached_property
    def dispatch_regions(self):
        """What the kernels of dispatch know of memory: {name: address, or addresses of all peers}."""
        return self._regions_of("dispatch_recv_buf", "dispatch_recv_count", "dispatch_send_buf")

    @cached_property
    def combine_regions(self):
        """The same of combine."""
        return self._regions_of("combine_recv_buf", "combine_recv_count", "combine_send_buf")

    @cached_property
    def lamport_regions(self):
        """The same of a combine whose rows are polled themselves."""
        return self._regions_of("combine_lamport_buf", "combine_recv_count", "combine_send_buf")

    def _regions_of(self, buf, count, send_buf):
        return dict(
            send_buf_p=self.address(send_buf),
            recv_buf_ptrs=self.peers(buf),
            recv_count_ptrs=self.peers(count),
            recv_buf_p=self.address(buf),
            recv_count_p=self.address(count),
            ep_counters=self.address("ep_counters"),
            status=self.address("status"),
        )

    def read(self, name):
        """A copy of a region, or of a counter region (reserved, finished, A, ...); waits for the kernels."""
        if name not in self._words:
            raise EPValueError(f"there is no region {name!r}; there are {', '.join(self._words)}")
        offset, shape, dtype = self._words[name]
        return self._buffer.read(dtype, shape, offset)

    def initialise(self):
        """Write every region's initial value, as before the first round."""
        for r in self._regions.values():
            if r.initial is not None:
                self._buffer.write(np.full(r.shape, r.initial, r.dtype), r.offset)

    def clear(self, name):
        """Write a region's initial value."""
        r = self._regions[name]
        self._buffer.write(np.full(r.shape, r.initial, r.dtype), r.offset)

    @cached_property
    def dispatch_result(self):
        """What dispatch returns, for `lend`."""
        return Arrangement("dispatch result", dispatch_arrays(self.cfg)[0], is_exact=True)

    @cached_property
    def reduced_result(self):
        """What combine returns with router weights."""
        return Arrangement("combine result", combine_arrays(self.cfg, True), is_exact=True)

    @cached_property
    def unreduced_result(self):
        """What combine returns without router weights."""
        name = "unreduced combine result"
        return Arrangement(name, combine_arrays(self.cfg, False), is_exact=True)

    def silu_result(self, rows, width, output_format):
        """What fused_silu returns for so many rows."""
        key = rows, width, output_format
        if key not in self._silu_results:
            self._silu_results[key] = Arrangement("SwiGLU result", silu_arrays(*key))
        return self._silu_results[key]


def result_bytes(cfg: EPConfig):
    """Bytes of one result of each kind: {name: bytes}."""
    return {
        "dispatch result": arrange(dispatch_arrays(cfg)[0])[1],
        "combine result": arrange(combine_arrays(cfg, True))[1],
        "unreduced combine result": arrange(combine_arrays(cfg, False))[1],
    }
