"""fused_a2a (Megatron's names) as lists of records: rows travel as (src_rank, token), sums are exact, then rounded.

Values are bit patterns of `dtype` ("bf16", "fp16", "fp32"); ranks' arguments are nested lists.
"""

import exact_float32 as f32
from exact_codes import OUTPUT_TYPES


def rounded_sum(rows, kind, hidden):
    """Float32 sum of rows of bits in the given order, from +0.0; rounded to the type once, at the end."""
    sums = [0] * hidden
    for row in rows:
        sums = [f32.add(acc, kind.from_bits(bits)) for acc, bits in zip(sums, row)]
    return [kind.to_bits(x) for x in sums]


class RankRows:
    """FusedDispatch: one row per (token, rank that has one of its experts)."""

    def __init__(self, token_indices, num_experts):
        self.n_ranks = len(token_indices)
        self.local = num_experts // self.n_ranks
        self.indices = token_indices
        self.rows = [
            [
                (src, token)
                for src in range(self.n_ranks)
                for token, experts in enumerate(token_indices[src])
                if any(e != -1 and e // self.local == rank for e in experts)
            ]
            for rank in range(self.n_ranks)
        ]

    def moved(self, x):
        """Each rank's rows of x: dispatch forward, combine backward."""
        return [[x[src][token] for src, token in rows] for rows in self.rows]

    def local_indices(self):
        return [
            [
                [e % self.local if e != -1 and e // self.local == rank else -1 for e in self.indices[src][token]]
                for src, token in rows
            ]
            for rank, rows in enumerate(self.rows)
        ]

    def local_probs(self, probs):
        return [
            [
                [
                    p if e != -1 and e // self.local == rank else 0
                    for e, p in zip(self.indices[src][token], probs[src][token])
                ]
                for src, token in rows
            ]
            for rank, rows in enumerate(self.rows)
        ]

    def tokens_per_expert(self):
        return [[sum(indices.count(e) for indices in rows) for e in range(self.local)] for rows in self.local_indices()]

    def returned(self, x, kind, width):
        """Sum over ranks ascending of the rows of each token: combine forward, dispatch backward."""
        return [
            [
                rounded_sum(
                    [x[rank][rows.index((src, token))] for rank, rows in enumerate(self.rows) if (src, token) in rows],
                    kind,
                    width,
                )
                for token in range(len(self.indices[src]))
            ]
            for src in range(self.n_ranks)
        ]


class ExpertRows:
    """HybridEP: one row per (token, local expert), expert-major, each expert's rows padded."""

    def __init__(self, routing_map, num_local_experts, num_permuted_tokens, pad_multiple, p2p_world_size):
        self.n_ranks, self.local, self.routing = len(routing_map), num_local_experts, routing_map
        self.world = p2p_world_size or self.n_ranks
        pad = pad_multiple or 1
        self.rows, self.tokens_per_expert, self.overflow = [], [], []
        for rank in range(self.n_ranks):
            rows, ends = [], []
            for e in range(rank * self.local, (rank + 1) * self.local):
                rows += [
                    (src, token, e)
                    for src in range(self.n_ranks)
                    for token, chosen in enumerate(routing_map[src])
                    if chosen[e]
                ]
                rows += [None] * (-(len(rows) - (ends[-1] if ends else 0)) % pad)
                ends.append(len(rows))
            total = len(rows)
            size = total if num_permuted_tokens is None else num_permuted_tokens
            clipped = [min(end, size) for end in ends]
            self.tokens_per_expert.append([end - start for start, end in zip([0] + clipped, clipped)])
            self.overflow.append(int(total > size))
            self.rows.append((rows + [None] * size)[:size])

    def moved(self, x, hidden):
        return [[[0] * hidden if row is None else x[row[0]][row[1]] for row in rows] for rows in self.rows]

    def probs(self, probs):
        return [[0 if row is None else probs[row[0]][row[1]][row[2]] for row in rows] for rows in self.rows]

    def probs_back(self, grad):
        out = [[[0] * len(chosen) for chosen in tokens] for tokens in self.routing]
        for rank, rows in enumerate(self.rows):
            for row, g in zip(rows, grad[rank]):
                if row is not None:
                    out[row[0]][row[1]][row[2]] = g
        return out

    def returned(self, x, kind, hidden):
        """Local experts ascending -> type, ranks ascending (of a p2p world, then worlds) -> type."""
        by_token = {}
        for rank, rows in enumerate(self.rows):
            for place, row in enumerate(rows):
                if row is not None:
                    by_token.setdefault(row[:2], {}).setdefault(rank, []).append(x[rank][place])
        out = []
        for src in range(self.n_ranks):
            out.append([])
            for token in range(len(self.routing[src])):
                partial = {
                    rank: rounded_sum(rows, kind, hidden) for rank, rows in by_token.get((src, token), {}).items()
                }
                worlds = [
                    [partial[r] for r in sorted(partial) if r // self.world == w]
                    for w in range(self.n_ranks // self.world)
                ]
                sums = [rounded_sum(rows, kind, hidden) for rows in worlds]
                out[-1].append(sums[0] if len(sums) == 1 else rounded_sum(sums, kind, hidden))
        return out


def kind_of(dtype):
    return OUTPUT_TYPES[dtype]
