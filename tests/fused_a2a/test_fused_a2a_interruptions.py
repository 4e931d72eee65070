"""Ctrl-C inside a call of fused_a2a, also while memory grows: calls are refused until the Buffer's reset()."""

import sys
from pathlib import Path

import numpy as np
import pytest
from against_reference import hybrid_round, rows_round
from rows_group import FP16, assert_same, group_of, routing, tokens

from epmoe import fused_a2a
from epmoe.fused_a2a.buffers import buffer_of, hybrid_ep_buffer
from epmoe_ref.errors import EPStateError

sys.path.append(str(Path(__file__).parents[1] / "host"))
from interruptions import Interruption, at_function_call, places

EXPERTS, HIDDEN, TOP_K = 4, 8, 2
ON_BOTH = pytest.mark.parametrize("device", ["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])


def round_of_rows(group, rng, num_tokens, on_device):
    """A function that makes a round, and gives its results; on_device: those that have no spare rows."""
    x, (ids, probs) = tokens(rng, num_tokens, HIDDEN), routing(rng, num_tokens, EXPERTS, TOP_K)
    call = fused_a2a.FusedDispatchOnDevice if on_device else fused_a2a.FusedDispatch

    def make():
        *_, summed, to_rows, to_tokens, _ = rows_round(group, x, ids, probs, EXPERTS, call)
        return [summed, to_tokens] if on_device else [summed, to_rows, to_tokens]

    return make


def round_of_experts(group, rng, num_tokens, on_device):
    """The same by HybridEP."""
    x = tokens(rng, num_tokens, HIDDEN, FP16)
    maps = [rng.random((n, EXPERTS)) < 0.4 for n in num_tokens]
    probs = [rng.random((n, EXPERTS)).astype(np.float32) for n in num_tokens]
    return lambda: hybrid_round(group, x, maps, probs, EXPERTS // group.n_ranks)


def is_inside(traceback):
    """Whether an exception came inside a call on a Buffer, and not only as it began."""
    names = [(Path(entry.path).name, entry.name) for entry in traceback]
    return ("buffer.py", "call") in names[:-1]


@ON_BOTH
@pytest.mark.parametrize(
    "round_of, of_group, on_device",
    [(round_of_rows, buffer_of, False), (round_of_rows, buffer_of, True), (round_of_experts, hybrid_ep_buffer, False)],
)
@pytest.mark.by_day(1)
def test_a_round_that_was_interrupted_anywhere_is_refused_until_reset(round_of, of_group, on_device, device):
    def rounds(group):
        rng = np.random.default_rng(5)
        return [round_of(group, rng, num_tokens, on_device) for num_tokens in ((1, 1), (4, 2))]

    wanted = rounds(group_of(2, racecheck=False, timeout=2.0))[1]()

    def prepared(grows):
        """(group, few, many); grows: the pool grows from one that there is."""
        group = group_of(2, racecheck=False, timeout=2.0)
        few, many = rounds(group)
        if grows:
            few()
        return group, few, many

    n_inside = 0
    for grows in (False, True):
        _, _, many = prepared(grows)
        with at_function_call(None) as seen:
            many()
        for n in places(len(seen) * 3 // 4, 4)[1:3] if grows else places(len(seen) * 3 // 4, 3)[1:2]:
            group, few, many = prepared(grows)
            with pytest.raises(Interruption) as ended, at_function_call(n):
                many()
            if is_inside(ended.traceback):
                said = "was ended by Interruption.*reset\\(\\) of the"
                with pytest.raises(EPStateError, match=said):
                    few()
                n_inside += 1
            else:
                few()
            of_group(group).reset()
            assert_same(many(), wanted, f"after call {n} of {len(seen)}")
    assert n_inside >= 2  # others may be between two calls
