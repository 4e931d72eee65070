"""Soak: many rounds of random routing, generated on the device. Every row of every round is checked.

Run it with `epmoe soak`. Tokens, routing and weights are hashes of (seed, round, rank, token, column), so any kernel can
compute what any rank sent. The host stores, copies and compares nothing, and a round costs little more than its dispatch
and combine. The parts:

1. hashing.py defines the data of a rank in a round: number of tokens, ids, weights, every word of every token
2. fill.py writes it, clears counts, poisons results
3. dispatch_checks.py checks the segments and every row of dispatch, and makes the experts' outputs
4. encoding.py checks formats that round: it encodes and decodes every token again
5. sums.py checks every byte of combine
6. errors.py counts errors, and keeps the first one
7. soak.py runs the rounds; compiled_first.py compiles their kernels before the clock starts; command.py is the command
"""
