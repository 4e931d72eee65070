"""One run of a world with the plain kernels: arrays and addresses as arguments, all rounds in flight at once."""

from importlib import import_module

import ml_dtypes
import numpy as np

from epmoe.device import add_rn, f32, mul_rn
from epmoe.kernels import LaunchConfig
from epmoe.mutants import experts, expired
from epmoe.mutants.errors import WrongResult
from epmoe.mutants.world_inputs import BF16
from epmoe.mutants.world_run import WorldRun

INPUT = {"bf16": BF16, "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
TIMEOUT = 1.0  # seconds of the simulated clock


def scaled_weight(token, k, weights, factor):
    """Router weights as a function: the given ones, times 4, times factor (1/4)."""
    return mul_rn(mul_rn(weights[token, k], f32(4.0)), factor)


def doubled(token, col, value, out):
    """An epilogue that changes its value by data that it reads."""
    return add_rn(value, out[token, col])


def stored(token, col, value, out):
    """An output lambda."""
    out[token, col] = value


class PlainRun(WorldRun):
    """Memory and launches of one run of a PlainWorld."""

    def may_send_few(self, rank, round):
        """The plain kernels have one way."""
        return False

    def _calls(self):
        world, cfg = self.world, self.cfg
        plain = import_module(f"{self.kernels.__name__}.plain")
        launch, self.returned_to = LaunchConfig(num_threads=world.shape[1]), "combine_recv_buf"
        weights = dict(router_weights_wrapper=None if world.unreduced else plain.given_weights)
        if world.weights == "function":
            weights = dict(router_weights_wrapper=scaled_weight)
        if world.epilogue:
            weights |= {"value": dict(epilogue_fn=doubled), "stores": dict(elementwise_lambda_fn=stored)}[
                world.epilogue
            ]
        sends = dict(input_type=world.input_type)
        if world.fused:
            return dict(
                dispatch=plain.dispatch_kernel(cfg, launch, **sends),
                combine=plain.combine_kernel(cfg, launch, **weights),
            )
        return dict(
            dispatch_async=plain.dispatch_async_kernel(cfg, launch, **sends),
            dispatch_wait=plain.dispatch_wait_kernel(cfg, launch),
            combine_async=plain.combine_async_kernel(cfg, launch),
            combine_wait=plain.combine_wait_kernel(cfg, launch, **weights),
        )

    def call(self, rank, name, *arguments, **options):
        grid, block = self.world.shape
        self.calls[name][grid, block, self.streams[rank]](
            *arguments, status=self.at(rank, "status"), timeout=TIMEOUT, **options
        )

    def array(self, name, rank, values):
        """A new buffer with these values, as an array."""
        buffer = self.new(name, rank, values.shape, values.dtype)
        buffer.write(values)
        return buffer.array(values.dtype, values.shape)

    def _launch_round(self, rank, x, ids, weights):
        cfg, n = self.cfg, len(x)
        tokens = self.array("input_tokens", rank, x.astype(INPUT[self.world.input_type]))
        topk_ids = self.array("topk_ids", rank, ids)
        clean = self.new("clean_topk_ids", rank, (cfg.max_tokens_per_rank, cfg.top_k), np.int32)
        out = self.outputs(rank)
        arrays = {name: b.array(dtype, shape) for name, (b, shape, dtype) in out.items()}
        groups = arrays, arrays["row_offsets"], arrays["expert_ids"], arrays["src_info"]
        if self.world.stuck == "dispatch" and rank == 0:
            expired.spoil(self)
        self._launch_dispatch(rank, (tokens, topk_ids), groups, n, clean.address)
        rows = self.new("expert_outputs", rank, (self.capacity, cfg.hidden), BF16)
        # otherwise row_offsets is undefined
        if not (self.world.absent or self.world.stuck == "dispatch"):
            experts.launch(self, rank, out["output_tokens"][0], out["row_offsets"][0], rows)
        ids_of = clean.array(np.int32, (n, cfg.top_k))
        combined = self._launch_plain_combine(rank, n, rows, arrays["src_info"], ids_of, weights)
        out["topk_ids"] = (clean, (n, cfg.top_k), np.int32)
        return out, combined

    def _launch_dispatch(self, rank, inputs, groups, n, clean):
        send, counters = self.at(rank, "dispatch_send_buf"), self.at(rank, "ep_counters")
        to = self.peers(rank, "dispatch_recv_buf"), self.peers(rank, "dispatch_recv_count")
        here = self.at(rank, "dispatch_recv_buf"), self.at(rank, "dispatch_recv_count")
        counts = dict(recv_counts=groups[0]["recv_count"])
        if self.world.fused:
            self.call(rank, "dispatch", *inputs, *groups, send, *to, counters, rank, clean_topk_ids=clean, **counts)
            return
        self.call(rank, "dispatch_async", *inputs, send, *to, counters, rank, clean_topk_ids=clean)
        shared = dict(send_buf_p=send, num_tokens=n) if self.cfg.fused_shared_expert else {}
        self.call(rank, "dispatch_wait", *groups, *here, counters, rank, **counts, **shared)

    def _launch_plain_combine(self, rank, n, rows, src_info, ids, weights):
        cfg, counters, world = self.cfg, self.at(rank, "ep_counters"), self.world
        send = self.at(rank, "combine_send_buf") if cfg.use_shmem else 0
        shape = (n, cfg.top_k, cfg.hidden) if world.unreduced else (n, cfg.hidden)
        combined = self.new("combined", rank, shape, BF16)
        rows = rows.array(BF16, (self.capacity, cfg.hidden))
        args = dict(router_weights_args=() if world.unreduced else (self.array("router_weights", rank, weights),))
        if world.weights == "function":
            args["router_weights_args"] += (0.25,)
        if world.epilogue:
            values = self.array("epilogue argument", rank, np.zeros((n, cfg.hidden), np.float32))
            args["epilogue_args"] = (values,)
        to = self.peers(rank, "combine_recv_buf"), self.peers(rank, "combine_recv_count")
        here = self.at(rank, "combine_recv_buf"), self.at(rank, "combine_recv_count")
        out = combined.array(BF16, shape)
        if world.stuck == "combine" and rank == 0:
            expired.spoil(self)
        if world.fused:
            self.call(rank, "combine", rows, src_info, out, send, *to, counters, ids, rank, **args)
        else:
            shared = dict(input_tokens=rows) if cfg.fused_shared_expert else {}
            self.call(rank, "combine_async", rows, src_info, send, *to, counters, rank)
            self.call(rank, "combine_wait", out, *here, counters, rank, ids, **args, **shared)
        if world.epilogue == "stores":
            return self._in_place_of(combined, values), shape, BF16
        return combined, shape, BF16

    def _in_place_of(self, combined, values):
        """The values that an output lambda stored, in the form of the result. Nothing else may have been stored."""
        run = self

        class Stored:
            def read(self, dtype, shape):
                if (combined.read(np.uint8, combined.nbytes) != 0xA5).any():
                    raise WrongResult(f"{run.world.name}: output_tokens were written beside the output lambda")
                run.machine.synchronize()
                return values.astype(ml_dtypes.bfloat16)

        return Stored()

    def _free(self):
        self.calls = {}
        super()._free()
