"""The protocol with its memory in plain Python loops, written from the specification alone, by halves.

All hooks are right here; a wrong implementation overrides one of them. It serves bf16 and blockwise FP8. Only
encoding and decoding of payloads use the reference's format objects.
"""

import numpy as np
from numpy_world import NumpyWorld

from epmoe_ref import format_of

MAX_FINITE, READY = 2**64 - 1, 1024


class WordWorld(NumpyWorld):
    """All ranks' memory as arrays; slots are claimed in descending token order."""

    token_formats = ("bf16", "fp8_blockwise")
    options = frozenset({"unweighted", "fused_shared_expert"})

    def __init__(self, cfg):
        super().__init__(cfg)
        fmt, n, L = format_of(cfg), cfg.n_ranks, cfg.n_local_experts
        self.fmt, self.L = fmt, L
        tokens, E = cfg.max_tokens_per_rank, cfg.n_experts
        self.recv_buf = np.full((n, L, n, tokens, fmt.msg_size()), 0x5A, np.uint8)
        self.back_buf = np.full((n, tokens, cfg.top_k, cfg.hidden * cfg.combine_itemsize), 0x5A, np.uint8)
        self.recv_count = np.full((n, L, n), MAX_FINITE, np.uint64)
        self.back_count = np.full((n, L, n), MAX_FINITE, np.uint64)
        self.words = np.zeros((n, 8 * E + 12), np.int32)
        self.at = {
            "reserved": 0,
            "finished": E,
            "completed": 2 * E,
            "A": 2 * E + 8,
            "B": 4 * E + 8,
            "C": 5 * E + 8,
            "D": 6 * E + 8,
            "E": 6 * E + 9,
            "F": 6 * E + 10,
            "G": 6 * E + 11,
            "flags": 6 * E + 12,
        }

    def buffers(self):
        return {
            "dispatch_recv_buf": self.recv_buf,
            "dispatch_recv_count": self.recv_count,
            "combine_recv_buf": self.back_buf,
            "combine_recv_count": self.back_count,
        }

    def counters(self):
        return self.words

    # the four halves

    def dispatch_async(self, input_tokens, topk_ids):
        self.tokens, self.topk_ids = input_tokens, topk_ids
        for rank in range(self.cfg.n_ranks):
            payloads = self.fmt.encode(input_tokens[rank])
            for expert in range(self.cfg.n_experts):
                dst, local = divmod(expert, self.L)
                i = local * self.cfg.n_ranks + dst
                pairs = self.pairs(topk_ids[rank], expert)
                for n, (t, k) in enumerate(pairs):
                    slot = self.claim(rank, i, n)
                    at = self.place(rank, dst, local, slot)
                    if at is not None:
                        self.write(at, self.payload(payloads, t, n), self.trailer(rank, t, k))
                    self.words[rank, self.at["finished"] + i] += 1
                self.signal(rank, dst, local, len(pairs))
                self.complete(rank, dst)
            self.end_of_dispatch_async(rank)

    def dispatch_wait(self):
        return [self.wait_of(rank) for rank in range(self.cfg.n_ranks)]

    def wait_of(self, rank):
        cfg, L = self.cfg, self.L
        counts = self.recv_count[rank].astype(np.int64)
        shared = len(self.tokens[rank]) if cfg.fused_shared_expert else None
        sizes = ([shared] if shared is not None else []) + counts.sum(axis=1).tolist()
        padded = [size + -size % self.row_padding() for size in sizes]
        offsets = np.concatenate([[0], np.cumsum(padded)]).astype(np.uint32)
        payloads = np.zeros((offsets[-1], self.fmt.msg_size()), np.uint8)
        info = np.full((offsets[-1], 2), -1, np.int32)
        if shared:
            payloads[:shared, : self.fmt.token_size()] = self.fmt.encode(self.tokens[rank])
        for local in range(L):
            row = int(offsets[local + (shared is not None)])
            for src in range(cfg.n_ranks):
                for slot in range(counts[local, src]):
                    message = payloads[row] = self.recv_buf[rank, local, src, slot]
                    ids = message[self.fmt.topk_info_offset() :][: 2 * cfg.top_k].view("<u2").tolist()
                    t = int(message[self.fmt.src_info_offset() :][:4].view("<i4")[0])
                    info[row] = t, ids.index(rank * L + local) if rank * L + local in ids else -1
                    row += 1
                i = local * cfg.n_ranks + src
                self.words[rank, self.at["A"] + 2 * i :][:2] = self.entry(rank, row, counts, local, src, offsets)
                self.words[rank, self.at["B"] + i] = counts[local, : src + 1].sum()
        self.words[rank, self.at["C"] :][:L] = 7
        self.reset_after_dispatch(rank)
        values, scales = self.fmt.decode(payloads)
        return dict(
            output_tokens=values,
            output_scales=None if scales is None else scales.T,
            row_offsets=offsets,
            expert_ids=np.arange(len(sizes), dtype=np.int32),
            src_info=info,
            recv_count=counts,
        )

    def combine_async(self, expert_outputs, dispatched):
        self.outputs = expert_outputs
        for rank in range(self.cfg.n_ranks):
            rows = expert_outputs[rank].view(np.uint8)
            for local in range(self.L):
                for src in range(self.cfg.n_ranks):
                    i = local * self.cfg.n_ranks + src
                    end = int(dispatched[rank]["row_offsets"][local + self.cfg.fused_shared_expert])
                    end += int(dispatched[rank]["recv_count"][local, : src + 1].sum())
                    count = int(dispatched[rank]["recv_count"][local, src])
                    for row in range(end - count, end):
                        t, k = dispatched[rank]["src_info"][row]
                        at = self.place_of_row(src, t, k)
                        if at is not None:
                            self.back_buf[at] = rows[row]
                    self.signal_back(rank, src, local, count)
                    self.words[rank, self.at["finished"] + i] = count  # allowed until combine_wait has ended

    def combine_wait(self, router_weights):
        out = []
        for rank, ids in enumerate(self.topk_ids):
            recv = self.back_buf[rank, : len(ids)].view(self.outputs[rank].dtype)
            recv = np.where((ids >= 0)[..., None], recv, np.zeros((), recv.dtype))
            if router_weights is None:
                out.append(recv)
            else:
                one = self.reduce(recv, router_weights[rank], ids >= 0).astype(recv.dtype)
                if self.cfg.fused_shared_expert:
                    shared = self.outputs[rank][: len(ids)].astype(np.float32)
                    one = (one.astype(np.float32) + shared).astype(recv.dtype)
                out.append(one)
            self.reset_after_combine(rank)
        return out

    # hooks

    def claim(self, rank, i, n):
        self.words[rank, i] += 1
        return int(self.words[rank, i]) - 1

    def place(self, rank, dst, local, slot):
        return dst, local, rank, slot

    def payload(self, payloads, t, n):
        return payloads[t]

    def trailer(self, rank, t, k):
        return self.src_info(rank, t, k), self.topk_info(self.topk_ids[rank][t])

    def src_info(self, rank, t, k):
        return t

    def topk_info(self, ids):
        return np.where(ids < 0, 65535, ids)

    def write(self, at, payload, trailer):
        token, ids = trailer
        message = self.recv_buf[at]
        message[: len(payload)] = payload
        message[self.fmt.src_info_offset() :][:4] = np.array([token], "<i4").view(np.uint8)
        message[self.fmt.topk_info_offset() :][: 2 * self.cfg.top_k] = np.asarray(ids).astype("<u2").view(np.uint8)

    def signal(self, rank, dst, local, count):
        self.recv_count[dst, local, rank] = count

    def complete(self, rank, dst):
        self.words[rank, self.at["completed"] + dst] += 1

    def end_of_dispatch_async(self, rank):
        pass

    def entry(self, rank, end, counts, local, src, offsets):
        return READY + end, counts[local, src]

    def reset_after_dispatch(self, rank):
        self.recv_count[rank] = MAX_FINITE
        self.clear(rank, "reserved", "finished", "completed", "D")

    def place_of_row(self, src, t, k):
        return src, t, k

    def signal_back(self, rank, src, local, count):
        self.back_count[src, local, rank] = count

    def reset_after_combine(self, rank):
        self.back_count[rank] = MAX_FINITE
        self.clear(rank, "finished", "A", "flags")

    def clear(self, rank, *names):
        E = self.cfg.n_experts
        sizes = {"reserved": E, "finished": E, "completed": 8, "A": 2 * E, "D": 4, "flags": 2 * E}
        for name in names:
            self.words[rank, self.at[name] :][: sizes[name]] = 0
