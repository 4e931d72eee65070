"""`epmoe` (= verify): rounds of the kernels against the reference, in one world or over the whole matrix.

command: options, one case shown step by step      pictures: routing, rows and counters in the terminal
matrix: --all, every combination of options        compiled_first: its kernels, compiled before ranks wait
worlds: virtual ranks, or processes                checked_rounds, experts: rounds, every byte of both results compared
"""
