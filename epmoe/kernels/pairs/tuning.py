"""The tuning numbers of the kernels of pairs, with the measurements that chose them (benchmarks/notes), or "not timed".

Times are microseconds on 2 H200 (4 where it says so), 7168 columns, 256 experts, top 8. Kernels take this record as an
argument. Tests hand in one with small numbers, and so run the code that is shipped.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Sizes without a time bound shared memory: larger batches pass through it in windows."""

    # Dispatch: which blocks send
    senders_of_8: int = 4           # of 8 blocks; 4096 tokens: 414.3, with 3 of 8 444.1
    at_once_of_8: int = 3           # the same if all payloads can go at once; 4 GPUs, 128 tokens: 35.1, with 4 36.1
    counter_from: int = 4           # if at least so many blocks send, block 0 only counts and announces; not timed
    turns_from: int = 4             # kernels for at most so many batches cannot send all first: 128 tokens 0.3 less

    # Dispatch: what a block looks at at a time, in shared memory
    batch_messages: int = 512       # messages that a block sends in order; ordering takes the square of this; not timed
    counted_experts: int = 2048     # experts whose messages block 0 counts; each window reads all ids again; not timed
    counts: int = 2048              # counts of a window of local experts; not timed
    known_words: int = 256          # words of recv_count that a block keeps in shared memory, 2 kB; not timed

    # Dispatch of few tokens (few_tokens.py)
    few_tokens: int = 8             # at most 8, which a packed signal describes; 1 token: 11.3, as a large batch 16.5
    few_experts: int = 2048         # of a rank; not timed
    few_blocks_a_rank: int = 2      # blocks for each rank, one that sends and one that receives; not timed
    few_receivers_a_token: int = 16 # blocks that receive; 4 GPUs, 1 token: 12.6, with 32 13.1
    few_receivers: int = 32         # blocks that receive, at most; not timed
    few_threads_a_token: int = 256  # of a block; 1 token: 13.7, with 512 14.1, with 1024 15.1
    few_threads: int = 512          # of a block, at most; 4 GPUs, 4 and 8 tokens: 14.5 and 16.1, less than with 1024

    # Combine
    returned_segments: int = 2048   # segments of region A in a block's shared memory at a time; not timed
    senders_of_11: int = 8          # of 11 blocks, if all rows can go at once; 4 GPUs, 128 tokens: 48.9, with all 50.9
    flags: int = 1024               # of signals, in shared memory; of more words, a flag counts several; not timed
    warps_a_poller: int = 4         # one warp of so many polls signals; 4 GPUs, 128 tokens: 48.7, half the pollers 49.4
    flag_nap_ns: int = 40           # between two polls of a flag; 4 GPUs, 128 tokens: with 20 or 100 ns 0.35 more
    row_nap_ns: int = 100           # between two polls of rows; 4 GPUs, 128 tokens: 0, 40, 100 ns all 44.2 to 44.6


TUNING = Tuning()
