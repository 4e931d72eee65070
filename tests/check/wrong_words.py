"""Implementations with right or nearly right results and wrong memory: one mistake each."""

import numpy as np
from word_world import MAX_FINITE, READY, WordWorld


class CountersNotReset(WordWorld):
    def reset_after_dispatch(self, rank):
        self.recv_count[rank] = MAX_FINITE
        self.clear(rank, "finished", "completed", "D")


class FinishedNotReset(WordWorld):
    def reset_after_dispatch(self, rank):
        self.recv_count[rank] = MAX_FINITE
        self.clear(rank, "reserved", "completed", "D")


class CompletionNotReset(WordWorld):
    def reset_after_dispatch(self, rank):
        self.recv_count[rank] = MAX_FINITE
        self.clear(rank, "reserved", "finished", "D")


class ReservedResetEarly(WordWorld):
    def end_of_dispatch_async(self, rank):
        self.clear(rank, "reserved")


class CompletionCountsPeersOnce(WordWorld):
    def complete(self, rank, dst):
        self.words[rank, self.at["completed"] + dst] = 1


class SignalsNotReset(WordWorld):
    def reset_after_dispatch(self, rank):
        self.clear(rank, "reserved", "finished", "completed", "D")


class SignalsResetToZero(WordWorld):
    def reset_after_combine(self, rank):
        super().reset_after_combine(rank)
        self.back_count[rank] = 0


class SignalsResetInHalf(WordWorld):
    def reset_after_dispatch(self, rank):
        super().reset_after_dispatch(rank)
        self.recv_count[rank] = 2**32 - 1


class NoSignalOfZero(WordWorld):
    def signal(self, rank, dst, local, count):
        if count:
            super().signal(rank, dst, local, count)

    def wait_of(self, rank):
        self.recv_count[rank][self.recv_count[rank] == MAX_FINITE] = 0
        return super().wait_of(rank)


class CountTooLarge(WordWorld):
    def signal(self, rank, dst, local, count):
        super().signal(rank, dst, local, count + 1)


class CountOfAllExperts(WordWorld):
    def signal_back(self, rank, src, local, count):
        self.back_count[src, :, rank] = np.where(
            self.back_count[src, :, rank] == MAX_FINITE, 0, self.back_count[src, :, rank]
        ) + np.uint64(count)


class SignalsAtTheReceiver(WordWorld):
    def signal(self, rank, dst, local, count):
        self.recv_count[dst, local, dst] = count


class LocalExpertIds(WordWorld):
    def topk_info(self, ids):
        return np.where(ids < 0, 65535, ids % self.L)


class SlotForToken(WordWorld):
    def src_info(self, rank, t, k):
        return k


class NoTrailer(WordWorld):
    def write(self, at, payload, trailer):
        self.recv_buf[at][: len(payload)] = payload


class PayloadLate(WordWorld):
    def write(self, at, payload, trailer):
        super().write(at, payload[:0], trailer)


class PayloadOfTheNext(WordWorld):
    def payload(self, payloads, t, n):
        return payloads[t - 1]


class SlotClaimedTwice(WordWorld):
    def claim(self, rank, i, n):
        slot = super().claim(rank, i, n)
        return slot - 1 if n else slot


class SlotSkipped(WordWorld):
    def place(self, rank, dst, local, slot):
        return None if slot == 0 else super().place(rank, dst, local, slot)


class MessageInTheNextSegment(WordWorld):
    def place(self, rank, dst, local, slot):
        return dst, local, (rank + 1) % self.cfg.n_ranks, slot


class MessageAtTheOtherExpert(WordWorld):
    def place(self, rank, dst, local, slot):
        return dst, self.L - 1 - local, rank, slot


class MessageOnTheNextRank(WordWorld):
    def place(self, rank, dst, local, slot):
        return (dst + 1) % self.cfg.n_ranks, local, rank, slot


class ReadyMissing(WordWorld):
    def entry(self, rank, end, counts, local, src, offsets):
        return end, counts[local, src]


class StartRows(WordWorld):
    def entry(self, rank, end, counts, local, src, offsets):
        return READY + end - counts[local, src], counts[local, src]


class RowsWithinTheExpert(WordWorld):
    def entry(self, rank, end, counts, local, src, offsets):
        return READY + counts[local, : src + 1].sum(), counts[local, src]


class PaddingNotCounted(WordWorld):
    def entry(self, rank, end, counts, local, src, offsets):
        before = counts[:local].sum() + counts[local, : src + 1].sum()
        return READY + before + (len(self.tokens[rank]) if self.cfg.fused_shared_expert else 0), counts[local, src]


class SharedRowsNotCounted(WordWorld):
    def entry(self, rank, end, counts, local, src, offsets):
        return READY + end - (offsets[1] if self.cfg.fused_shared_expert else 0), counts[local, src]


class EntryZeroedEarly(WordWorld):
    def reset_after_dispatch(self, rank):
        super().reset_after_dispatch(rank)
        self.clear(rank, "A")


class EntryNotZeroed(WordWorld):
    def reset_after_combine(self, rank):
        self.back_count[rank] = MAX_FINITE
        self.clear(rank, "finished", "flags")


class OnlyHalfZeroed(WordWorld):
    def reset_after_combine(self, rank):
        held = self.words[rank, self.at["A"] :][: self.cfg.n_experts].copy()
        super().reset_after_combine(rank)
        self.words[rank, self.at["A"] :][: self.cfg.n_experts] = held


class FlagsLeftRaised(WordWorld):
    def reset_after_combine(self, rank):
        super().reset_after_combine(rank)
        self.words[rank, self.at["flags"] :][:2] = 1


class ReadyFlagLeftRaised(WordWorld):
    def reset_after_dispatch(self, rank):
        super().reset_after_dispatch(rank)
        self.words[rank, self.at["E"]] = READY


class RowsMissing(WordWorld):
    def place_of_row(self, src, t, k):
        return None if k == 0 else super().place_of_row(src, t, k)


class RowsInAnotherSlot(WordWorld):
    def place_of_row(self, src, t, k):
        return src, t, self.cfg.top_k - 1 - k


class RowsAtTheNextToken(WordWorld):
    def place_of_row(self, src, t, k):
        return src, (t + 1) % len(self.tokens[src]), k
