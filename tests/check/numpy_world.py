"""A right dispatch and combine in plain NumPy loops, written only from the protocol; wrong implementations derive from it.

It serves bf16 and blockwise FP8. Rows of a segment are in descending token order, which the protocol leaves free.
"""

import ml_dtypes
import numpy as np

from epmoe.check import Implementation


class NumpyWorld(Implementation):
    """All hooks are right here; a wrong implementation overrides one of them."""

    token_formats = ("bf16", "fp8_blockwise")
    combine_dtypes = ("bf16", "fp16", "fp32")
    options = frozenset({"unweighted"})
    width = 128  # of a scale's group

    def dispatch(self, input_tokens, topk_ids):
        self.topk_ids = topk_ids
        return [self.dispatch_of(rank, input_tokens, topk_ids) for rank in range(self.cfg.n_ranks)]

    def dispatch_of(self, rank, input_tokens, topk_ids):
        cfg = self.cfg
        L = cfg.n_local_experts
        tokens, info, counts, totals = [], [], np.zeros((L, cfg.n_ranks), np.int64), []
        for local_expert in range(L):
            start = len(info)
            for src_rank in self.rank_order(rank):
                pairs = self.pairs(topk_ids[src_rank], rank * L + local_expert)
                counts[local_expert, src_rank] = len(pairs)
                info += [self.info(t, k) for t, k in pairs]
                tokens += [input_tokens[src_rank][t] for t, k in self.payload_order(pairs)]
            totals.append(len(info) - start)
            padding = -totals[-1] % self.row_padding()
            info += [(-1, -1)] * padding
            tokens += [np.zeros(cfg.hidden, ml_dtypes.bfloat16)] * padding
        padded = [n + -n % self.row_padding() for n in totals]
        tokens = np.array(tokens, ml_dtypes.bfloat16).reshape(-1, cfg.hidden)
        output_tokens, output_scales = self.encode(tokens)
        return dict(
            output_tokens=self.left_in_place(rank, output_tokens),
            output_scales=output_scales,
            row_offsets=self.row_offsets(padded),
            expert_ids=self.expert_ids(rank),
            src_info=np.array(info, np.int32).reshape(-1, 2),
            recv_count=counts,
        )

    def rank_order(self, rank):
        return range(self.cfg.n_ranks)

    def pairs(self, ids, expert):
        return [(int(t), int(k)) for t, k in np.argwhere(self.seen(ids) == expert)[::-1]]

    def seen(self, ids):
        return ids

    def payload_order(self, pairs):
        return pairs

    def info(self, token, k):
        return token, k

    def row_padding(self):
        return 4 if self.cfg.token_format == "fp8_blockwise" else 1

    def row_offsets(self, counts):
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)

    def expert_ids(self, rank):
        return np.arange(self.cfg.n_local_experts, dtype=np.int32)

    def left_in_place(self, rank, output_tokens):
        return output_tokens

    def encode(self, tokens):
        if self.cfg.token_format == "bf16":
            return tokens, None
        groups = tokens.astype(np.float32).reshape(len(tokens), -1, self.width)
        with np.errstate(all="ignore"):
            scales = np.maximum(self.absmax(groups), np.float32(1e-4)) / np.float32(448)
            values = np.clip(self.divided(groups, scales[..., None]), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        values = np.where(np.isnan(values), np.uint8(0x7F), values.view(np.uint8)).view(ml_dtypes.float8_e4m3fn)
        return values.reshape(tokens.shape), self.scale_layout(scales)

    def absmax(self, groups):
        return np.fmax.reduce(np.abs(groups), axis=2, initial=np.float32(0))

    def divided(self, groups, scales):
        return groups / scales

    def scale_layout(self, scales):
        return np.ascontiguousarray(scales.T)

    @np.errstate(all="ignore")
    def combine(self, expert_outputs, dispatched, router_weights):
        return [self.combine_of(rank, expert_outputs, dispatched, router_weights) for rank in range(self.cfg.n_ranks)]

    def combine_of(self, rank, expert_outputs, dispatched, router_weights):
        cfg, ids = self.cfg, self.topk_ids[rank]
        recv = np.zeros((len(ids), cfg.top_k, cfg.hidden), expert_outputs[rank].dtype)
        for owner, result in enumerate(dispatched):
            for local_expert, counts in enumerate(result["recv_count"]):
                start = int(result["row_offsets"][local_expert]) + int(counts[:rank].sum())
                for row in range(start, start + int(counts[rank])):
                    t, k = result["src_info"][row]
                    recv[t, k] = expert_outputs[owner][row]
        if router_weights is None:
            return self.unreduced(recv, ids)
        return self.reduce(recv, self.weights(router_weights[rank]), self.takes_part(ids)).astype(recv.dtype)

    def unreduced(self, recv, ids):
        return recv

    def weights(self, weights):
        return weights

    def takes_part(self, ids):
        return ids >= 0

    def reduce(self, recv, weights, takes_part):
        acc = np.zeros(recv[:, 0].shape, np.float32)
        for k in range(self.cfg.top_k):
            with np.errstate(invalid="ignore"):
                added = self.add(acc, weights[:, k, None], recv[:, k])
            acc = np.where(takes_part[:, k, None], added, acc)
        return acc

    def add(self, acc, weight, value):
        """One fused multiply-add: a float64 sum, rounded to odd so that the rounding to float32 is the only one."""
        product = weight.astype(np.float64) * value.astype(np.float64)
        total = acc.astype(np.float64) + product
        part = total - product
        error = (acc - part) + (product - (total - part))
        even = total.view(np.int64) & 1 == 0
        toward = np.where(error > 0, np.inf, -np.inf)
        odd = np.where((error != 0) & even, np.nextafter(total, toward), total)
        return odd.astype(np.float32)
