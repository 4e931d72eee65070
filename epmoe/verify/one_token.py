"""Follows one token to the experts that its router chose, and back to its weighted sum."""

from dataclasses import dataclass

import numpy as np
from rich.table import Table


@dataclass(frozen=True)
class Way:
    """One token of one rank.

    pairs: for each k, (expert, its rank, the row there, router weight, element 0 of the expert's result), or None
    if there is no expert. combined: element 0 of combine's result; dtype: its type.
    """

    src_rank: int
    token: int
    pairs: list
    combined: float
    dtype: str

    def says(self):
        """The sentence above the table."""
        ranks = len({pair[1] for pair in self.pairs if pair})
        experts = sum(pair is not None for pair in self.pairs)
        return (
            f"Token {self.token} of rank {self.src_rank} goes to {experts} experts on {ranks} "
            f"rank{'s' if ranks > 1 else ''}. Each expert is an MLP with its own random weights. result[0] is the first number "
            "that it returns; product is weight times result[0]."
        )

    def table(self):
        """A table with a line for each k."""
        table = Table()
        for name in ("k", "expert", "on rank", "as row", "weight", "result[0]", "product"):
            table.add_column(name, justify="right", style="bold" if name == "k" else "")
        for k, pair in enumerate(self.pairs):
            if pair is None:
                table.add_row(str(k), "-1", "-")
            else:
                expert, rank, row, weight, result = pair
                # one digit fewer in each step, so that the reader who multiplies and adds finds the same
                cells = (expert, rank, row, f"{weight:.6f}", f"{result:.6f}", f"{weight * result:.5f}")
                table.add_row(str(k), *map(str, cells))
        return table

    def total(self):
        """The sum of the products, and combine's result."""
        total = sum(weight * result for _, _, _, weight, result in filter(None, self.pairs))
        return f"The products add up to {total:.4f}; combine returned {self.combined:.4f}, its nearest {self.dtype}."


def of_round(case, r):
    """One token of a Round, or None if rows are not weighted, or ranks are in other processes."""
    cfg = case.cfg
    if case.weights != "array" or case.epilogue or cfg.fused_shared_expert or cfg.skip_a2a:
        return None
    if len(r.seen) < cfg.n_ranks or not any((ids >= 0).any() for ids in r.routed.topk_ids):
        return None
    rank, token = max(
        ((rank, token) for rank, ids in enumerate(r.routed.topk_ids) for token in range(len(ids))),
        key=lambda place: _interest(cfg, r.routed.topk_ids[place[0]][place[1]]),
    )
    weights = r.routed.topk_weights[rank][token]
    pairs = []
    for k, expert in enumerate(r.routed.topk_ids[rank][token].tolist()):
        if expert < 0:
            pairs.append(None)
            continue
        owner = cfg.owner(expert)
        row = row_of(r.seen[owner], cfg.local_expert(expert), rank, token, k)
        result = float(r.expert_outputs[owner][row, 0])
        pairs.append((expert, owner, row, float(weights[k]), result))
    return Way(rank, token, pairs, float(r.combined[rank][token, 0]), cfg.combine_dtype)


def row_of(d, local_expert, src_rank, token, k):
    """The row of a Dispatched that holds a pair, found among the rows of its (local expert, src_rank) segment."""
    start = int(d.row_offsets[local_expert]) + int(d.recv_count[local_expert, :src_rank].sum())
    count = int(d.recv_count[local_expert, src_rank])
    here = (np.asarray(d.src_info)[start : start + count] == (token, k)).all(axis=1)
    return start + int(np.argmax(here))


def _interest(cfg, ids):
    """Prefer a token with an id of -1, then one that visits many ranks."""
    chosen = ids[ids >= 0]
    return len(chosen) > 1, bool((ids < 0).any()), len(np.unique(cfg.owner(chosen))), len(chosen)
