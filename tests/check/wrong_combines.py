"""Combines with one common mistake each."""

import ml_dtypes
import numpy as np
from numpy_world import NumpyWorld


class DoubleRounding(NumpyWorld):
    """Accumulates in the output type."""

    def add(self, acc, weight, value):
        return super().add(acc, weight, value).astype(value.dtype).astype(np.float32)


class WeightsTwice(NumpyWorld):
    """The experts' outputs are weighted, and the sum weights them again."""

    def weights(self, weights):
        return weights * weights


class NotFused(NumpyWorld):
    """Rounds the product before it is added."""

    def add(self, acc, weight, value):
        return acc + weight * value.astype(np.float32)


class MinusOneTakesPart(NumpyWorld):
    """Multiplies rows of ids of -1 by their weight, whatever it is."""

    def takes_part(self, ids):
        return np.ones(ids.shape, bool)


class GarbageAtMinusOne(NumpyWorld):
    """Leaves rows of ids of -1 as they are without router weights."""

    def unreduced(self, recv, ids):
        recv[ids < 0] = 7
        return recv


class Descending(NumpyWorld):
    """Adds the last k first."""

    def reduce(self, recv, weights, takes_part):
        return super().reduce(recv[:, ::-1], weights[:, ::-1], takes_part[:, ::-1])


class CutOff(NumpyWorld):
    """Takes the upper half of a float32 for a bf16."""

    def reduce(self, recv, weights, takes_part):
        acc = super().reduce(recv, weights, takes_part)
        if recv.dtype != ml_dtypes.bfloat16:
            return acc
        return (acc.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


class HalfAway(NumpyWorld):
    """Adds half of the last place and cuts off."""

    def reduce(self, *given):
        acc = super().reduce(*given)
        return np.where(np.isnan(acc), acc, ((acc.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32))


class WeightsNormalised(NumpyWorld):
    def weights(self, weights):
        with np.errstate(all="ignore"):
            return weights / np.nansum(weights, axis=1, keepdims=True)


class AddsToTheRoundBefore(NumpyWorld):
    def combine_of(self, rank, *given):
        sums = super().combine_of(rank, *given)
        before = self.__dict__.setdefault("sums", {}).get(rank)
        if before is not None:
            sums = (sums.astype(np.float32) + before.astype(np.float32)).astype(sums.dtype)
        self.sums[rank] = sums
        return sums


class OtherRanksTokens(NumpyWorld):
    """Returns the next rank's results to each rank, where both have as many tokens."""

    def combine(self, *given):
        sums = super().combine(*given)
        return [b if a.shape == b.shape else a for a, b in zip(sums, [*sums[1:], sums[0]])]


class LastTokenZero(NumpyWorld):
    def combine_of(self, *given):
        sums = super().combine_of(*given)
        sums[-1:] = 0
        return sums


class InFloat64(NumpyWorld):
    """Rounds once, at the end."""

    def reduce(self, recv, weights, takes_part):
        with np.errstate(all="ignore"):
            terms = weights[..., None].astype(np.float64) * recv.astype(np.float64)
            return np.where(takes_part[..., None], terms, 0).sum(axis=1).astype(np.float32)


class ByExpert(NumpyWorld):
    """Adds a token's rows in the order of its expert ids."""

    def combine_of(self, rank, *given):
        self.order = np.argsort(self.topk_ids[rank], axis=1, kind="stable")
        return super().combine_of(rank, *given)

    def reduce(self, recv, weights, takes_part):
        token = np.arange(len(recv))[:, None]
        return super().reduce(recv[token, self.order], weights[token, self.order], takes_part[token, self.order])


class WeightsByExpert(ByExpert):
    """Uses a token's weights in the order of its expert ids."""

    def reduce(self, recv, weights, takes_part):
        return NumpyWorld.reduce(self, recv, np.take_along_axis(np.nan_to_num(weights), self.order, 1), takes_part)


class RanksFirst(NumpyWorld):
    """Sums a rank's rows of a token before sending."""

    def combine_of(self, rank, *given):
        self.owner = self.topk_ids[rank] // self.cfg.n_local_experts
        return super().combine_of(rank, *given)

    def part(self, acc, dtype):
        return acc

    def reduce(self, recv, weights, takes_part):
        parts = [
            super(RanksFirst, self).reduce(recv, weights, takes_part & (self.owner == rank))
            for rank in range(self.cfg.n_ranks)
        ]
        total = np.zeros_like(parts[0])
        with np.errstate(invalid="ignore"):
            for part in parts:
                total += self.part(part, recv.dtype)
        return total


class RanksFirstRounded(RanksFirst):
    def part(self, acc, dtype):
        return acc.astype(dtype).astype(np.float32)


class BeginsWithTheProduct(NumpyWorld):
    def reduce(self, recv, weights, takes_part):
        acc = super().reduce(recv, weights, takes_part)
        negative = (np.signbit(recv) == (weights >= 0)[..., None]) | ~takes_part[..., None]
        return np.where((acc == 0) & negative.all(axis=1), np.float32(-0.0), acc)


class SubnormalsAreZero(NumpyWorld):
    """Compiled with flush to zero."""

    def reduce(self, recv, weights, takes_part):
        acc = super().reduce(recv, weights, takes_part)
        if recv.dtype != ml_dtypes.bfloat16:
            return acc
        least = ml_dtypes.finfo(recv.dtype).smallest_normal
        with np.errstate(invalid="ignore"):
            return np.where(np.abs(acc.astype(recv.dtype)) < least, np.float32(0), acc)


class SumIsNeverNan(NumpyWorld):
    def reduce(self, recv, weights, takes_part):
        acc = super().reduce(recv, weights, takes_part)
        return np.where(np.isnan(acc), np.float32(0), acc)


class NeverCleared(NumpyWorld):
    """Adds to the accumulator of the round before."""

    def combine_of(self, rank, *given):
        self.key = rank
        return super().combine_of(rank, *given)

    def reduce(self, recv, weights, takes_part):
        sums = self.__dict__.setdefault("sums", {})
        self.begin = sums.get(self.key)
        sums[self.key] = super().reduce(recv, weights, takes_part)
        return sums[self.key]

    def add(self, acc, weight, value):
        if self.begin is not None and self.begin.shape == acc.shape:
            acc, self.begin = self.begin, None
        return super().add(acc, weight, value)


class OutputsBeside(NumpyWorld):
    """Counts rows from one where it reads the experts' outputs."""

    def combine(self, expert_outputs, *given):
        return super().combine([np.roll(rows, -1, axis=0) for rows in expert_outputs], *given)


class LastSumsLost(NumpyWorld):
    """Sums whole vectors of 96 columns; the others hold whatever was there."""

    def combine_of(self, *given):
        sums = super().combine_of(*given)
        whole = sums.shape[-1] // 96 * 96
        sums[..., whole:] = np.random.default_rng(0).standard_normal(sums[..., whole:].shape)
        return sums


class WeightsRounded(NumpyWorld):
    def weights(self, weights):
        return weights.astype(ml_dtypes.bfloat16).astype(np.float32)


class SumStopsAtMinusOne(NumpyWorld):
    """Ends a token's sum at its first -1."""

    def takes_part(self, ids):
        return np.logical_and.accumulate(ids >= 0, axis=1)
