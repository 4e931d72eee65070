"""What no result of fused_a2a depends on. What dispatch and combine are to each other: tests/ref_fused_a2a."""

import numpy as np
import pytest
from against_reference import hybrid_round, rows_round
from rows_group import assert_same, group_of, routing, tokens

from epmoe import fused_a2a
from epmoe.fused_a2a import buffers

NUM_TOKENS, NUM_EXPERTS, TOP_K, HIDDEN = (5, 0, 2), 6, 3, 8
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def expected():
    """One world of data and its results, which the options below must not change by a bit."""
    rng = np.random.default_rng(12)
    ids, probs = routing(rng, NUM_TOKENS, NUM_EXPERTS, TOP_K)
    maps = [rng.random((n, NUM_EXPERTS)) < 0.5 for n in NUM_TOKENS]
    x, dense = tokens(rng, NUM_TOKENS, HIDDEN), [rng.random(m.shape, np.float32) for m in maps]
    group = group_of(3)
    return (
        (x, ids, probs, NUM_EXPERTS),
        rows_round(group, x, ids, probs, NUM_EXPERTS),
        (x, maps, dense, 2),
        hybrid_round(group, x, maps, dense, 2),
    )


@pytest.mark.by_day(1)
@pytest.mark.parametrize("sms, threads, seed", [(2, 64, None), (3, 32, 3), (5, 96, 4)])
def test_no_bit_depends_on_sms_threads_or_the_schedule(expected, sms, threads, seed):
    rows, rows_results, hybrid, hybrid_results = expected
    group = group_of(3, n_sms=sms, num_threads=threads, seed=seed)
    fused_a2a.set_deepep_num_sms(1 if seed is None else sms)
    try:
        assert_same(rows_round(group, *rows), rows_results, "rows")
    finally:
        fused_a2a.set_deepep_num_sms(None)
    sms = dict(num_sms_dispatch_api=sms, num_sms_combine_api=1)
    assert_same(hybrid_round(group, *hybrid, **sms), hybrid_results, "rows by expert")


@pytest.mark.parametrize(
    "flags", [dict(async_finish=True), dict(async_finish=True, allocate_on_comm_stream=True)], ids=str
)
def test_no_bit_depends_on_async_flags(expected, flags):
    assert_same(rows_round(group_of(3), *expected[0], **flags), expected[1], "rows")


def test_no_bit_depends_on_whether_a_dispatch_begins_again(expected):
    rows, rows_results, hybrid, hybrid_results = expected
    group = group_of(3)
    for buffer in buffers.buffer_of(group), buffers.hybrid_ep_buffer(group):
        buffer.max_tokens = 1  # so that no rank has room at first
    assert_same(rows_round(group, *rows), rows_results, "rows")
    assert_same(hybrid_round(group, *hybrid), hybrid_results, "rows by expert")
    group = group_of(3)
    assert_same(hybrid_round(group, *hybrid, num_permuted_tokens=20)[3], hybrid_results[3], "combined, P given")
