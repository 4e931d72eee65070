"""Which token each row holds, when a token is sent once for each of its experts."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class HybridHandle:
    """The routing of one `hybrid_dispatch_forward`, for any number of combines and cached dispatches.

    It depends only on the routing map and the options, so data of another hidden size or dtype may use it.
    """

    num_local_experts: int
    """L, experts on a rank."""
    p2p_world_size: int
    """Consecutive ranks whose sums are rounded together."""
    num_permuted_tokens: int | None
    """P, if the caller gave it."""
    pad_multiple: int
    """An expert's number of rows is rounded up to a multiple of this. 0: no rounding."""
    num_tokens: tuple[int, ...]
    """T of each rank."""
    row_of: list[np.ndarray]
    """Over src_ranks: int64 [T, E], the pair's row on the expert's rank. -1 if not routed, or dropped."""
    src_rank: list[np.ndarray]
    """Over ranks: int64 [P], the rank a row came from; -1 for rows without a token."""
    src_token: list[np.ndarray]
    """Over ranks: int64 [P], the row's token on that rank; -1 for rows without a token."""
    local_expert: list[np.ndarray]
    """Over ranks: int64 [P], the local expert a row is for; -1 for rows without a token."""
    tokens_per_expert: list[np.ndarray]
    """Over ranks: int64 [L], rows of each expert, padding included, after dropping."""
    overflow: list[np.ndarray]
    """Over ranks: int32 [1], 1 where the padded total exceeded P, else 0."""

    @property
    def n_ranks(self) -> int:
        """R, ranks of the world."""
        return len(self.num_tokens)

    @property
    def num_rows(self) -> list[int]:
        """P of each rank."""
        return [len(rows) for rows in self.src_token]


def hybrid_handle(routing_map, num_local_experts, num_permuted_tokens, pad_multiple, p2p_world_size) -> HybridHandle:
    """The handle of a routing map.

    routing_map: over ranks, bool [T, E], checked. Rows of a rank are grouped by expert, then ordered by src_rank, then
    token. Each expert's segment is rounded up to pad_multiple (0: no rounding). With num_permuted_tokens the rank has
    exactly that many rows. Rows beyond it are dropped in expert-major order, and missing rows have no token.
    """
    n_ranks, num_tokens = len(routing_map), tuple(len(routed) for routed in routing_map)
    routed = np.concatenate(routing_map)  # the tokens of the world in the order (src_rank, token)
    multiple = max(pad_multiple, 1)
    padded = -(-routed.sum(axis=0) // multiple) * multiple
    padded = padded.reshape(n_ranks, num_local_experts)
    start = np.cumsum(padded, axis=1) - padded
    total = padded.sum(axis=1)
    num_rows = total if num_permuted_tokens is None else np.full(n_ranks, num_permuted_tokens)

    place = np.cumsum(routed, axis=0) - 1
    row_of = np.where(routed, start.reshape(-1) + place, -1)
    row_of[row_of >= np.repeat(num_rows, num_local_experts)] = -1

    rank_of = np.repeat(np.arange(n_ranks), num_tokens)
    token_of = np.concatenate([np.arange(n) for n in num_tokens])
    src_rank, src_token, local_expert = ([np.full(n, -1) for n in num_rows] for _ in range(3))
    for rank in range(n_ranks):
        local = row_of[:, rank * num_local_experts : (rank + 1) * num_local_experts]
        token, expert = np.nonzero(local >= 0)
        rows = local[token, expert]
        src_rank[rank][rows] = rank_of[token]
        src_token[rank][rows] = token_of[token]
        local_expert[rank][rows] = expert

    return HybridHandle(
        num_local_experts=num_local_experts,
        p2p_world_size=p2p_world_size,
        num_permuted_tokens=num_permuted_tokens,
        pad_multiple=pad_multiple,
        num_tokens=num_tokens,
        row_of=np.split(row_of, np.cumsum(num_tokens)[:-1]),
        src_rank=src_rank,
        src_token=src_token,
        local_expert=local_expert,
        tokens_per_expert=list(np.clip(num_rows[:, None] - start, 0, padded)),
        overflow=list((total > num_rows).astype(np.int32)[:, None]),
    )


def expand(per_rank: list[np.ndarray], handle: HybridHandle) -> list[np.ndarray]:
    """The rows [P, H] that each rank receives, when every src_rank sends its [T, H]. Rows without a token are zero."""
    received = []
    for rank, n_rows in enumerate(handle.num_rows):
        rows = np.zeros((n_rows, per_rank[0].shape[1]), per_rank[0].dtype)
        for src, tokens in enumerate(per_rank):
            from_src = handle.src_rank[rank] == src
            rows[from_src] = tokens[handle.src_token[rank][from_src]]
        received.append(rows)
    return received


def expand_probs(probs: list[np.ndarray], handle: HybridHandle) -> list[np.ndarray]:
    """The prob of each row, over ranks float32 [P], from the dense ones [T, E]. Rows without a token get zero."""
    received = []
    for rank, n_rows in enumerate(handle.num_rows):
        rows = np.zeros(n_rows, np.float32)
        for src, dense in enumerate(probs):
            from_src = handle.src_rank[rank] == src
            expert = rank * handle.num_local_experts + handle.local_expert[rank][from_src]
            rows[from_src] = dense[handle.src_token[rank][from_src], expert]
        received.append(rows)
    return received


def collect_probs(rows: list[np.ndarray], handle: HybridHandle) -> list[np.ndarray]:
    """The dense gradient [T, E] of each src_rank from the rows' [P]: a copy where a pair has a row, else zero."""
    collected = []
    for row_of in handle.row_of:
        dense = np.zeros(row_of.shape, np.float32)
        token, expert = np.nonzero(row_of >= 0)
        for rank in range(handle.n_ranks):
            here = expert // handle.num_local_experts == rank
            dense[token[here], expert[here]] = rows[rank][row_of[token[here], expert[here]]]
        collected.append(dense)
    return collected
