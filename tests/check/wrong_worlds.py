"""Dispatch and combine with one mistake each, as people make them."""

import ml_dtypes
import numpy as np
from numpy_world import NumpyWorld


class SlotOrder(NumpyWorld):
    """Gives out slots in one order and writes payloads in another."""

    def payload_order(self, pairs):
        return pairs[::-1]


class RankOrder(NumpyWorld):
    """Starts every expert's rows with the own rank's."""

    def rank_order(self, rank):
        return [(rank + i) % self.cfg.n_ranks for i in range(self.cfg.n_ranks)]


class DoubleRounding(NumpyWorld):
    """Accumulates in the output type."""

    def add(self, acc, weight, value):
        return super().add(acc, weight, value).astype(value.dtype).astype(np.float32)


class MinusOneIsZero(NumpyWorld):
    """Clamps ids to the valid range."""

    def seen(self, ids):
        return np.maximum(ids, 0)


class OffByOne(NumpyWorld):
    """Counts rows from one."""

    def row_offsets(self, counts):
        return super().row_offsets(counts) + 1


class ScaleNotTransposed(NumpyWorld):
    def scale_layout(self, scales):
        return scales


class PaddingForgotten(NumpyWorld):
    def row_padding(self):
        return 1


class WeightsTwice(NumpyWorld):
    """The experts' outputs are weighted, and the sum weights them again."""

    def weights(self, weights):
        return weights * weights


class SrcInfoSwapped(NumpyWorld):
    def info(self, token, slot):
        return slot, token


class StaleRows(NumpyWorld):
    """Leaves every third row to what was in the buffer before."""

    def left_in_place(self, rank, output_tokens):
        buffers = self.__dict__.setdefault("buffers", {})
        before = buffers.get(rank)
        output_tokens = output_tokens.copy()
        if before is not None:
            n = min(len(before), len(output_tokens))
            output_tokens[:n:3] = before[:n:3]
        buffers[rank] = output_tokens
        return output_tokens


class GlobalExpertIds(NumpyWorld):
    def expert_ids(self, rank):
        return super().expert_ids(rank) + rank * self.cfg.n_local_experts


class NotFused(NumpyWorld):
    """Rounds the product before it is added."""

    def add(self, acc, weight, value):
        return acc + weight * value.astype(np.float32)


class MinusOneTakesPart(NumpyWorld):
    """Multiplies slots of -1 by their weight, whatever it is."""

    def takes_part(self, ids):
        return np.ones(ids.shape, bool)


class GarbageAtMinusOne(NumpyWorld):
    """Leaves rows of -1 slots as they are without router weights."""

    def unreduced(self, recv, ids):
        recv[ids < 0] = 7
        return recv


class WritesInput(NumpyWorld):
    """Cleans ids in the caller's array."""

    def dispatch(self, input_tokens, topk_ids):
        for ids in topk_ids:
            ids[ids < 0] = self.cfg.n_experts
        return super().dispatch(input_tokens, topk_ids)


class Raises(NumpyWorld):
    def dispatch(self, input_tokens, topk_ids):
        raise IndexError("index 12 is out of bounds")


class Descending(NumpyWorld):
    """Adds the last slot first."""

    def reduce(self, recv, weights, takes_part):
        return super().reduce(recv[:, ::-1], weights[:, ::-1], takes_part[:, ::-1])


class LastTokenLost(NumpyWorld):
    def pairs(self, ids, expert):
        return [(t, k) for t, k in super().pairs(ids, expert) if t != len(ids) - 1]


class FirstSlotOnly(NumpyWorld):
    def pairs(self, ids, expert):
        return [(t, k) for t, k in super().pairs(ids, expert) if k == 0]


class ExpertsInTurn(NumpyWorld):
    """Deals experts to ranks like cards."""

    def seen(self, ids):
        cfg = self.cfg
        return np.where(ids < 0, ids, ids % cfg.n_ranks * cfg.n_local_experts + ids // cfg.n_ranks)


class OtherRanksPayload(NumpyWorld):
    """Takes tokens out of the next rank's array, as far as there are any."""

    def dispatch_of(self, rank, input_tokens, topk_ids):
        taken = [a.copy() for a in input_tokens]
        for a, b in zip(taken, [*input_tokens[1:], input_tokens[0]]):
            a[:len(b)] = b[:len(a)]
        return super().dispatch_of(rank, taken, topk_ids)


class NoFloor(NumpyWorld):
    """Scales are absmax / 448, however small that is."""

    def encode(self, tokens):
        values, scales = super().encode(tokens)
        if scales is None:
            return values, None
        absmax = np.fmax.reduce(np.abs(tokens.astype(np.float32).reshape(len(tokens), -1, 128)), axis=2, initial=0)
        return values, (absmax.T / np.float32(448)).astype(np.float32)


class ReciprocalScales(NumpyWorld):
    def scale_layout(self, scales):
        return super().scale_layout(np.float32(1) / scales)


class NanIsZero(NumpyWorld):
    def encode(self, tokens):
        values, scales = super().encode(tokens)
        return values if scales is None else np.where(np.isnan(values), 0, values).astype(values.dtype), scales


class CutOff(NumpyWorld):
    """Takes the upper half of a float32 for a bf16."""

    def reduce(self, recv, weights, takes_part):
        acc = super().reduce(recv, weights, takes_part)
        if recv.dtype != ml_dtypes.bfloat16:
            return acc
        return (acc.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


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
    """Returns to each rank what the next one should have, where they have as many tokens."""

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
    """Adds a token's slots as its experts come."""

    def combine_of(self, rank, *given):
        self.order = np.argsort(self.topk_ids[rank], axis=1, kind="stable")
        return super().combine_of(rank, *given)

    def reduce(self, recv, weights, takes_part):
        token = np.arange(len(recv))[:, None]
        return super().reduce(recv[token, self.order], weights[token, self.order], takes_part[token, self.order])


class WeightsByExpert(ByExpert):
    """Takes a token's weights as its experts come."""

    def reduce(self, recv, weights, takes_part):
        return NumpyWorld.reduce(self, recv, np.take_along_axis(np.nan_to_num(weights), self.order, 1),
                                 takes_part)


class RanksFirst(NumpyWorld):
    """Adds up what a rank has for a token before it is sent."""

    def combine_of(self, rank, *given):
        self.owner = self.topk_ids[rank] // self.cfg.n_local_experts
        return super().combine_of(rank, *given)

    def part(self, acc, dtype):
        return acc

    def reduce(self, recv, weights, takes_part):
        parts = [super(RanksFirst, self).reduce(recv, weights, takes_part & (self.owner == rank))
                 for rank in range(self.cfg.n_ranks)]
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


class ThroughHalf(NumpyWorld):
    """Sends fp16."""

    def encode(self, tokens):
        values, scales = super().encode(tokens)
        with np.errstate(all="ignore"):
            return (values.astype(np.float16).astype(values.dtype) if scales is None else values), scales


class NeighboursSwapped(NumpyWorld):
    """Takes the upper half of each word first."""

    def encode(self, tokens):
        values, scales = super().encode(tokens)
        if scales is not None:
            return values, scales
        return values.reshape(len(values), -1, 2)[:, :, ::-1].reshape(values.shape), scales


class PadsEveryGroup(NumpyWorld):
    def row_offsets(self, counts):
        return super().row_offsets([n + -n % 16 for n in counts])


class CountsForOffsets(NumpyWorld):
    def row_offsets(self, counts):
        return np.array([0, *counts], np.uint32)


class RowsBeside(NumpyWorld):
    """Counts rows from one where it writes payloads."""

    def left_in_place(self, rank, output_tokens):
        return np.roll(output_tokens, 1, axis=0)


class OutputsBeside(NumpyWorld):
    """Counts rows from one where it reads the experts' outputs."""

    def combine(self, expert_outputs, *given):
        return super().combine([np.roll(rows, -1, axis=0) for rows in expert_outputs], *given)


class LastColumnsLost(NumpyWorld):
    """Copies whole vectors of 96 columns, and has no loop for the rest."""

    def left_in_place(self, rank, output_tokens):
        lost = np.zeros_like(output_tokens)
        whole = output_tokens.shape[1] // 96 * 96
        lost[:, :whole] = output_tokens[:, :whole]
        return lost


class LastSumsLost(NumpyWorld):
    """Sums whole vectors of 96 columns; the others hold whatever was there."""

    def combine_of(self, *given):
        sums = super().combine_of(*given)
        whole = sums.shape[-1] // 96 * 96
        sums[..., whole:] = np.random.default_rng(0).standard_normal(sums[..., whole:].shape)
        return sums


class RoomForThree(NumpyWorld):
    """Has a fixed room for each expert and source rank."""

    def pairs(self, ids, expert):
        return super().pairs(ids, expert)[:3]


class SortedByToken(NumpyWorld):
    """Merges the source ranks' rows by token."""

    def dispatch_of(self, rank, *given):
        d = super().dispatch_of(rank, *given)
        ends = np.cumsum(d["recv_count"].sum(axis=1))
        for first, last in zip(d["row_offsets"], d["row_offsets"].astype(int)[:-1] + np.diff([0, *ends])):
            order = first + np.argsort(d["src_info"][first:last, 0], kind="stable")
            for name in ("src_info", "output_tokens"):
                d[name] = d[name].copy()
                d[name][first:last] = d[name][order]
        return d
