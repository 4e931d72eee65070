"""The fused_a2a kernels: one row for each (token, rank), and HybridEP's, grouped by expert on arrival."""

import ml_dtypes
import numpy as np

from benchmarks import traffic
from benchmarks.memory import Arrays
from benchmarks.pairs import BF16, ORDINARY_BYTE, random_tokens
from epmoe import fused_a2a
from epmoe.fused_a2a import buffers
from epmoe.host.arrays import first

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


class _FusedA2A:
    """The common part: inputs and bytes. Subclasses define `launch`."""

    def __init__(self, world, shape, n_sms, y_rows, more):
        self.n_sms = min(n_sms or world.machine.n_sms, world.machine.n_sms)
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
        self.result, self.handle = None, None

    def y_for(self, results):
        """Expert outputs with as many rows as each rank's result."""
        results = results if self.world.lists else [results]
        return self.arrays.of_ranks(
            first(self.arrays.of(rank, "y"), len(made)) for rank, made in zip(self.world.ranks, results)
        )

    def buffer(self):
        """The Buffer behind the functions."""
        return fused_a2a.get_buffer(self.world, 0)

    def check(self):
        """Raise the errors that the kernels recorded. Waits for them."""
        self.buffer().check()

    def close(self):
        """Free everything, including the Buffer, so that the next shape gets one of its own size."""
        self.world.machine.synchronize()
        self.result, self.handle = None, None
        self.arrays.close()
        self.buffer().close()


class Rows(_FusedA2A):
    """fused_dispatch_on_device and FusedCombine. cached: dispatch again with a handle, as combine's backward does.

    Timed from ids on the device to rows, counts and handle on the device; includes layout and exchange of counts.
    """

    phases = ("dispatch", "combine", "cached")
    name = "rows"
    dispatch = staticmethod(fused_a2a.fused_dispatch_on_device)

    def __init__(self, world, shape, *, n_sms=None):
        slots = shape.tokens, shape.top_k
        scales = shape.tokens, shape.hidden // traffic.SCALE_GROUP
        self.is_fp8 = shape.format == "fp8"
        if self.is_fp8:
            self.phases = ("dispatch",)  # combine sends bf16, as without fp8
        super().__init__(
            world,
            shape,
            n_sms,
            world.n_ranks * shape.tokens,
            {
                "ids": (slots, np.int64),
                "probs": (slots, np.float32),
                "x8": ((shape.tokens, shape.hidden), E4M3),
                "scales": (scales, np.float32),
            },
        )
        self.arrays.write("ids", lambda rank: self.ids[rank].astype(np.int64))
        self.arrays.write("probs", lambda rank: np.full(slots, 1 / shape.top_k, np.float32))
        self.arrays.fill("x8", ORDINARY_BYTE)
        self.arrays.write("scales", lambda rank: np.ones(scales, np.float32))
        self.context = None
        x, ids, probs = (self.arrays.each(name) for name in ("x", "ids", "probs"))
        self._given = self._pair() if self.is_fp8 else x, ids, probs
        self._again, self._back = x, None
        fused_a2a.set_deepep_num_sms(n_sms)

    def launch(self, phase):
        """Put a phase on the stream. The last phase drops the round's results."""
        if phase == "dispatch":
            x, ids, probs = self._given  # passing them with * would cost 0.2 us more
            self.result, _, _, _, self.handle = self.dispatch(x, ids, probs, self.shape.experts, self.world)
        elif phase == "combine":
            self.context = fused_a2a.Context()
            if self._back is None:  # made once, so that no other call under test waits for it
                self._back = self.y_for(self.result)
            fused_a2a.FusedCombine.forward(self.context, self._back, self.world, self.handle)
        else:
            fused_a2a.FusedCombine.backward(self.context, self._again)
        if phase == self.phases[-1]:
            # with two earlier results alive, the next one would be received in the staging area and copied
            self.result = self.handle = self.context = None

    def _pair(self):
        return self.arrays.of_ranks((self.arrays.of(r, "x8"), self.arrays.of(r, "scales")) for r in self.world.ranks)

    def close(self):
        """Free everything."""
        self.context = self._given = self._again = self._back = None
        super().close()
        fused_a2a.set_deepep_num_sms(None)


class HostWaits(Rows):
    """FusedDispatch with exact results. The host waits in every call for the number of rows."""

    name = "rows, host waits"
    capturable, waits = False, True
    dispatch = staticmethod(fused_a2a.fused_dispatch)

    def __init__(self, world, shape, *, n_sms=None):
        super().__init__(world, shape, n_sms=n_sms)
        self.phases = ("dispatch",)


class Hybrid(_FusedA2A):
    """HybridEPDispatch and HybridEPCombine with the number of rows given, so the host does not wait."""

    phases = ("dispatch", "combine")
    name = "expert-major"

    def __init__(self, world, shape, *, n_sms=None):
        ids = traffic.topk_ids(shape, world.n_ranks)
        self.rows = int(traffic.pairs_matrix(shape, ids).sum(axis=0).max())
        dense = (shape.tokens, shape.experts)
        if shape.format == "fp8":
            self.phases = ("dispatch",)  # combine sends bf16, as without fp8
        super().__init__(world, shape, n_sms, self.rows, {"map": (dense, np.dtype(bool)), "probs": (dense, np.float32)})

        def routing_map(rank):
            chosen = np.zeros(dense, bool)
            np.put_along_axis(chosen, self.ids[rank], True, axis=1)
            return chosen

        self.arrays.write("map", routing_map)
        self.arrays.write("probs", lambda rank: np.where(routing_map(rank), np.float32(1 / shape.top_k), np.float32(0)))
        self.local = shape.experts // world.n_ranks
        fused_a2a.init_hybrid_ep_buffer(
            world, shape.hidden, shape.tokens, self.local, self.n_sms, self.n_sms, shape.format == "fp8"
        )
        self._given = [self.arrays.each(name) for name in ("x", "map", "probs")]
        self._back = self.arrays.each("y")

    def launch(self, phase):
        """Put a phase on the stream."""
        if phase == "dispatch":
            x, chosen, probs = self._given
            self.handle = fused_a2a.hybrid_ep_dispatch(
                x, chosen, probs, self.world, self.local, self.n_sms, self.n_sms, num_permuted_tokens=self.rows
            )[-1]
        else:
            fused_a2a.hybrid_ep_combine(self._back, self.handle)
        if phase == self.phases[-1]:
            self.handle = None

    def buffer(self):
        """The Buffer behind the functions."""
        return buffers.hybrid_ep_buffer(self.world)

    def close(self):
        """Free everything."""
        self._given = self._back = None
        super().close()
