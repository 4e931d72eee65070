"""The kernels of pairs, one message for each (token, expert), through ExpertParallel: fused, plain or split."""

from functools import lru_cache

import ml_dtypes
import numpy as np

from benchmarks import traffic
from benchmarks.memory import Arrays
from benchmarks.shapes import FORMATS
from epmoe import EPConfig
from epmoe.expert_parallel import ExpertParallel
from epmoe.kernels import LaunchConfig

BF16 = np.dtype(ml_dtypes.bfloat16)
# kind -> ExpertParallel's fused and kernels
KINDS = {"fused": (True, "fast"), "plain": (True, "plain"), "split": (False, "fast")}
ORDINARY_BYTE = 0x3C  # 0x3C3C is an ordinary bf16, 0.0115


def config(shape, n_ranks):
    """The EPConfig of a shape."""
    return EPConfig(n_ranks, shape.experts, shape.top_k, shape.hidden, shape.tokens, token_format=FORMATS[shape.format])


@lru_cache(8)
def random_tokens(shape, rank):
    """bf16 tokens of a rank."""
    return np.random.default_rng([1, rank]).standard_normal(shape, np.float32).astype(BF16)


class Pairs:
    """Phases dispatch and combine (weighted) of one ExpertParallel. Inputs and results keep their addresses.

    kind: of KINDS; "plain": the plain kernels, fused. For dispatch "plain" sends a payload with each message, the
    others send it once to a rank.
    """

    phases = ("dispatch", "combine")

    def __init__(self, world, shape, *, kind, n_sms=None, num_threads=None):
        self.name = f"pairs {kind}"
        self.world, self.shape, self.machine = world, shape, world.machine
        self.stream = world.stream_of(world.ranks[0])
        cfg = config(shape, world.n_ranks)
        ids = traffic.topk_ids(shape, world.n_ranks)
        fused, kernels = KINDS[kind]
        back = traffic.pairs_matrix(shape, ids).T
        there = back.T if kind == "plain" else traffic.rows_matrix(shape, ids)
        self.bytes = {
            "dispatch": traffic.busiest_bytes(there, traffic.payload_bytes(shape, shape.format)),
            "combine": traffic.busiest_bytes(back, traffic.payload_bytes(shape, "bf16")),
        }
        self._ep = ExpertParallel(cfg, world, fused=fused, launch=LaunchConfig(n_sms, num_threads), kernels=kernels)
        tokens, slots = (shape.tokens, shape.hidden), (shape.tokens, shape.top_k)
        shapes = {
            "x": (tokens, BF16),
            "ids": (slots, np.int32),
            "weights": (slots, np.float32),
            "y": ((self._ep.capacity, shape.hidden), BF16),
        }
        self._arrays = arrays = Arrays(world, shapes)
        arrays.write("x", lambda rank: random_tokens(tokens, rank))
        arrays.write("ids", lambda rank: ids[rank])
        arrays.write("weights", lambda rank: np.random.default_rng([2, rank]).random(slots, np.float32))
        arrays.fill("y", ORDINARY_BYTE)
        self._x, self._ids, self._weights, self._y = (arrays.each(name) for name in shapes)
        self._dispatched = None

    def launch(self, phase):
        """Put a phase on the stream. The phases alternate."""
        if phase == "dispatch":
            self._dispatched = self._ep.dispatch(self._x, self._ids)
        else:
            self._ep.combine(self._y, self._dispatched, self._weights)
            self._dispatched = None

    def check(self):
        """Raise the errors that the kernels recorded. Waits for them."""
        self._ep.check()

    def close(self):
        """Free everything."""
        self._dispatched = None
        self._ep.close()
        self._x = self._ids = self._weights = self._y = None
        self._arrays.close()
