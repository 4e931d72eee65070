"""The constants that a rows kernel is compiled for."""

from dataclasses import dataclass

MAX_RANKS = 32          # a lane of a warp stands for a rank
MAX_TOP_K = 32          # and another time for a slot
MAX_PLACES = 4          # arrays of one call that peers write


@dataclass(frozen=True)
class RowsShape:
    """The compile-time constants of the rows kernels; a kernel reads those that concern it.

    n_ranks, n_local_experts: as everywhere. top_k: slots of a token, 0 where routing is a map [T, E] (HybridEP).
    id_bytes: 4 or 8, of an id. row_bytes: of a row as it travels, a multiple of 16. value_bytes: of the part of it that
    holds the values (smaller than row_bytes where scales follow them). scale_words: float32 scales of a row, in an
    array of their own (rows) or behind the values (HybridEP). has_probs: whether a float32 for each slot (local expert)
    travels with a row. has_meta: whether ids (or slots of local experts) do. encode: rows are bf16 and become blockwise
    FP8 on their way. dtype: of sums, "bf16", "fp16" or "fp32". p2p_world_size: ranks whose sum is rounded first.
    expands: rows are expanded by expert while they arrive. few: expert-major, tokens of each rank up to which rows
    travel into windows (expert_dispatch.py), for which the kernel has a way of its own; 0: it has none. lamport:
    likewise for rows that need no signals (lamport.py). threads: of a block. trace: whether blocks write stamps.
    """

    n_ranks: int
    n_local_experts: int
    threads: int
    row_bytes: int = 16
    top_k: int = 0
    id_bytes: int = 8
    value_bytes: int = 0
    scale_words: int = 0
    has_probs: bool = False
    has_meta: bool = False
    encode: bool = False
    dtype: str = "bf16"
    p2p_world_size: int = 0
    expands: bool = False
    few: int = 0
    lamport: int = 0
    trace: bool = False

    @property
    def n_experts(self) -> int:
        """Experts of all ranks."""
        return self.n_ranks * self.n_local_experts

    @property
    def expert_major(self) -> bool:
        """Whether routing is a map and rows are expanded by expert."""
        return self.top_k == 0

    @property
    def n_meta(self) -> int:
        """Numbers that go with a row: one a slot, or one a local expert."""
        return self.top_k or self.n_local_experts

    @property
    def n_columns(self) -> int:
        """Counts of the layout, by block: tokens of each rank and, in expert-major, of each expert."""
        return self.n_ranks + (self.n_experts if self.expert_major else 0)
