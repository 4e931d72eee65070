"""Which token each row holds, when a token is sent once to each rank."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class RowsHandle:
    """The routing of one `dispatch_forward`, for any number of combines and cached dispatches.

    It depends only on the ids and the numbers of tokens, so data of another hidden size or dtype may use it.
    """

    num_experts: int
    """E, over all ranks."""
    top_k: int
    """K, experts of a token."""
    num_tokens: tuple[int, ...]
    """T of each rank."""
    row_of: list[np.ndarray]
    """Over src_ranks: int64 [T, R], the token's row on each rank; -1 where it is not sent."""
    src_rank: list[np.ndarray]
    """Over receiving ranks: int64 [N], the rank a row came from; ascending."""
    src_token: list[np.ndarray]
    """Over receiving ranks: int64 [N], the row's token on that rank; ascending for each src_rank."""

    @property
    def n_ranks(self) -> int:
        """R, ranks of the world."""
        return len(self.num_tokens)

    @property
    def num_rows(self) -> list[int]:
        """N of each rank."""
        return [len(rows) for rows in self.src_token]


def rows_handle(token_indices: list[np.ndarray], num_experts: int) -> RowsHandle:
    """The handle of a routing.

    token_indices: over ranks, int64 [T, K], checked. A token goes to every rank that has one of its experts, once.
    Rows of a rank are ordered by src_rank, then token.
    """
    n_ranks, num_tokens = len(token_indices), tuple(len(ids) for ids in token_indices)
    ids = np.concatenate(token_indices)  # the tokens of the world in the order (src_rank, token)
    owner = np.where(ids >= 0, ids // (num_experts // n_ranks), n_ranks)
    goes = np.zeros((len(ids), n_ranks + 1), bool)  # the last column collects ids of -1
    goes[np.arange(len(ids))[:, None], owner] = True
    goes = goes[:, :n_ranks]
    row_of = np.where(goes, np.cumsum(goes, axis=0) - 1, -1)

    rank_of = np.repeat(np.arange(n_ranks), num_tokens)
    token_of = np.concatenate([np.arange(n) for n in num_tokens])
    return RowsHandle(
        num_experts=num_experts,
        top_k=token_indices[0].shape[1],
        num_tokens=num_tokens,
        row_of=np.split(row_of, np.cumsum(num_tokens)[:-1]),
        src_rank=[rank_of[goes[:, rank]] for rank in range(n_ranks)],
        src_token=[token_of[goes[:, rank]] for rank in range(n_ranks)],
    )


def gather(per_rank: list[np.ndarray], handle: RowsHandle) -> list[np.ndarray]:
    """The rows that each rank receives, over ranks [N, ...], when every src_rank sends its [T, ...]."""
    received = []
    for src_rank, src_token in zip(handle.src_rank, handle.src_token):
        received.append(np.concatenate([array[src_token[src_rank == src]] for src, array in enumerate(per_rank)]))
    return received
