"""What dispatch and combine make of whole numbers, by torch's indexing: of one rank, which knows the data of all.

Numbers are so small that every sum is exact, in whatever order.
"""

import torch


class ExpertsRoute:
    """Of HybridEPDispatch. maps: bool [T, E] of each rank; budget: P, or None. num_rows: P of each rank."""

    def __init__(self, maps, n_local, me, room=None):
        self.maps, self.n_local, self.me = maps, n_local, me
        self.held = [sum(int(m.sum()) for *_, m in self._segments(rank)) for rank in range(len(maps))]
        self.budget = None if room is None else max(self.held) + room
        self.num_rows = self.held if room is None else [self.budget] * len(maps)

    def _segments(self, rank):
        """(local expert, src_rank, bool [T]: its tokens) in the order of a rank's rows."""
        for e in range(self.n_local):
            for source, routing_map in enumerate(self.maps):
                yield e, source, routing_map[:, rank * self.n_local + e]

    def times(self):
        """float32 [T, 1]: to how many experts each of this rank's tokens goes."""
        return self.maps[self.me].sum(1).float().unsqueeze(1)

    def per_expert(self):
        """int64 [L]: rows of each local expert."""
        counts = torch.zeros(self.n_local, dtype=torch.int64)
        for e, _, tokens in self._segments(self.me):
            counts[e] += int(tokens.sum())
        return counts

    def received(self, of_tokens):
        """Rows [P, ...] that come here, of what every rank's tokens have."""
        return self._filled(torch.cat([of_tokens[source][tokens] for _, source, tokens in self._segments(self.me)]))

    def received_probs(self, probs):
        """float32 [P], of probs [T, E]."""
        return self._filled(
            torch.cat(
                [probs[source][tokens][:, self.me * self.n_local + e] for e, source, tokens in self._segments(self.me)]
            )
        )

    def _filled(self, rows):
        return torch.cat([rows, rows.new_zeros((self.num_rows[self.me] - len(rows), *rows.shape[1:]))])

    def returned(self, rows):
        """float32 [T, H]: sums of the rows [P, H] that all ranks have."""
        out = torch.zeros((len(self.maps[self.me]), *rows[0].shape[1:]), device=rows[0].device)
        for rank, of_rank in enumerate(rows):
            first = 0
            for _, source, tokens in self._segments(rank):
                end = first + int(tokens.sum())
                if source == self.me:
                    out[tokens] += of_rank[first:end].float()
                first = end
        return out


class RowsRoute(ExpertsRoute):
    """Of FusedDispatch, whose rows are those of ranks. ids: int64 [T, K] of each rank, global or -1."""

    def __init__(self, ids, experts_a_rank, me):
        self.ids, self.experts_a_rank = ids, experts_a_rank
        rank_of = [torch.where(i >= 0, i // experts_a_rank, -1) for i in ids]
        super().__init__([torch.stack([(r == rank).any(1) for rank in range(len(ids))], 1) for r in rank_of], 1, me)

    def local_ids(self):
        """int64 [N, K] of the rows that come here."""
        ids, n = self.received(self.ids), self.experts_a_rank
        return torch.where((ids >= 0) & (ids // n == self.me), ids - self.me * n, -1)
