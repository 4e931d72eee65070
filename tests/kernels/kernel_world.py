"""Small worlds for the kernels alone: buffers of every rank by the layout, launches of all ranks, nothing else.

Arguments and results are lists over ranks. A result of dispatch is the reference's Dispatched, with exact rows.
"""

import numpy as np

from epmoe import device, kernels, layout
from epmoe.host.arrays import Array
from epmoe.kernels import ArrayArg, LaunchConfig, ScalarArg, Wanted, formats, lamport, status
from epmoe.kernels.pairs.tuning import Tuning
from epmoe.kernels.params import float32_word
from epmoe.kernels.plain.arguments import DTYPES, capacity
from epmoe_ref.dispatched import Dispatched

SMALL = LaunchConfig(n_sms=3, num_threads=64)
POISON = 0xFF  # NaN in every format, -1 in every integer


def part_of(buffer, dtype, shape, offset=0):
    """Part of a Buffer as an array that kernels take."""
    if device.SIM:
        return buffer.array(dtype, shape, offset)
    return Array(None, buffer.address + offset, shape, np.dtype(dtype), None, None, buffer)


class World:
    """The ranks' memory on one machine. A subclass launches: launch_dispatch and launch_combine of a rank.

    is_reduced: whether combine sums up, and does not return the rows of each k. `fused` picks the fused kernels.
    """

    def __init__(self, cfg, fused, timeout_s, is_reduced, machine_options):
        self.cfg, self.fused, self.timeout_s, self.is_reduced = cfg, fused, timeout_s, is_reduced
        self.capacity = capacity(cfg)
        self.machine = device.machine(cfg.n_ranks, **machine_options)
        self.streams = [self.machine.stream(r) for r in range(cfg.n_ranks)]
        self.base = [
            self.machine.alloc(layout.total_bytes(cfg), "base", rank=r, regions=layout.named_words(cfg))
            for r in range(cfg.n_ranks)
        ]
        for base in self.base:
            base.fill(POISON)
        self.put_back()
        self.buffers = {}

    def put_back(self):
        """Give every word that the layout gives an initial value that value."""
        for base in self.base:
            for region in layout.regions(self.cfg):
                if region.initial is not None:
                    base.write(np.full(region.shape, region.initial, region.dtype), region.offset)

    def at(self, rank, name):
        """Address of a region of a rank."""
        return self.base[rank].address + layout.region(self.cfg, name).offset

    def peers(self, rank, name):
        """Addresses of a region on all ranks of the p2p world of `rank`."""
        first = rank // self.cfg.p2p_world_size * self.cfg.p2p_world_size
        return [self.at(first + i, name) for i in range(self.cfg.p2p_world_size)]

    def read(self, rank, name):
        """A copy of a region, or of one inside ep_counters."""
        for region in layout.regions(self.cfg):
            if region.name == name:
                return self.base[rank].read(region.dtype, region.shape, region.offset)
        region = next(c for c in layout.counter_regions(self.cfg) if c.name == name)
        start = layout.region(self.cfg, "ep_counters").offset + region.offset
        return self.base[rank].read(region.dtype, region.shape, start)

    def array(self, name, rank, dtype, shape, values=None):
        """An array in device memory, with the values or poison; the same buffer each time where it is large enough."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffer = self.buffers.get((name, rank))
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self.buffers[name, rank] = self.machine.alloc(max(nbytes, 16), name, rank=rank)
        buffer.fill(POISON)
        if values is not None and nbytes:
            buffer.write(np.ascontiguousarray(values, dtype))
        return part_of(buffer, dtype, shape)

    def results(self, rank):
        """{name: array} that a dispatch writes to: the format's, then what every format has."""
        cfg = self.cfg
        arrays = {
            **formats.of(cfg).outputs(cfg, self.capacity),
            "row_offsets": ((cfg.n_groups + 1,), np.uint32),
            "expert_ids": ((cfg.n_groups,), np.int32),
            "src_info": ((self.capacity, 2), np.int32),
            "recv_counts": ((cfg.n_local_experts, cfg.n_src_ranks), np.int32),
        }
        return {name: self.array(name, rank, dtype, shape) for name, (shape, dtype) in arrays.items()}

    def clean_ids(self, rank):
        """The address where a dispatch writes the ids that it used."""
        self.array("clean_topk_ids", rank, np.int32, (self.cfg.max_tokens_per_rank, self.cfg.top_k))
        return self.buffers["clean_topk_ids", rank].address

    def dispatch(self, tokens, topk_ids, *, input_scale=1.0, ranks=None):
        """Dispatch on all ranks (or those given) at once: a Dispatched of each, None of others."""
        ranks = range(self.cfg.n_ranks) if ranks is None else ranks
        with self.machine.hold():
            for rank in ranks:
                self.launch_dispatch(rank, tokens[rank], np.asarray(topk_ids[rank]), input_scale)
        return [self.dispatched(rank, len(tokens[rank])) if rank in ranks else None for rank in range(self.cfg.n_ranks)]

    def dispatched(self, rank, num_tokens):
        """What a dispatch of a rank has left; nothing behind the last row was written."""
        cfg = self.cfg
        outputs = formats.of(cfg).outputs(cfg, self.capacity)

        def read(name, dtype, shape):
            return self.buffers[name, rank].read(np.dtype(dtype), shape)

        offsets = read("row_offsets", np.uint32, (cfg.n_groups + 1,))
        rows, made = int(offsets[-1]), {name: read(name, dtype, shape) for name, (shape, dtype) in outputs.items()}
        made["src_info"] = read("src_info", np.int32, (self.capacity, 2))
        for name in ("output_tokens", "src_info"):
            assert (made[name][rows:].view(np.uint8) == POISON).all(), f"{name} of rank {rank} behind the last row"
        return Dispatched(
            output_tokens=made["output_tokens"][:rows],
            output_scales=made.get("output_scales"),
            scales_offset=made.get("scales_offset"),
            row_offsets=offsets,
            expert_ids=read("expert_ids", np.int32, (cfg.n_groups,)),
            src_info=made["src_info"][:rows],
            recv_count=read("recv_counts", np.int32, (cfg.n_local_experts, cfg.n_src_ranks)),
            topk_ids=read("clean_topk_ids", np.int32, (num_tokens, cfg.top_k)),
            num_tokens=num_tokens,
        )

    def combine(self, rows, dispatched, weights_args=None, epilogue_args=None, *, ranks=None):
        """Combine on all ranks (or those given) at once: rows of expert outputs [rows, hidden] -> output tokens.

        weights_args: lists over ranks of tuples; of arrays [num_tokens, top_k] where weights are no function.
        """
        ranks = range(self.cfg.n_ranks) if ranks is None else ranks
        dtype, none = DTYPES[self.cfg.combine_dtype], [()] * self.cfg.n_ranks
        weights_args, epilogue_args = weights_args or none, epilogue_args or none
        with self.machine.hold():
            for rank in ranks:
                y = self.array("expert_outputs", rank, dtype, rows[rank].shape, rows[rank])
                out = self.array("combined", rank, dtype, self.out_shape(dispatched[rank].num_tokens))
                self.launch_combine(rank, y, out, weights_args[rank], epilogue_args[rank])
        return [
            self.buffers["combined", rank].read(dtype, self.out_shape(dispatched[rank].num_tokens))
            if rank in ranks
            else None
            for rank in range(self.cfg.n_ranks)
        ]

    def out_shape(self, num_tokens):
        cfg = self.cfg
        return (num_tokens, cfg.hidden) if self.is_reduced else (num_tokens, cfg.top_k, cfg.hidden)

    def raise_if_failed(self, rank):
        """PeerTimeout if a wait of that rank expired."""
        words = self.read(rank, "status")
        name = status.failed_recv_count(words)
        status.raise_if_failed(words, self.cfg, rank, self.timeout_s, self.read(rank, name) if name else None)


class FastWorld(World):
    """With the fast kernels.

    Compile-time options go to the factories: router_weights, epilogue, without_signals; tuning: changes to the tuning
    numbers. ids_dtype: of topk_ids in device memory.
    """

    def __init__(
        self,
        cfg,
        *,
        fused=False,
        launch=SMALL,
        timeout_s=30.0,
        router_weights="array",
        epilogue=None,
        without_signals=False,
        ids_dtype=np.int32,
        tuning=None,
        **machine_options,
    ):
        super().__init__(cfg, fused, timeout_s, router_weights is not None, machine_options)
        self.ids_dtype, self.has_array = np.dtype(ids_dtype), router_weights == "array"
        tuned = dict(tuning=Tuning(**(tuning or {})))
        sending = dict(id_bytes=self.ids_dtype.itemsize, **tuned)
        reducing = dict(router_weights=router_weights, epilogue=epilogue, **tuned)
        self.calls = dict(
            dispatch_async=kernels.dispatch_async_kernel(cfg, launch, **sending),
            dispatch_wait=kernels.dispatch_wait_kernel(cfg, launch, **tuned),
            dispatch=kernels.dispatch_kernel(cfg, launch, **sending),
            combine_async=kernels.combine_async_kernel(cfg, launch, **tuned),
            combine_wait=kernels.combine_wait_kernel(cfg, launch, **reducing),
            combine=kernels.combine_kernel(cfg, launch, without_signals=without_signals, **reducing),
        )
        self.returned_to = lamport.recv_buf_name(cfg, without_signals, router_weights)

    def put(self, name, rank, values):
        """An array in device memory; its address."""
        self.array(name, rank, values.dtype, values.shape, values)
        return self.buffers[name, rank].address

    def launch_dispatch(self, rank, tokens, topk_ids, input_scale):
        arrays = self.results(rank)
        n_outputs = len(arrays) - 4
        addresses = [self.buffers[name, rank].address for name in arrays]
        words = [
            self.put("input_tokens", rank, tokens),
            self.put("topk_ids", rank, topk_ids.astype(self.ids_dtype)),
            self.clean_ids(rank),
            float32_word(input_scale),
            *addresses[:n_outputs],
            self.capacity,
            *addresses[n_outputs:],
        ]
        self.start("dispatch", rank, len(tokens), "dispatch_recv_buf", words)

    def start(self, phase, rank, num_tokens, recv_buf, words, **types):
        """Launch the kernels of a phase; each reads those of the words that it needs."""
        regions = dict(
            send_buf_p=self.at(rank, "dispatch_send_buf") if phase == "dispatch" else 0,
            recv_buf_ptrs=self.peers(rank, recv_buf),
            recv_count_ptrs=self.peers(rank, f"{phase}_recv_count"),
            recv_buf_p=self.at(rank, recv_buf),
            recv_count_p=self.at(rank, f"{phase}_recv_count"),
            ep_counters=self.at(rank, "ep_counters"),
            status=self.at(rank, "status"),
        )
        wanted = Wanted(num_tokens, rank, self.machine, self.streams[rank], regions, self.timeout_s, **types)
        for name in (phase,) if self.fused else (f"{phase}_async", f"{phase}_wait"):
            of_functions = 6 if name == "combine_async" else None  # it has none
            self.calls[name].prepared(wanted).start(*words[:of_functions])

    def launch_combine(self, rank, y, out, weights_args, epilogue_args):
        array = self.put("weights", rank, weights_args[0]) if self.has_array else 0
        weights = self.user_args("weights_arg", rank, () if self.has_array else weights_args)
        epilogue = self.user_args("epilogue_arg", rank, epilogue_args)
        words = [
            *(self.buffers[name, rank].address for name in ("expert_outputs", "src_info")),
            0,
            self.buffers["combined", rank].address,
            self.buffers["clean_topk_ids", rank].address,
            array,
            *(word for arg in (*weights, *epilogue) for word in arg.words()),
        ]
        types = dict(weights_types=tuple(a.type for a in weights), epilogue_types=tuple(a.type for a in epilogue))
        self.start("combine", rank, out.shape[0], self.returned_to, words, **types)

    def user_args(self, name, rank, values):
        """Numbers and arrays as the kernels take them."""
        return [
            ArrayArg(self.put(f"{name} {i}", rank, value), value.shape, value.dtype.name)
            if np.ndim(value)
            else ScalarArg(value, "int32" if isinstance(value, int) else "float32")
            for i, value in enumerate(values)
        ]
