"""A world for the plain kernels alone: hand-made buffers by the layout, arrays as arguments, all ranks at once.

Results come back as the reference's Dispatched, with poison in every array before the launch.
"""

import ml_dtypes
import numpy as np

from epmoe import device, layout
from epmoe.kernels import LaunchConfig, formats, plain, status
from epmoe.kernels.plain.arguments import DTYPES, capacity
from epmoe_ref.dispatched import Dispatched

SMALL = LaunchConfig(n_sms=3, num_threads=64)
POISON = 0xFF  # NaN in every format, -1 in every integer


class PlainWorld:
    """The ranks' memory on one machine, and the six plain kernels. options: compile-time names of the factories."""

    def __init__(
        self,
        cfg,
        *,
        fused=True,
        launch=SMALL,
        timeout=30.0,
        sending=None,
        reducing=None,
        module=plain,
        **machine_options,
    ):
        self.cfg, self.fused, self.timeout = cfg, fused, timeout
        self.machine = device.machine(cfg.n_ranks, **machine_options)
        self.streams = [self.machine.stream(r) for r in range(cfg.n_ranks)]
        self.buffers, self.base = {}, []
        for rank in range(cfg.n_ranks):
            self.base.append(
                self.machine.alloc(layout.total_bytes(cfg), "base", rank=rank, regions=layout.named_words(cfg))
            )
            for region in layout.regions(cfg):
                fill = np.full(region.nbytes, POISON, np.uint8)
                if region.initial is not None:
                    fill = np.full(region.shape, region.initial, region.dtype)
                self.base[rank].write(fill, region.offset)
        if device.SIM:
            self.machine.network.connect([b.address for b in self.base], layout.total_bytes(cfg))
        sending = sending or {}
        reducing = {"router_weights_wrapper": plain.given_weights, **(reducing or {})}
        self.reduced = reducing["router_weights_wrapper"] is not None
        self.kernels = dict(
            dispatch_async=module.dispatch_async_kernel(cfg, launch, **sending),
            dispatch_wait=module.dispatch_wait_kernel(cfg, launch),
            dispatch=module.dispatch_kernel(cfg, launch, **sending),
            combine_async=module.combine_async_kernel(cfg, launch),
            combine_wait=module.combine_wait_kernel(cfg, launch, **reducing),
            combine=module.combine_kernel(cfg, launch, **reducing),
        )
        self.launch = launch

    # ------------------------------------------------------------------ memory
    def at(self, rank, name):
        """Address of a region of a rank."""
        return self.base[rank].address + layout.region(self.cfg, name).offset

    def peers(self, rank, name):
        """Addresses of a region on all ranks of the p2p world of `rank`."""
        first = rank // self.cfg.p2p_world_size * self.cfg.p2p_world_size
        return tuple(self.at(first + i, name) for i in range(self.cfg.p2p_world_size))

    def read(self, rank, name):
        """A copy of a region, or of one inside ep_counters."""
        for region in layout.regions(self.cfg):
            if region.name == name:
                return self.base[rank].read(region.dtype, region.shape, region.offset)
        region = next(c for c in layout.counter_regions(self.cfg) if c.name == name)
        start = layout.region(self.cfg, "ep_counters").offset + region.offset
        return self.base[rank].read(region.dtype, region.shape, start)

    def array(self, rank, name, dtype, shape, values=None):
        """An array in device memory, with the values or poison; the same buffer each time where it is large enough."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffer = self.buffers.get((rank, name))
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self.buffers[rank, name] = self.machine.alloc(max(nbytes, 16), name, rank=rank)
        buffer.fill(POISON)
        if values is not None and nbytes:
            buffer.write(np.ascontiguousarray(values, dtype))
        return buffer.array(dtype, shape)

    def call(self, rank, name, *arguments, **options):
        kernel = self.kernels[name]
        grid = kernel.grid(self.machine) if device.SIM else self.launch.n_sms
        kernel[grid, self.launch.num_threads, self.streams[rank]](
            *arguments, status=self.at(rank, "status"), timeout=self.timeout, **options
        )

    # ------------------------------------------------------------------ dispatch
    def dispatch(self, tokens, topk_ids, *, ranks=None, **options):
        """Dispatch on all ranks (or those given) at once: a list of Dispatched."""
        ranks = range(self.cfg.n_ranks) if ranks is None else ranks
        with self.machine.hold():
            for rank in ranks:
                self.launch_dispatch(rank, tokens[rank], np.asarray(topk_ids[rank], np.int32), options)
        self.check(ranks)
        return [self.dispatched(rank, len(tokens[rank])) if rank in ranks else None for rank in range(self.cfg.n_ranks)]

    def launch_dispatch(self, rank, tokens, topk_ids, options):
        cfg = self.cfg
        x = self.array(rank, "input_tokens", tokens.dtype, tokens.shape, tokens)
        ids = self.array(rank, "topk_ids", np.int32, topk_ids.shape, topk_ids)
        outputs = formats.of(cfg).outputs(cfg, capacity(cfg))
        handler = {name: self.array(rank, name, dtype, shape) for name, (shape, dtype) in outputs.items()}
        results = (
            handler,
            self.array(rank, "row_offsets", np.uint32, (cfg.n_groups + 1,)),
            self.array(rank, "expert_ids", np.int32, (cfg.n_groups,)),
            self.array(rank, "src_info", np.int32, (capacity(cfg), 2)),
        )
        counts = self.array(rank, "recv_counts", np.int32, (cfg.n_local_experts, cfg.n_src_ranks))
        send, counters = self.at(rank, "dispatch_send_buf"), self.at(rank, "ep_counters")
        to = self.peers(rank, "dispatch_recv_buf"), self.peers(rank, "dispatch_recv_count")
        clean = dict(clean_topk_ids=self.at(rank, "clean_topk_ids"), **options)
        if self.fused:
            self.call(rank, "dispatch", x, ids, *results, send, *to, counters, rank, recv_counts=counts, **clean)
            return
        self.call(rank, "dispatch_async", x, ids, send, *to, counters, rank, **clean)
        shared = dict(send_buf_p=send, num_tokens=len(tokens)) if cfg.fused_shared_expert else {}
        self.call(
            rank,
            "dispatch_wait",
            *results,
            self.at(rank, "dispatch_recv_buf"),
            self.at(rank, "dispatch_recv_count"),
            counters,
            rank,
            recv_counts=counts,
            **shared,
        )

    def dispatched(self, rank, num_tokens):
        cfg, b = self.cfg, self.buffers

        def read(name, dtype, shape):
            return b[rank, name].read(np.dtype(dtype), shape)

        offsets = read("row_offsets", np.uint32, (cfg.n_groups + 1,))
        rows = int(offsets[-1])
        outputs = {
            name: read(name, dtype, shape)
            for name, (shape, dtype) in formats.of(cfg).outputs(cfg, capacity(cfg)).items()
        }
        self.behind = outputs["output_tokens"][rows:]
        src_info = read("src_info", np.int32, (capacity(cfg), 2))
        scales = outputs.get("output_scales")
        if cfg.token_format == "fp8_blockwise":
            scales = scales[:, :rows]
        elif cfg.token_format == "mxfp4_rows" and not cfg.fuse_a_scale_preshuffle:
            scales = scales[:rows]
        return Dispatched(
            output_tokens=outputs["output_tokens"][:rows],
            output_scales=scales,
            scales_offset=outputs.get("scales_offset"),
            row_offsets=offsets,
            expert_ids=read("expert_ids", np.int32, (cfg.n_groups,)),
            src_info=src_info[:rows],
            recv_count=read("recv_counts", np.int32, (cfg.n_local_experts, cfg.n_src_ranks)),
            topk_ids=self.read(rank, "clean_topk_ids")[:num_tokens],
            num_tokens=num_tokens,
        )

    # ------------------------------------------------------------------ combine
    def combine(self, rows, dispatched, weights_args=None, epilogue_args=(), ranks=None):
        """Combine on all ranks at once: expert outputs [rows, hidden] a rank -> output tokens a rank.

        weights_args: list over ranks of tuples.
        """
        ranks = range(self.cfg.n_ranks) if ranks is None else ranks
        with self.machine.hold():
            for rank in ranks:
                self.launch_combine(
                    rank,
                    rows[rank],
                    dispatched[rank],
                    weights_args[rank] if weights_args else (),
                    epilogue_args[rank] if epilogue_args else (),
                )
        self.check(ranks)
        return [
            self.combined(rank, dispatched[rank].num_tokens) if rank in ranks else None
            for rank in range(self.cfg.n_ranks)
        ]

    def launch_combine(self, rank, rows, d, weights_args, epilogue_args):
        cfg, dtype = self.cfg, DTYPES[self.cfg.combine_dtype]
        y = self.array(rank, "expert_outputs", dtype, rows.shape, rows)
        src_info = self.buffers[rank, "src_info"].array(np.int32, (capacity(cfg), 2))
        out = self.array(rank, "output", dtype, self.out_shape(d.num_tokens))
        ids = self.base[rank].array(np.int32, (d.num_tokens, cfg.top_k), layout.region(cfg, "clean_topk_ids").offset)
        send = self.at(rank, "combine_send_buf") if cfg.use_shmem else 0
        to = self.peers(rank, "combine_recv_buf"), self.peers(rank, "combine_recv_count")
        counters = self.at(rank, "ep_counters")
        args = {
            name: tuple(self.user_array(rank, f"{name}{i}", a) for i, a in enumerate(given))
            for name, given in (("router_weights_args", weights_args), ("epilogue_args", epilogue_args))
        }
        if self.fused:
            self.call(rank, "combine", y, src_info, out, send, *to, counters, ids, rank, **args)
            return
        shared = dict(input_tokens=y) if cfg.fused_shared_expert else {}
        self.call(rank, "combine_async", y, src_info, send, *to, counters, rank)
        self.call(
            rank,
            "combine_wait",
            out,
            self.at(rank, "combine_recv_buf"),
            self.at(rank, "combine_recv_count"),
            counters,
            rank,
            ids,
            **args,
            **shared,
        )

    def user_array(self, rank, name, value):
        return self.array(rank, name, value.dtype, value.shape, value) if isinstance(value, np.ndarray) else value

    def out_shape(self, num_tokens):
        cfg = self.cfg
        return (num_tokens, cfg.hidden) if self.reduced else (num_tokens, cfg.top_k, cfg.hidden)

    def combined(self, rank, num_tokens):
        return self.buffers[rank, "output"].read(DTYPES[self.cfg.combine_dtype], self.out_shape(num_tokens))

    def check(self, ranks):
        """Raises what the status words of the ranks say about waits."""
        for rank in ranks:
            words = self.read(rank, "status")
            region = status.failed_recv_count(words)
            status.raise_if_failed(words, self.cfg, rank, self.timeout, self.read(rank, region) if region else None)


def assert_same(got, wanted, what):
    """Bit for bit."""
    got, wanted = np.ascontiguousarray(got), np.ascontiguousarray(wanted)
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, (
        f"{what}: {got.dtype} {got.shape}, {wanted.dtype} {wanted.shape} is right"
    )
    different = np.argwhere(
        (got.view(np.uint8) != wanted.view(np.uint8)).reshape(got.shape + (-1,)).any(-1)
        if got.size
        else np.zeros(got.shape, bool)
    )
    assert not len(different), (
        f"{what} differs at {different[:3].tolist()}: {got[tuple(different[0])]}, "
        f"{wanted[tuple(different[0])]} is right"
    )


BF16 = np.dtype(ml_dtypes.bfloat16)
