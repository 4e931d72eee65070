"""The tuning numbers of the kernels of pairs. Where they were measured: benchmarks/notes/dispatch.md and combine.md.

Kernels take this record as an argument. Tests hand in one with small numbers, and so run the code that is shipped.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Measured on 2 and 4 H200 with 7168 columns, 256 experts and top 8, unless a line says otherwise."""

    # Dispatch: which blocks send
    senders_of_8: int = 4           # of 8 blocks of the fused kernel, those that send
    at_once_of_8: int = 3           # the same where their warps can send all payloads at once; 128 tokens: 0.6 us less
    counter_from: int = 4           # sending blocks from which block 0 only counts and announces
    turns_from: int = 4             # batches of a block's tokens; 128 tokens: 0.3 us less without code for turns

    # Dispatch: what a block looks at at a time, in shared memory
    batch_messages: int = 512       # messages that a block sends in order; ordering takes the square of it
    counted_experts: int = 2048     # experts whose messages block 0 counts; more pass over the ids again
    counts: int = 2048              # counts of a window of local experts
    known_words: int = 256          # of their words; 2 kB of shared memory

    # Dispatch of a small batch (few_tokens.py)
    few_tokens: int = 8             # at most 8, since a packed signal describes 8; 1 token: 11.2 us, 14.7 before
    few_experts: int = 2048         # of a rank, in shared memory
    few_blocks_a_rank: int = 2      # blocks for each rank: one that sends, one that receives
    few_receivers_a_token: int = 16 # blocks that receive; 1 token: 12.6 us with 16, 12.8 with all
    few_receivers: int = 32
    few_threads_a_token: int = 256  # of a block; 256 load a row of 14 kB at once, four vectors each
    few_threads: int = 512

    # Combine
    returned_segments: int = 2048   # segments of region A that a block looks at at a time, in shared memory
    senders_of_11: int = 8          # of 11 blocks, those that send if their warps can send all rows at once
    flags: int = 1024               # of signals, in shared memory; if there are more words, a flag counts several
    warps_a_poller: int = 4         # one warp of so many polls signals, at most
    flag_nap_ns: int = 40           # between two polls of a flag, so that other warps of the SM can work
    row_nap_ns: int = 100           # between two polls of rows that have not arrived


TUNING = Tuning()
