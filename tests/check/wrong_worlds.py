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
