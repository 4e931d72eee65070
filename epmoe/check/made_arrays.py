"""Made-up numbers, by purpose: the probs, the experts' outputs, the returned gradients."""

import numpy as np

from epmoe.check import random_bits

GRAD_X, GRAD_PROBS, GRAD_OUT, PROBS, RETURNED = range(200, 205)  # a part of each stream's seed
A_ROUND = 1000  # difference between the seeds of consecutive rounds


def made(dtype, seed, round_, use, rank, shape):
    """An array of `shape` for a rank in a round. It is the same on every machine."""
    seeds = random_bits.stream(seed + A_ROUND * round_, use, rank)
    return random_bits.floats(dtype, seeds, int(np.prod(shape)), exponents=(-4, 1)).reshape(shape)
