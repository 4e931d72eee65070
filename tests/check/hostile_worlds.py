"""Implementations that a trusting check would pass: they exit, hang, cast, or change results later."""

import os
import sys
import time

import numpy as np
from numpy_world import NumpyWorld
from per_rank_worlds import COMM, OneRank

from epmoe_ref.errors import UnavailableError


class Exits(NumpyWorld):
    """Exits with status 0."""

    def dispatch(self, input_tokens, topk_ids, **options):
        sys.exit(0)


class LeavesAtOnce(NumpyWorld):
    """Exits without running any handler."""

    def dispatch(self, input_tokens, topk_ids, **options):
        os._exit(0)


class Crashes(NumpyWorld):
    """Ends by a signal, like a segmentation fault."""

    def combine(self, expert_outputs, dispatched, router_weights, **options):
        os.abort()


class Hangs(NumpyWorld):
    """Never returns from the case "one slot"."""

    def combine(self, expert_outputs, dispatched, router_weights, **options):
        if self.cfg.top_k == 1:
            time.sleep(1000)
        return super().combine(expert_outputs, dispatched, router_weights, **options)


class HangsAlways(NumpyWorld):
    def dispatch(self, input_tokens, topk_ids, **options):
        while True:
            pass


class SecondWorldIsWrong(NumpyWorld):
    """Right for the first object of each configuration."""

    made_before = set()

    def __init__(self, cfg):
        super().__init__(cfg)
        self.wrong = cfg in self.made_before
        self.made_before.add(cfg)

    def combine(self, expert_outputs, dispatched, router_weights, **options):
        out = super().combine(expert_outputs, dispatched, router_weights, **options)
        return [o * np.array(2, o.dtype) for o in out] if self.wrong else out


class Interrupts(NumpyWorld):
    def dispatch(self, input_tokens, topk_ids, **options):
        raise KeyboardInterrupt


class ReadsStdin(NumpyWorld):
    def dispatch(self, input_tokens, topk_ids, **options):
        input()


class TakesNothing(NumpyWorld):
    def dispatch(self):
        """Not even the tokens."""


class CallsTheEpilogue(NumpyWorld):
    options = ("epilogue",)

    def combine(self, expert_outputs, dispatched, router_weights, epilogue=None, epilogue_args=None):
        epilogue(0, 0, 0.0)


class NoCombine(NumpyWorld):
    combine = None


class NeverMade(NumpyWorld):
    def __init__(self, cfg):
        raise RuntimeError("no driver")


class NoGpu(NumpyWorld):
    def __init__(self, cfg):
        raise UnavailableError("there is no GPU")


class UsesMemoryAgain(NumpyWorld):
    """Every dispatch reuses the arrays that the previous one returned, where they fit."""

    last = None

    def dispatch(self, input_tokens, topk_ids, **options):
        out = super().dispatch(input_tokens, topk_ids, **options)
        for old, new in zip(self.last or (), out):
            old["src_info"][...] = 77
        self.last = out
        return out


def counts_as(change):
    """An implementation whose row_offsets went through change(array)."""

    class Changed(NumpyWorld):
        def dispatch(self, input_tokens, topk_ids, **options):
            out = super().dispatch(input_tokens, topk_ids, **options)
            return [{**of_rank, "row_offsets": change(np.asarray(of_rank["row_offsets"]))} for of_rank in out]

    return Changed


Fractions = counts_as(lambda a: a + 0.25)
Floats = counts_as(lambda a: a.astype(float))
Nan = counts_as(lambda a: np.where(a == 0, np.nan, a))
Wrapped = counts_as(lambda a: a.astype(np.int64) + (1 << 32))
Unsigned = counts_as(lambda a: np.where(a == 0, np.uint64(1 << 63), a.astype(np.uint64)))
Booleans = counts_as(lambda a: a.astype(bool))


class Misspelt(NumpyWorld):
    token_formats = ("bf16", "nvpf4")


class MisspeltOption(NumpyWorld):
    options = {"unweigthed"}


class MisspeltType(NumpyWorld):
    combine_dtypes = ("bf16", "fp8")


class NoTuple(NumpyWorld):
    token_formats = "bf16"


class NoTopK(NumpyWorld):
    max_top_k = 0


class OddHidden(NumpyWorld):
    hidden = 100


class ServesNothing(NumpyWorld):
    token_formats = ("mxfp8",)
    combine_dtypes = ()


class HangingRank(OneRank):
    def dispatch(self, input_tokens, topk_ids, **options):
        time.sleep(1000)


class RaisingRank(OneRank):
    """Rank 1 raises, and closing is collective."""

    def combine(self, expert_outputs, dispatched, router_weights):
        if COMM.rank == 1:
            raise ValueError("no memory left")
        return super().combine(expert_outputs, dispatched, router_weights)

    def close(self):
        COMM.Barrier()


class CrashingRank(OneRank):
    def dispatch(self, input_tokens, topk_ids, **options):
        os.abort() if COMM.rank == 1 else COMM.Barrier()


class LeavingRank(OneRank):
    def dispatch(self, input_tokens, topk_ids, **options):
        sys.exit(0)


class RankThatLeavesAtOnce(OneRank):
    def dispatch(self, input_tokens, topk_ids, **options):
        os._exit(0)
