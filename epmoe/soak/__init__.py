"""Soak: many rounds of random routing, generated on the device. Every row of every round is checked.

Run it with `epmoe soak`. Tokens, routing and weights are hashes of (seed, round, rank, token, column), so any kernel can
compute what any rank sent. The host stores, copies and compares nothing, and a round costs little more than its dispatch
and combine. The parts:

1. hashing.py   defines the data of a rank in a round: number of tokens, ids, weights, every word of every token
2. fill.py      writes it, clears counts, poisons results
3. segments.py  checks row_offsets and recv_count: the rows of each (expert, src_rank) segment
4. rows.py      checks every row of dispatch: the pair (token, k) belongs there, is there once, and all bytes are right;
                makes the experts' outputs, an exact function of a row and its expert
5. encoding.py  for formats that round: encodes and decodes every token again with the format's device functions, and
                compares all output arrays byte for byte
6. sums.py      checks every byte of combine
7. errors.py    counts errors, and keeps the first one
8. soak.py runs the rounds; compiled_first.py compiles their kernels before the clock starts; command.py is the command
"""
