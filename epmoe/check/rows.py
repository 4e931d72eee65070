"""fused_a2a cases, and how one is run on a RowsImplementation: dispatch to ranks, made-up rows, combine, twice."""

from dataclasses import dataclass

import numpy as np

from epmoe.check import random_bits
from epmoe.check.compare_rows import compare_combined_rows, compare_received
from epmoe.check.difference import Difference
from epmoe_ref import fused_a2a

X, ROUTING, GAPS, PROBS, RETURNED = range(100, 105)


@dataclass(frozen=True)
class RowsCase:
    """One world of fused_a2a; routing as in epmoe.check.cases.Case."""

    name: str
    seed: int
    n_tokens: tuple
    n_experts: int
    top_k: int
    hidden: int
    routing: str = "spread"
    rounds: int = 2

    def x(self, round_):
        return [random_bits.floats("bf16", random_bits.stream(self.seed, round_, X, rank, np.arange(n)), self.hidden)
                for rank, n in enumerate(self.n_tokens)]

    def token_indices(self, round_):
        """int64 [T, K] over ranks."""
        return [self._indices(round_, rank, n) for rank, n in enumerate(self.n_tokens)]

    def _indices(self, round_, rank, n):
        ids = random_bits.permutations(random_bits.stream(self.seed, round_, ROUTING, rank), n, self.n_experts)
        if self.routing == "hot":
            ids = np.argsort(np.where(np.arange(self.n_experts) == 0, -1, ids), axis=1, kind="stable")
        ids = ids[:, :self.top_k].copy()
        gaps = random_bits.words(random_bits.stream(self.seed, round_, GAPS, rank), ids.size).reshape(ids.shape)
        if self.routing == "gaps":
            ids[gaps % np.uint64(3) == 0] = -1
        return np.full_like(ids, -1) if self.routing == "dropped" else ids

    def token_probs(self, round_):
        """float32 [T, K] over ranks, not zero in slots of -1."""
        return [np.abs(random_bits.floats("fp32", random_bits.stream(self.seed, round_, PROBS, rank), n * self.top_k,
                                          exponents=(-5, -1))).reshape(n, self.top_k)
                for rank, n in enumerate(self.n_tokens)]

    def returned(self, round_, rank, rows):
        """What the experts of a rank made of its rows: bf16 [N, hidden]."""
        return random_bits.floats("bf16", random_bits.stream(self.seed, round_, RETURNED, rank, rows[:, 0], rows[:, 1]),
                                  self.hidden)


def cases(n_ranks=4):
    """The fused_a2a cases for a world of n_ranks."""
    n = 3 * n_ranks
    uneven = tuple((8, 5, 1, 6, 3, 7, 2, 4)[rank % 8] for rank in range(n_ranks))
    one_empty = tuple(0 if rank == n_ranks - 1 else count for rank, count in enumerate(uneven))
    listed = [
        ("uneven ranks", uneven, n, min(4, n), 128), ("slots without an expert", uneven, n, min(4, n), 128, "gaps", 3),
        ("a rank without tokens", one_empty, n, min(4, n), 128, "gaps"),
        ("no slot has an expert", uneven, n, min(4, n), 128, "dropped"), ("a hot expert", uneven, n, 2, 128, "hot"),
        ("one slot", uneven, n, 1, 256), ("as many slots as experts", uneven, n, n, 128),
    ]
    return [RowsCase(entry[0], seed, *entry[1:]) for seed, entry in enumerate(listed)]


def run_case(implementation, case, ranks, not_given):
    """Differences of the first round that has any, over the ranks of this process; nothing may be left out."""
    world = implementation.make()
    try:
        for round_ in range(case.rounds):
            found = _run_round(world, implementation.per_rank, case, round_, ranks)
            if any(ranks.gather(bool(found))):
                return found
        return []
    finally:
        world.close()


def _run_round(world, per_rank, case, round_, ranks):
    inputs = case.x(round_), case.token_indices(round_), case.token_probs(round_)
    *want, handle_want = fused_a2a.dispatch_forward(*inputs, case.n_experts)
    rows = [np.stack(pair, axis=1) for pair in zip(handle_want.src_rank, handle_want.src_token)]
    given = [[array.copy() for array in argument] for argument in inputs]
    if per_rank:
        rank, = ranks.here
        *mine, handle = world.dispatch(*(argument[rank] for argument in given), case.n_experts)
        got = [{rank: value} for value in mine]
    else:
        *got, handle = world.dispatch(*given, case.n_experts)
    found = _written_to(("x", "token_indices", "token_probs"), inputs, given, ranks)
    for rank in ranks.here:
        found += compare_received(rank, rows[rank], [x[rank] for x in got], [x[rank] for x in want])
    if any(ranks.gather(bool(found))):
        return found
    returned = [case.returned(round_, rank, r) for rank, r in enumerate(rows)]
    combined_want = fused_a2a.combine_forward(returned, handle_want)
    given = [array.copy() for array in returned]
    if per_rank:
        combined = {rank: world.combine(given[rank], handle)}
    else:
        combined = world.combine(given, handle)
    found = _written_to(("x",), (returned,), (given,), ranks)
    for rank in ranks.here:
        found += compare_combined_rows(rank, combined[rank], combined_want[rank])
    return found


def _written_to(names, ours, given, ranks):
    return [Difference(name, "was written to", rank=rank, rule="inputs are read only")
            for name, a, b in zip(names, ours, given) for rank in ranks.here if a[rank].tobytes() != b[rank].tobytes()]
