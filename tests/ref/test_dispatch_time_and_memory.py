"""The reference serves real sizes: dispatch costs at most twice one np.take of its rows, and little extra memory.

At 8 ranks x 4096 tokens x 7168 the ratio is better than at these sizes: work per row grows, work per segment does not.
"""

import time
import tracemalloc

import numpy as np
import pytest
from ml_dtypes import bfloat16
from small_worlds import FORMATS

from epmoe_ref import EPConfig, combine, dispatch


def real_world(n_tokens, **options):
    cfg = EPConfig(8, 64, 8, 7168, n_tokens, **options)
    rng = np.random.default_rng(0)
    x = [(rng.integers(0, 2**12, (n_tokens, 7168), dtype=np.uint16) | 0x3000).view(bfloat16) for _ in range(8)]
    ids = [np.argsort(rng.random((n_tokens, 64)), axis=1)[:, :8].astype(np.int32) for _ in range(8)]
    return cfg, x, ids


def cpu_seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start


def nbytes(*arrays):
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


def test_dispatch_takes_at_most_twice_one_take_of_the_same_rows():
    cfg, x, ids = real_world(128)
    every, rows = np.concatenate(x), []
    for d in dispatch(cfg, x, ids):
        src = np.repeat(np.tile(np.arange(8), cfg.n_local_experts), d.recv_count.reshape(-1))
        rows.append(src * 128 + d.src_info[:, 0])
        assert np.array_equal(d.output_tokens.view(np.uint16), every[rows[-1]].view(np.uint16))
    rows = np.concatenate(rows)
    ratios = []
    for _ in range(10):  # the best of a few: other work on the machine disturbs single runs
        ratios.append(cpu_seconds(lambda: dispatch(cfg, x, ids)) / cpu_seconds(lambda: np.take(every, rows, axis=0)))
        if ratios[-1] <= 2:
            break
    assert min(ratios) <= 2, f"dispatch / np.take = {ratios}"


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", [name for name, slots, _ in FORMATS if not slots])
def test_dispatch_needs_inputs_outputs_and_a_tenth(name):
    # The scratch is one src_rank's payloads and a block of an encoder, whatever the number of ranks.
    cfg, x, ids = real_world(512 if name != "bf16" else 128, token_format=name)
    tracemalloc.start()
    try:
        d = dispatch(cfg, x, ids)
        extra = tracemalloc.get_traced_memory()[1] - sum(nbytes(*vars(one).values()) for one in d)
    finally:
        tracemalloc.stop()
    total = nbytes(*x, *ids) + sum(nbytes(*vars(one).values()) for one in d)
    assert extra <= 0.1 * total, f"{extra / total:.1%} beyond inputs and outputs of {total} bytes"


def test_combine_needs_outputs_and_a_tenth():
    cfg, x, ids = real_world(64)
    d = dispatch(cfg, x, ids)
    y = [one.output_tokens for one in d]
    w = [np.ones((64, 8), np.float32)] * 8
    tracemalloc.start()
    try:
        out = combine(cfg, y, d, router_weights=w)
        extra = tracemalloc.get_traced_memory()[1] - nbytes(*out)
    finally:
        tracemalloc.stop()
    assert extra <= 0.1 * nbytes(*y, *out)
