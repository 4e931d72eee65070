"""Stamps: every block's marks in the order of its steps; without trace=True there is nothing of them."""

import ml_dtypes
import numpy as np
import pytest

from epmoe import EPConfig, ExpertParallel, LaunchConfig, LocalWorld
from epmoe.kernels import stamps
from epmoe_ref.errors import EPStateError

CFG = EPConfig(n_ranks=2, n_experts=4, top_k=2, hidden=16, max_tokens_per_rank=4)
IDS = [np.array([[0, 2], [3, 1], [1, 2]])] * 2
SENDER = ("start", "claimed", "sent", "left")
RECEIVER = ("start", "counted", "placed", "copied", "left")
RETURNER = ("start", "counted", "sent", "arrived", "reduced")  # and "left", by another warp


def round_of(ep):
    x = [np.ones((3, 16), ml_dtypes.bfloat16)] * 2
    d = ep.dispatch(x, IDS)
    ep.combine([y.output_tokens for y in d], d, [np.ones((3, 2), np.float32)] * 2)


def test_each_block_marks_its_steps_in_order():
    with ExpertParallel(
        CFG, LocalWorld(2), kernels="fast", launch=LaunchConfig(n_sms=4, num_threads=64, trace=True)
    ) as ep:
        for _ in range(2):
            round_of(ep)
        traces = {(s.kernel, s.rank): s.times for s in ep.trace()}
    assert set(traces) == {(kernel, rank) for kernel in ("dispatch", "combine") for rank in range(2)}
    for (kernel, _), times in traces.items():
        assert times.shape == (4, stamps.N_MARKS)
        for block, row in enumerate(times):
            expected = RETURNER if kernel == "combine" else SENDER if block < 2 else RECEIVER
            at = {mark: int(t) for mark, t in zip(stamps.MARKS, row) if t}
            assert set(expected) <= set(at) <= set(expected) | {"announced", "arrived", "left"}
            assert [at[mark] for mark in expected] == sorted(at[mark] for mark in expected)
            assert at["left"] > at["start"]


def test_without_them_there_is_nothing_to_read():
    with ExpertParallel(CFG, LocalWorld(2)) as ep:
        with pytest.raises(EPStateError, match="LaunchConfig\\(trace=True\\)"):
            ep.trace()
