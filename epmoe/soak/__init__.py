"""Soak: very many rounds of random routing, made and checked on the device, every row of every round.

`epmoe soak`. Tokens, routing and weights are hashes of (seed, round, rank, token, column), so that any kernel
can say what any rank sent: nothing is stored, copied or compared on the host, and a round costs little more than its
dispatch and combine. Who tells which part:

1. hashing.py   what a rank sends in a round: number of tokens, ids, weights, every word of every token
2. fill.py      writes it, clears what is counted, poisons results
3. segments.py  which rows each (expert, src_rank) segment must have, against row_offsets and recv_count
4. rows.py      every row of dispatch: its (token, k), that the pair belongs there and is there once, all its bytes;
                and the experts, an exact function of a row and its expert
5. encoding.py  formats that round: every token encoded and decoded again by the format's own device functions, and
                all output arrays compared byte for byte
6. sums.py      every byte of combine
7. errors.py    what was wrong: counted, and the first one kept
8. soak.py      the rounds; compiled_first.py their kernels, before the clock starts; command.py the command line
"""
