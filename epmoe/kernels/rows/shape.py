"""The compile-time constants of a rows kernel, its tuning numbers, and the fields of its parameters.

RowsShape hands the tuning numbers to the kernels. benchmarks/notes/rows.md has their measurements, under the headings
quoted here. The simulator takes a Tuning with small numbers, and so runs the code that is shipped.
"""

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import NamedTuple

from ..params import BF16_BYTES, VECTOR, ParameterBlock, in_context, namespace

MAX_RANKS = 32          # a lane of a warp stands for a rank
MAX_TOP_K = 32          # and another time for a k
MAX_PLACES = 4          # arrays of one call that peers write


class Sending(NamedTuple):
    """How rows are sent where they are expanded as they come (expert-major)."""

    tenths: int     # of a block's warps, rounded up, send
    at_once: int    # parts of a row: a warp sends so many before it raises their flags
    parts: int      # of a row, at least


@dataclass(frozen=True)
class Tuning:
    """Measured on 2 and 4 H200 with 7168 columns, 256 experts and top 8; us of one call."""

    # Dispatch: "Few SMs: some warps of each block send", "Encoded rows by expert: half of the warps send"
    copied: Sending = Sending(tenths=3, at_once=2, parts=4)     # 48 SMs 267 us; 4 tenths 281, and one part at once 302
    encoded: Sending = Sending(tenths=5, at_once=1, parts=2)    # fp8, 24 SMs 352 us; with the numbers above 461
    send_parts: int = 7             # the fewest of a row, so that all warps end at about the same time; 4: the same
    useful_parts: int = 4096        # of rows, for a rank's warps; fp8, 1024 tokens 73 us, 65 with 8192; 24 SMs 110, 122
    many: tuple = 1024, 512         # from so many tokens on, threads of a block; combine, too; 177 us, 177.5 with 1024
    many_to_expand: tuple = 4096, 512   # by expert, unless encoded; 263 us, 287 with 1024

    # Combine: "Few SMs: combine pushes whole rows"
    return_parts: int = 4           # the fewest of a row; 4096 tokens: 480.8 us, 500.8 in whole rows
    push_tenths: int = 6            # of the blocks; 75 %: the same
    push_tenths_of_two: int = 5     # of few blocks and at most two ranks: 199.5 us, 209.6 with 6
    push_tenths_of_sums: int = 10   # of few blocks, expert-major: 24 SMs 412 us, 415 with 9; 48 SMs 249, 258
    loops_of_experts: int = 6       # sums of 1 to 6 experts' rows have a loop each; 24 SMs 335 us, 359 with 4
    loops_of_ranks: int = 4         # of sums over ranks; two ranks 181 us, as with conditions; more were not measured
    many_blocks: int = 64           # fewer are few, and push whole rows; 24 SMs have all SMs' speed, 0.69 before

    # Small batches: "Up to 128 tokens: Lamport rows, without signals", "Lamport rows of up to 1024 tokens of all ranks"
    few_to_send: tuple = 128, 256   # up to so many tokens, threads of a block; 512 as fast; 1024: 42 us, with 512 36
    few_to_combine: tuple = 32, 512     # 512 tokens: 37.3 us, 34.7 with 1024
    few_to_expand: tuple = 16, 512  # one token: 15.1 us, 14.7 with 256, 17.5 with 1024; 128: 25.6, 27.1, 28.9
    lamport_tokens: int = 128       # of a rank, for any number of ranks; 25.8 / 24.5 us, 27.0 / 28.9 with signals
    lamport_rows: int = 1024        # tokens of all ranks, with many_blocks; 2 x 256: 22.6 / 21.3 us, 29.7 / 29.2
    lamport_bytes: int = 64 << 20   # the most of the windows of one parity; not timed
    lamport_send_tenths: int = 3    # of the blocks; half of them: fp8 20.1 us instead of 21.5
    expert_send_tenths: int = 10    # by expert; all blocks also receive; 128 tokens: 25.1 us, 28.4 with 5, 27.5 with 3
    shared_bytes: int = 36 << 10    # of a block, by expert: bits of experts and numbers of rows of all ranks; not timed
    bits_word: int = 32             # tokens whose bits a word holds, at most 32; not timed
    bits_word_of_few: int = 8       # tokens of a word that are looked at together, if there are no more; not timed

    def most_small(self, n_ranks, n_blocks) -> int:
        """The most tokens of a rank in a small batch, if there is room for them (lamport.py)."""
        return max(self.lamport_tokens, self.lamport_rows // max(n_ranks, 2) if n_blocks >= self.many_blocks else 0)


TUNING = Tuning()
SMALL = Tuning(loops_of_experts=5, loops_of_ranks=3, many_blocks=3, lamport_tokens=4, lamport_rows=4, bits_word=2,
               bits_word_of_few=2)


@dataclass(frozen=True)
class RowsShape:
    """The compile-time constants of the rows kernels. A kernel reads only those that concern it.

    n_ranks, num_local_experts: as everywhere. top_k: ids of a token; 0 if routing is a map [T, E] (HybridEP). id_bytes:
    4 or 8, size of an id. row_bytes: size of a row as it travels, a multiple of 16. value_bytes: size of its values
    (less than row_bytes if scales follow them). scale_words: float32 scales of a row, in an array of their own (rows)
    or behind the values (HybridEP). has_probs: whether a float32 for each k (or local expert) travels with a row.
    has_meta: whether ids (or numbers for experts) do. encode: rows are bf16 and become blockwise FP8 on their way.
    dtype: of sums, "bf16", "fp16" or "fp32". p2p_world_size: ranks whose sum is rounded first. lamport: the most tokens
    of a rank that the kernel sends in Lamport rows (small/lamport.py); 0: it has no code for them. threads: of a block.
    trace: whether blocks write stamps.
    """

    n_ranks: int
    num_local_experts: int
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
    lamport: int = 0
    trace: bool = False
    tuning: Tuning = TUNING

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return self.n_ranks * self.num_local_experts

    @property
    def expert_major(self) -> bool:
        """Whether routing is a map and rows are expanded by expert."""
        return self.top_k == 0

    @property
    def sending(self) -> Sending:
        """How its rows are sent if they are expanded as they come."""
        return self.tuning.encoded if self.encode else self.tuning.copied

    @property
    def by_world(self) -> bool:
        """Whether sums are rounded in each p2p world first."""
        return 1 < self.p2p_world_size < self.n_ranks

    @property
    def n_meta(self) -> int:
        """How many numbers go with a row: one for each k, or one for each local expert."""
        return self.top_k or self.num_local_experts

    @property
    def n_vectors(self) -> int:
        """16-byte vectors of a row as it travels, without the scales after them."""
        return (self.value_bytes if self.encode else self.row_bytes) // VECTOR

    @property
    def src_bytes(self) -> int:
        """Bytes of an input row."""
        return self.value_bytes * BF16_BYTES if self.encode else self.row_bytes


NO_LIMIT = 2**31 - 1    # as num_rows: no row is dropped; as out_rows: `out` holds all rows
FIRST = "places"        # from here on fields differ from call to call
FIELDS = (
    ("mailboxes_at", 1), ("mailbox_bytes", 1), ("words", 1), ("timeout_ns", 1), ("trace", 1), ("columns", 1),
    ("lamport_at", 1), ("lamport_bytes", 1),
    (FIRST, MAX_PLACES), ("capacity", 1),
    ("x", 1), ("ids", 1), ("probs", 1), ("scales", 1), ("row_of", 1), ("counts", 1), ("info", 1),
    ("tokens_per_expert", 1), ("row_of_expert", 1), ("expert_base", 1), ("expert_rows", 1), ("expert_row", 1),
    ("overflow", 1), ("num_rows", 1), ("out_rows", 1), ("pad_multiple", 1), ("out", 1), ("out_probs", 1),
    ("out_scales", 1), ("sources", MAX_PLACES), ("targets", MAX_PLACES), ("word_counts", MAX_PLACES),
    ("told", 1), ("told_number", 1))


@cache
def parameter_block(n_ranks: int) -> ParameterBlock:
    """The parameters of all rows kernels, in uint64 words. For each kernel the fields that it reads are filled in.

    control_ptrs, pool_ptrs: every rank's control and pool memory. mailboxes_at, mailbox_bytes: of the control memory.
    words: this rank's own control words. trace: address for stamps. columns: scratch of the layout, [blocks, columns].
    places: offsets in the pool of the arrays that peers write in this call. capacity: rows that they hold. lamport_at:
    offset in the pool of the windows of Lamport rows. lamport_bytes: size of those of one parity. told: where the host
    awaits told_number and finds the counts (handle.py); 0: it does not wait. x, ids (by expert the map), probs, scales,
    out...: arrays of the caller and of results. row_of [T, R], counts [R, R], row_of_expert [T, E], expert_row [N, L]
    (N rows received, L local experts), the rest: of a handle. num_rows: P, the most rows of all experts; NO_LIMIT: all.
    out_rows: rows that `out` holds; if there are more, none is stored, and a launch of receive_kernel follows.
    """
    return ParameterBlock(*FIELDS, context=(("control_ptrs", n_ranks), ("pool_ptrs", n_ranks)))


BLOCK = parameter_block(1)      # fields are where they are for any number of ranks
# Arrays of a call that peers write. In expert-major row_ids has numbers among experts' rows, row_scales expert masks
arrays = namespace("arrays", rows=0, row_ids=1, row_probs=2, row_scales=3)
SOURCE_NUMBERS, SOURCE_PROBS, SOURCE_MASKS = (BLOCK.index("sources") + i for i in (1, 2, 3))
p = namespace("p", **{name: BLOCK.index(name) for name in ("context", *dict(FIELDS))}, source_numbers=SOURCE_NUMBERS,
              source_probs=SOURCE_PROBS, source_masks=SOURCE_MASKS)     # params[p.x]


@cache
def memory_of(n_ranks: int) -> ModuleType:
    """Device functions (params, rank) -> address of that rank's memory: control, pool."""
    block = parameter_block(n_ranks)
    return namespace("memory", control=in_context(block, "control_ptrs"), pool=in_context(block, "pool_ptrs"))
