"""Dispatches with one common mistake each."""

import numpy as np
from numpy_world import NumpyWorld


class SlotOrder(NumpyWorld):
    """Claims slots in one order and writes payloads in another."""

    def payload_order(self, pairs):
        return pairs[::-1]


class RankOrder(NumpyWorld):
    """Puts the own rank's rows first for every expert."""

    def rank_order(self, rank):
        return [(rank + i) % self.cfg.n_ranks for i in range(self.cfg.n_ranks)]


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


class SrcInfoSwapped(NumpyWorld):
    def info(self, token, k):
        return k, token


class StaleRows(NumpyWorld):
    """Leaves old buffer contents in every third row."""

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


class WritesInput(NumpyWorld):
    """Cleans ids in the caller's array."""

    def dispatch(self, input_tokens, topk_ids):
        for ids in topk_ids:
            ids[ids < 0] = self.cfg.n_experts
        return super().dispatch(input_tokens, topk_ids)


class Raises(NumpyWorld):
    def dispatch(self, input_tokens, topk_ids):
        raise IndexError("index 12 is out of bounds")


class LastTokenLost(NumpyWorld):
    def pairs(self, ids, expert):
        return [(t, k) for t, k in super().pairs(ids, expert) if t != len(ids) - 1]


class FirstSlotOnly(NumpyWorld):
    def pairs(self, ids, expert):
        return [(t, k) for t, k in super().pairs(ids, expert) if k == 0]


class ExpertsInTurn(NumpyWorld):
    """Deals experts to ranks in turn."""

    def seen(self, ids):
        cfg = self.cfg
        return np.where(ids < 0, ids, ids % cfg.n_ranks * cfg.n_local_experts + ids // cfg.n_ranks)


class OtherRanksPayload(NumpyWorld):
    """Reads tokens from the next rank's array, as far as it goes."""

    def dispatch_of(self, rank, input_tokens, topk_ids):
        taken = [a.copy() for a in input_tokens]
        for a, b in zip(taken, [*input_tokens[1:], input_tokens[0]]):
            a[: len(b)] = b[: len(a)]
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


class LastColumnsLost(NumpyWorld):
    """Copies whole vectors of 96 columns, and has no loop for the rest."""

    def left_in_place(self, rank, output_tokens):
        lost = np.zeros_like(output_tokens)
        whole = output_tokens.shape[1] // 96 * 96
        lost[:, :whole] = output_tokens[:, :whole]
        return lost


class RoomForThree(NumpyWorld):
    """Has a fixed capacity for each expert and src_rank."""

    def pairs(self, ids, expert):
        return super().pairs(ids, expert)[:3]


class SortedByToken(NumpyWorld):
    """Merges the src_ranks' rows by token."""

    def dispatch_of(self, rank, *given):
        d = super().dispatch_of(rank, *given)
        ends = np.cumsum(d["recv_count"].sum(axis=1))
        for first, last in zip(d["row_offsets"], d["row_offsets"].astype(int)[:-1] + np.diff([0, *ends])):
            order = first + np.argsort(d["src_info"][first:last, 0], kind="stable")
            for name in ("src_info", "output_tokens"):
                d[name] = d[name].copy()
                d[name][first:last] = d[name][order]
        return d


class StopsAtMinusOne(NumpyWorld):
    """Takes -1 for the end of a token's list."""

    def seen(self, ids):
        return np.where(np.logical_and.accumulate(ids >= 0, axis=1), ids, -1)


class MinusOneLosesTheToken(NumpyWorld):
    def seen(self, ids):
        return np.where((ids < 0).any(axis=1, keepdims=True), -1, ids)


class ScalesByReciprocal(NumpyWorld):
    """Multiplies by the float32 nearest to 1 / 448. The values are right."""

    def encode(self, tokens):
        values, scales = super().encode(tokens)
        if scales is None:
            return values, scales
        absmax = np.abs(tokens.astype(np.float32)).reshape(len(tokens), -1, 128)
        with np.errstate(all="ignore"):
            absmax = np.maximum(np.fmax.reduce(absmax, axis=2, initial=0), np.float32(1e-4))
        return values, self.scale_layout(absmax * (np.float32(1) / np.float32(448)))


class CountsDescending(NumpyWorld):
    def dispatch_of(self, *given):
        d = super().dispatch_of(*given)
        return d | {"recv_count": d["recv_count"][:, ::-1]}


class StaleWhenEmpty(NumpyWorld):
    """Returns before anything is written if no row comes."""

    def dispatch_of(self, rank, *given):
        kept, d = self.__dict__.setdefault("kept", {}), super().dispatch_of(rank, *given)
        kept[rank] = kept.get(rank, d) if not len(d["src_info"]) else d
        return kept[rank]


class OneBuffer(NumpyWorld):
    """Receives for all ranks in the same memory."""

    def left_in_place(self, rank, output_tokens):
        if rank == 0:
            self.buffer = np.zeros((600, self.cfg.hidden), output_tokens.dtype)
        self.buffer[: len(output_tokens)] = output_tokens
        return self.buffer[: len(output_tokens)]


class UsualNan(NumpyWorld):
    def left_in_place(self, rank, output_tokens):
        return np.where(np.isnan(output_tokens), np.array(np.nan, output_tokens.dtype), output_tokens)


class NanInAbsmax(NumpyWorld):
    def absmax(self, groups):
        return np.abs(groups).max(axis=2, initial=np.float32(0))


class TimesReciprocal(NumpyWorld):
    def divided(self, groups, scales):
        return groups * (np.float32(1) / scales)


class PowersOfTwo(NumpyWorld):
    def absmax(self, groups):
        scales = np.maximum(super().absmax(groups), np.float32(1e-4)) / np.float32(448)
        return np.exp2(np.ceil(np.log2(scales))) * np.float32(448)


class GroupsOf64(NumpyWorld):
    width = 64
