"""Results keep the memory that they lie in: when their Buffer is closed, and when their world is gone."""

import gc

import numpy as np
import pytest
from rows_group import assert_same, group_of, host, routing, tokens

from epmoe import device, fused_a2a

ON_BOTH = pytest.mark.parametrize("on", ["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])


def is_there(buffer):
    """Whether a rank's memory has not been given back."""
    return buffer._span is not None if device.SIM else buffer.address != 0


def close_it(group):
    fused_a2a.get_buffer(group, 0).close()


def grow_and_close(group):
    """The results' pool is then not the last one."""
    dispatched(group, (20, 20), 64)
    close_it(group)


def dispatched(group, num_tokens=(4, 3), hidden=16):
    rng = np.random.default_rng(3)
    ids, probs = routing(rng, num_tokens, 4, 2)
    return fused_a2a.fused_dispatch(tokens(rng, num_tokens, hidden), ids, probs, 4, group)


@ON_BOTH
@pytest.mark.parametrize("end", [close_it, grow_and_close, lambda group: None])
@pytest.mark.by_day(2)
def test_a_result_of_dispatch_keeps_its_memory_and_the_memory_goes_with_the_last_result(end, on):
    group = group_of(2)
    recv_x, recv_ids = dispatched(group)[:2]
    pools = [fused_a2a.get_buffer(group, 0).pool.buffers[rank] for rank in (0, 1)]
    want = host([recv_x, recv_ids])
    end(group)
    del group
    gc.collect()
    assert all(map(is_there, pools))
    assert_same([recv_x, recv_ids], want, "a result that outlives its memory's owner")
    of_rank_1 = recv_x[1]
    del recv_x, recv_ids
    gc.collect()
    assert [is_there(pool) for pool in pools] == [False, True]
    assert_same(of_rank_1, want[0][1], "the other rank's")
    del of_rank_1
    gc.collect()
    assert not is_there(pools[1])


@ON_BOTH
def test_memory_that_nobody_looks_at_goes_at_once(on):
    group = group_of(2)
    dispatched(group)
    buffer = fused_a2a.get_buffer(group, 0)
    gc.collect()
    pool = buffer.pool.buffers[0]
    buffer.close()
    assert not is_there(pool)
