"""The tuning numbers of the rows kernels. Where they were measured: benchmarks/notes/rows.md, by the records named here.

RowsShape hands this record to the kernels. The simulator takes one with small numbers, and so runs the code that is
shipped.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Measured on 2 and 4 H200 with 7168 columns, 256 experts and top 8; us of one call."""

    # Dispatch
    send_tenths: int = 5            # of the blocks, where the others expand meanwhile
    send_parts: int = 7             # the fewest of a row, so that all warps end at about the same time; 4: the same
    expand_parts: int = 4           # the fewest of a row that is expanded while others come
    encode_parts: int = 4           # of one that is encoded; fp8 of 4096 tokens: 320.6 us, 374.3 in one part
    expand_at_once: int = 4         # parts that a warp takes, where there are as many for each
    expand_looks: int = 64          # at the flags of all of them, before it waits for the first
    useful_parts: int = 4096        # parts of rows that a rank's warps have use for

    # Combine: "Few SMs: combine pushes whole rows"
    return_parts: int = 4           # the fewest of a row; 4096 tokens: 480.8 us, 500.8 in whole rows
    push_tenths: int = 6            # of the blocks; 75 %: the same
    push_tenths_of_two: int = 5     # of few blocks and two ranks: 199.5 us, 209.6 with 6
    many_blocks: int = 64           # fewer push whole rows; 24 SMs reach 1.00 of all SMs' speed, 0.69 before

    # Small batches: "Up to 128 tokens: Lamport rows, without signals"
    lamport_tokens: int = 128       # of a rank; 128 tokens: 25.8 / 24.5 us, 27.0 / 28.9 with signals
    lamport_bytes: int = 64 << 20   # the most of the windows of one parity
    lamport_send_tenths: int = 3    # of the blocks; half of them: fp8 20.1 us instead of 21.5

    # Small batches by expert
    window_tokens: int = 128        # of a rank; 128 tokens: 20.2 us, 38.0 in the ordinary way
    window_experts: int = 512       # whose bits a block has room for, in shared memory
    window_word: int = 32           # tokens whose bits a word holds, at most 32
    window_word_of_few: int = 8     # tokens of a word that are looked at together, if there are no more

    def __post_init__(self):
        if self.lamport_tokens > 128:
            raise ValueError(f"lamport_tokens={self.lamport_tokens}: at most 128, whose bits fill four words")


TUNING = Tuning()
SMALL = Tuning(expand_looks=2, many_blocks=3, lamport_tokens=4, window_tokens=4, window_word=2, window_word_of_few=2)
