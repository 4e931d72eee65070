"""A world for the plain kernels alone, which take arrays as arguments, in the order of the specification's pages."""

import numpy as np
from kernel_world import SMALL, World, part_of

from epmoe import device, layout
from epmoe.kernels import plain


class PlainWorld(World):
    """With the plain kernels. sending, reducing: compile-time names of the factories."""

    def __init__(
        self, cfg, *, fused=True, launch=SMALL, timeout_s=30.0, sending=None, reducing=None, **machine_options
    ):
        sending = sending or {}
        reducing = {"router_weights_wrapper": plain.given_weights, **(reducing or {})}
        super().__init__(cfg, fused, timeout_s, reducing["router_weights_wrapper"] is not None, machine_options)
        if device.SIM:
            self.machine.network.connect([b.address for b in self.base], layout.total_bytes(cfg))
        self.kernels = dict(
            dispatch_async=plain.dispatch_async_kernel(cfg, launch, **sending),
            dispatch_wait=plain.dispatch_wait_kernel(cfg, launch),
            dispatch=plain.dispatch_kernel(cfg, launch, **sending),
            combine_async=plain.combine_async_kernel(cfg, launch),
            combine_wait=plain.combine_wait_kernel(cfg, launch, **reducing),
            combine=plain.combine_kernel(cfg, launch, **reducing),
        )
        self.launch = launch

    def call(self, rank, name, *arguments, **options):
        kernel = self.kernels[name]
        grid = kernel.grid(self.machine) if device.SIM else self.launch.n_sms
        kernel[grid, self.launch.num_threads, self.streams[rank]](
            *arguments, status=self.at(rank, "status"), timeout=self.timeout_s, **options
        )

    def launch_dispatch(self, rank, tokens, topk_ids, input_scale):
        cfg = self.cfg
        x = self.array("input_tokens", rank, tokens.dtype, tokens.shape, tokens)
        ids = self.array("topk_ids", rank, np.int32, topk_ids.shape, topk_ids)
        *outputs, row_offsets, expert_ids, src_info, counts = self.results(rank).items()
        results = dict(outputs), row_offsets[1], expert_ids[1], src_info[1]
        send, counters = self.at(rank, "dispatch_send_buf"), self.at(rank, "ep_counters")
        to = tuple(self.peers(rank, "dispatch_recv_buf")), tuple(self.peers(rank, "dispatch_recv_count"))
        given = dict(clean_topk_ids=self.clean_ids(rank), input_scales_args=(input_scale,))
        if self.fused:
            self.call(rank, "dispatch", x, ids, *results, send, *to, counters, rank, recv_counts=counts[1], **given)
            return
        self.call(rank, "dispatch_async", x, ids, send, *to, counters, rank, **given)
        shared = dict(send_buf_p=send, num_tokens=len(tokens)) if cfg.fused_shared_expert else {}
        here = self.at(rank, "dispatch_recv_buf"), self.at(rank, "dispatch_recv_count")
        self.call(rank, "dispatch_wait", *results, *here, counters, rank, recv_counts=counts[1], **shared)

    def launch_combine(self, rank, y, out, weights_args, epilogue_args):
        cfg = self.cfg
        src_info = part_of(self.buffers["src_info", rank], np.int32, (self.capacity, 2))
        ids = part_of(self.buffers["clean_topk_ids", rank], np.int32, (out.shape[0], cfg.top_k))
        send = self.at(rank, "combine_send_buf") if cfg.use_shmem else 0
        to = tuple(self.peers(rank, "combine_recv_buf")), tuple(self.peers(rank, "combine_recv_count"))
        counters = self.at(rank, "ep_counters")
        args = {
            name: tuple(self.user_array(rank, f"{name}{i}", a) for i, a in enumerate(given))
            for name, given in (("router_weights_args", weights_args), ("epilogue_args", epilogue_args))
        }
        if self.fused:
            self.call(rank, "combine", y, src_info, out, send, *to, counters, ids, rank, **args)
            return
        self.call(rank, "combine_async", y, src_info, send, *to, counters, rank)
        shared = dict(input_tokens=y) if cfg.fused_shared_expert else {}
        here = self.at(rank, "combine_recv_buf"), self.at(rank, "combine_recv_count")
        self.call(rank, "combine_wait", out, *here, counters, rank, ids, **args, **shared)

    def user_array(self, rank, name, value):
        return self.array(name, rank, value.dtype, value.shape, value) if isinstance(value, np.ndarray) else value
