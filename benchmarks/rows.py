"""The fused_a2a kernels: one row for each (token, rank), and HybridEP's, grouped by expert on arrival."""

import ml_dtypes
import numpy as np
from epmoe import fused_a2a
from epmoe.arrays import first

from benchmarks import traffic
from benchmarks.memory import Arrays
from benchmarks.pairs import BF16, ORDINARY_BYTE, random_tokens

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


class _FusedA2A:
    """What both have in common: inputs, bytes, the parts that differ left to `launch`."""

    def __init__(self, world, shape, n_sms, y_rows, more):
        self.n_sms = min(n_sms or world.machine.n_sms, world.machine.n_sms)
        self.name += f" {n_sms} SMs" if n_sms else ""
        self.world, self.shape, self.stream = world, shape, world.stream_of(world.ranks[0])
        self.ids = traffic.topk_ids(shape, world.n_ranks)
        matrix = traffic.rows_matrix(shape, self.ids)
        there = traffic.busiest_bytes(matrix, traffic.payload_bytes(shape, shape.format))
        back = traffic.busiest_bytes(matrix.T, traffic.payload_bytes(shape, "bf16"))
        self.bytes = {phase: back if phase == "combine" else there for phase in self.phases}
        tokens = (shape.tokens, shape.hidden)
        self.arrays = Arrays(world, {"x": (tokens, BF16), "y": ((y_rows, shape.hidden), BF16)} | more)
        self.arrays.write("x", lambda rank: random_tokens(tokens, rank))
        self.arrays.fill("y", ORDINARY_BYTE)
        self.result = self.handle = None

    def y_of(self, rows):
        """Expert outputs with as many rows as each rank's result."""
        rows = rows if self.world.lists else [rows]
        return self.arrays.of_ranks(first(self.arrays.of(rank, "y"), n) for rank, n in zip(self.world.ranks, rows))

    def rows_of(self, results):
        """Rows of each rank's result."""
        return [len(r) for r in results] if self.world.lists else len(results)

    def check(self):
        """Wait for the kernels."""
        self.world.machine.synchronize()

    def close(self):
        """Free everything."""
        self.world.machine.synchronize()
        self.result = self.handle = None
        self.arrays.close()


class Rows(_FusedA2A):
    """FusedDispatch and FusedCombine. dispatch waits on the host for the number of rows; cached knows them."""

    phases = ("dispatch", "combine", "cached")
    name = "rows"
    capturable = False      # the host waits

    def __init__(self, world, shape, *, n_sms=None):
        slots, scales = (shape.tokens, shape.top_k), (shape.tokens, shape.hidden // traffic.SCALE_GROUP)
        super().__init__(world, shape, n_sms, world.n_ranks * shape.tokens, {
            "ids": (slots, np.int64), "probs": (slots, np.float32), "x8": ((shape.tokens, shape.hidden), E4M3),
            "scales": (scales, np.float32)})
        self.arrays.write("ids", lambda rank: self.ids[rank].astype(np.int64))
        self.arrays.write("probs", lambda rank: np.full(slots, 1 / shape.top_k, np.float32))
        self.arrays.fill("x8", ORDINARY_BYTE)
        self.arrays.write("scales", lambda rank: np.ones(scales, np.float32))
        self.context = fused_a2a.Context()
        fused_a2a.set_deepep_num_sms(n_sms)
        self.is_fp8 = shape.format == "fp8"
        if self.is_fp8:
            self.phases = ("dispatch", "combine")

    def launch(self, phase):
        """Put a phase on the stream."""
        each = self.arrays.each
        if phase == "dispatch":
            x = self._pair() if self.is_fp8 else each("x")
            self.result, _, _, _, self.handle = fused_a2a.fused_dispatch(
                x, each("ids"), each("probs"), self.shape.experts, self.world)
        elif phase == "combine":
            values = self.result
            if self.is_fp8:
                values = [pair[0] for pair in values] if self.world.lists else values[0]
            fused_a2a.FusedCombine.forward(self.context, self.y_of(self.rows_of(values)), self.world, self.handle)
        else:
            fused_a2a.FusedCombine.backward(self.context, each("x"))

    def _pair(self):
        return self.arrays.of_ranks((self.arrays.of(r, "x8"), self.arrays.of(r, "scales")) for r in self.world.ranks)


    def close(self):
        """Free everything."""
        super().close()
        fused_a2a.set_deepep_num_sms(None)


class Hybrid(_FusedA2A):
    """HybridEPDispatch and HybridEPCombine with the number of rows given: the host waits for nothing."""

    phases = ("dispatch", "combine")
    name = "expert-major"

    def __init__(self, world, shape, *, n_sms=None):
        ids = traffic.topk_ids(shape, world.n_ranks)
        self.rows = int(traffic.pairs_matrix(shape, ids).sum(axis=0).max())
        dense = (shape.tokens, shape.experts)
        super().__init__(world, shape, n_sms, self.rows, {"map": (dense, np.dtype(bool)), "probs": (dense, np.float32)})

        def routing_map(rank):
            chosen = np.zeros(dense, bool)
            np.put_along_axis(chosen, self.ids[rank], True, axis=1)
            return chosen

        self.arrays.write("map", routing_map)
        self.arrays.write("probs", lambda rank: np.where(routing_map(rank), np.float32(1 / shape.top_k), np.float32(0)))
        self.local = shape.experts // world.n_ranks
        fused_a2a.init_hybrid_ep_buffer(world, shape.hidden, shape.tokens, self.local, self.n_sms, self.n_sms,
                                        shape.format == "fp8")

    def launch(self, phase):
        """Put a phase on the stream."""
        each = self.arrays.each
        if phase == "dispatch":
            *_, self.handle = fused_a2a.hybrid_ep_dispatch(
                each("x"), each("map"), each("probs"), self.world, self.local, self.n_sms, self.n_sms, self.rows)
        else:
            fused_a2a.hybrid_ep_combine(each("y"), self.handle)

    def close(self):
        """Free everything."""
        super().close()
        fused_a2a.reset_hybrid_ep_buffer(self.world)
