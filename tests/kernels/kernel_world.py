"""A small world for the kernels alone: buffers of every rank by the layout, launches of all ranks, nothing else.

Arguments and results are lists over ranks. Each result array has guard rows behind it, so that a row too many is seen.
"""

import ml_dtypes
import numpy as np

from epmoe import device, kernels, layout
from epmoe.kernels import ArrayArg, LaunchConfig, ScalarArg, Wanted, formats, lamport, status
from epmoe.kernels.pairs.tuning import Tuning
from epmoe.kernels.params import float32_word
from epmoe_ref.config import EPConfig

COMBINE = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
SMALL = LaunchConfig(n_sms=3, num_threads=64)
POISON = 0xFF  # NaN in every format, -1 in every integer


class KernelWorld:
    """The ranks' memory on one machine, and the six kernels with the options given.

    Compile-time options go to the factories: input_scale, router_weights, epilogue, without_signals; tuning: changes
    to the fast kernels' tuning numbers. `fused` picks the fused kernels. id_bytes: 8 for ids as int64.
    """

    def __init__(
        self,
        cfg: EPConfig,
        *,
        fused=False,
        launch=SMALL,
        seed=0,
        racecheck=None,
        timeout_s=30.0,
        input_scale=None,
        router_weights="array",
        epilogue=None,
        without_signals=False,
        id_bytes=4,
        tuning=None,
        module=kernels,
        **machine_options,
    ):
        self.cfg, self.fused, self.timeout_s = cfg, fused, timeout_s
        self.machine = device.machine(cfg.n_ranks, seed=seed, racecheck=racecheck, **machine_options)
        self.streams = [self.machine.stream(r) for r in range(cfg.n_ranks)]
        self.format = formats.of(cfg)
        self.base = [
            self.machine.alloc(layout.total_bytes(cfg), "base", rank=r, regions=layout.named_words(cfg))
            for r in range(cfg.n_ranks)
        ]
        for base in self.base:
            base.fill(POISON)
        self.put_back()
        make, weights = module, dict(router_weights=router_weights, epilogue=epilogue)
        tuned = dict(tuning=Tuning(**tuning)) if tuning else {}
        self.ids_dtype = np.dtype(f"i{id_bytes}")
        sending = dict(input_scale=input_scale, **tuned)
        if id_bytes != 4:
            sending["id_bytes"] = id_bytes
        self.calls = dict(
            dispatch_async=make.dispatch_async_kernel(cfg, launch, **sending),
            dispatch_wait=make.dispatch_wait_kernel(cfg, launch, **tuned),
            dispatch=make.dispatch_kernel(cfg, launch, **sending),
            combine_async=make.combine_async_kernel(cfg, launch, **tuned),
            combine_wait=make.combine_wait_kernel(cfg, launch, **weights, **tuned),
            combine=make.combine_kernel(
                cfg, launch, **weights, **tuned, **({"without_signals": True} if without_signals else {})
            ),
        )
        self.unreduced = router_weights is None
        self.returned_to = lamport.recv_buf_name(cfg, without_signals, router_weights)
        self.buffers = {}

    # ------------------------------------------------------------------ memory
    def put_back(self):
        """Give every word that the layout gives an initial value that value."""
        for base in self.base:
            for region in layout.regions(self.cfg):
                if region.initial is not None:
                    initial = np.full(region.shape, region.initial, region.dtype)
                    base.write(initial, region.offset)

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

    def buffer(self, name, rank, nbytes):
        """A buffer of at least so many bytes, filled with poison; the same one each time where it is large enough."""
        old = self.buffers.get((name, rank))
        if old is None or old.nbytes < nbytes:
            old = self.buffers[name, rank] = self.machine.alloc(max(nbytes, 16), name, rank=rank)
        old.fill(POISON)
        return old

    def put(self, name, rank, array):
        """The array in device memory; its address."""
        array = np.ascontiguousarray(array)
        buffer = self.buffer(name, rank, array.nbytes)
        if array.nbytes:
            buffer.write(array)
        return buffer.address

    def capacity(self):
        """Rows that one rank can have at most."""
        cfg = self.cfg
        rows = cfg.n_src_ranks * cfg.max_tokens_per_rank * min(cfg.top_k, cfg.n_local_experts)
        return rows + cfg.max_tokens_per_rank * cfg.fused_shared_expert + (self.format.pad_rows - 1) * cfg.n_groups

    # ------------------------------------------------------------------ dispatch
    def dispatch(self, tokens, topk_ids, input_scale=1.0, ranks=None):
        """Dispatch on all ranks (or those given) at once; a list of dicts: row_offsets, expert_ids, src_info, counts,
        clean_topk_ids and the format's arrays."""
        ranks = range(self.cfg.n_ranks) if ranks is None else ranks
        with self.machine.hold():
            for rank in ranks:
                self.launch_dispatch(rank, tokens[rank], topk_ids[rank], input_scale)
        return [self.dispatched(rank, len(tokens[rank])) if rank in ranks else None for rank in range(self.cfg.n_ranks)]

    def launch_dispatch(self, rank, tokens, topk_ids, input_scale=1.0):
        cfg, capacity = self.cfg, self.capacity()
        words = [
            self.put("input_tokens", rank, tokens),
            self.put("topk_ids", rank, np.asarray(topk_ids, self.ids_dtype)),
            self.at(rank, "clean_topk_ids"),
            float32_word(input_scale),
        ]
        for name, (shape, dtype) in self.format.outputs(cfg, capacity).items():
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            words.append(self.buffer(name, rank, nbytes).address)
        words.append(capacity)
        for name, nbytes in (
            ("row_offsets", 4 * cfg.n_groups + 4),
            ("expert_ids", 4 * cfg.n_groups),
            ("src_info", 8 * capacity),
            ("recv_counts", 4 * cfg.n_local_experts * cfg.n_src_ranks),
        ):
            words.append(self.buffer(name, rank, nbytes).address)
        self.start("dispatch", rank, len(tokens), "dispatch_recv_buf", words)

    def start(self, phase, rank, num_tokens, recv_buf, words, **types):
        """Launch the kernels of a phase; each reads those of the words that it needs."""
        send_buf = self.at(rank, "dispatch_send_buf") if phase == "dispatch" else 0
        regions = dict(
            send_buf_p=send_buf,
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

    def dispatched(self, rank, num_tokens):
        cfg, b = self.cfg, self.buffers
        outputs = self.format.outputs(cfg, self.capacity())
        raw = {
            name: b[name, rank].read(np.uint8, int(np.prod(shape)) * np.dtype(dtype).itemsize)
            for name, (shape, dtype) in outputs.items()
        }
        result = {name: raw[name].view(dtype).reshape(shape) for name, (shape, dtype) in outputs.items()}
        result["row_offsets"] = b["row_offsets", rank].read(np.uint32, cfg.n_groups + 1)
        result["expert_ids"] = b["expert_ids", rank].read(np.int32, cfg.n_groups)
        result["src_info"] = b["src_info", rank].read(np.int32, (self.capacity(), 2))
        result["counts"] = b["recv_counts", rank].read(np.int32, (cfg.n_local_experts, cfg.n_src_ranks))
        result["clean_topk_ids"] = self.read(rank, "clean_topk_ids")[:num_tokens]
        return result

    # ------------------------------------------------------------------ combine
    def combine(self, rows, num_tokens, weights=None, weights_args=(), epilogue_args=(), ranks=None):
        """Combine on all ranks (or those given) at once: rows of expert outputs [rows, hidden] -> output tokens.

        weights: arrays [num_tokens, top_k], if the world was made for arrays. *_args: lists over ranks of tuples.
        """
        ranks = range(self.cfg.n_ranks) if ranks is None else ranks
        with self.machine.hold():
            for rank in ranks:
                self.launch_combine(
                    rank,
                    rows[rank],
                    num_tokens[rank],
                    weights[rank] if weights else None,
                    weights_args[rank] if weights_args else (),
                    epilogue_args[rank] if epilogue_args else (),
                )
        return [self.combined(rank, num_tokens[rank]) if rank in ranks else None for rank in range(self.cfg.n_ranks)]

    def output_shape(self, n):
        return (n, self.cfg.top_k, self.cfg.hidden) if self.unreduced else (n, self.cfg.hidden)

    def launch_combine(self, rank, rows, n, weights, weights_args, epilogue_args):
        dtype = COMBINE[self.cfg.combine_dtype]
        x = self.put("expert_outputs", rank, np.asarray(rows, dtype))
        out = self.buffer("output_tokens", rank, int(np.prod(self.output_shape(n))) * dtype.itemsize)
        array = 0 if weights is None else self.put("weights", rank, np.asarray(weights, np.float32))
        weights_args = self.user_args("weights_arg", rank, weights_args)
        epilogue_args = self.user_args("epilogue_arg", rank, epilogue_args)
        words = [
            x,
            self.buffers["src_info", rank].address,
            0,
            out.address,
            self.at(rank, "clean_topk_ids"),
            array,
            *(word for arg in (*weights_args, *epilogue_args) for word in arg.words()),
        ]
        self.start(
            "combine",
            rank,
            n,
            self.returned_to,
            words,
            weights_types=tuple(arg.type for arg in weights_args),
            epilogue_types=tuple(arg.type for arg in epilogue_args),
        )

    def user_args(self, name, rank, values):
        """Numbers and arrays as the kernels take them."""
        made = []
        for i, value in enumerate(values):
            if np.ndim(value):
                value = np.asarray(value)
                made.append(ArrayArg(self.put(f"{name} {i}", rank, value), value.shape, value.dtype.name))
            else:
                made.append(ScalarArg(value, "int32" if isinstance(value, int) else "float32"))
        return tuple(made)

    def combined(self, rank, n):
        return self.buffers["output_tokens", rank].read(COMBINE[self.cfg.combine_dtype], self.output_shape(n))

    # ------------------------------------------------------------------ errors
    def raise_if_failed(self, rank):
        """PeerTimeout if a wait of that rank expired."""
        words = self.read(rank, "status")
        name = status.failed_recv_count(words)
        status.raise_if_failed(words, self.cfg, rank, self.timeout_s, self.read(rank, name) if name else None)
