"""Traces for Perfetto: slices nest, arrows begin and end inside slices; clocks of several GPUs are aligned."""

import json

import numpy as np
import pytest
from recorded_round import history

from epmoe import LocalWorld
from epmoe.explain import gpu_round, recorded_trace
from epmoe.explain.stamped import corrections, of_stamps
from epmoe.kernels.stamps import MARKS, Stamps
from epmoe_ref.config import EPConfig


def slices(events):
    found = {}
    for e in events:
        if e["ph"] == "X":
            found.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"], e["name"]))
    return found


def check(events):
    """Perfetto's rules: slices of a thread nest, and both ends of an arrow lie in a slice."""
    by_thread = slices(events)
    for thread, of_thread in by_thread.items():
        stack = []
        for begin, end, name in sorted(of_thread, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1] <= begin + 1e-6:
                stack.pop()
            assert not stack or end <= stack[-1] + 1e-3, (thread, name, begin)
            stack.append(end)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(starts) == set(ends)
    for number, e in starts.items():
        for one in (e, ends[number]):
            assert any(b - 1e-6 <= one["ts"] <= t + 1e-6 for b, t, _ in by_thread[one["pid"], one["tid"]]), one
        assert e["ts"] <= ends[number]["ts"], e
    return len(starts)


@pytest.mark.parametrize("fused", [False, True])
def test_the_recorded_trace_opens(fused):
    h = history(fused=fused)
    made = json.loads(recorded_trace.of_recording(h, {"seed": 0}).json())
    events = made["traceEvents"]
    assert check(events) > 40
    names = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {(r + 1, f"rank {r}") for r in range(3)}
    assert {e["name"] for e in events if e["ph"] == "X" and e["cat"] == "kernel"} == (
        {"dispatch_kernel", "combine_kernel"}
        if fused
        else {f"{phase}_{half}_kernel" for phase in ("dispatch", "combine") for half in ("async", "wait")}
    )
    assert {"signal", "own blocks"} == {e["cat"] for e in events if e["ph"] == "s"}


def stamps(offsets, late=None, tells="announced"):
    """A dispatch and a combine on two blocks of each rank, whose clocks are off by this many ns.

    tells: the mark before which a rank has told its peers nothing ("claimed" for small batches). late: the rank that
    arrives 500 us late; all others wait for it.
    """
    made = []
    for rank, offset in enumerate(offsets):
        for kernel, start, reached in (
            ("dispatch", 10_000, ("start", tells, "sent", "counted", "copied", "left")),
            ("combine", 90_000, ("start", "sent", "arrived", "reduced", "left")),
        ):
            times = np.zeros((2, len(MARKS)), np.uint64)
            for n, mark in enumerate(reached):
                for block in range(2):
                    waits = late is not None and (rank == late or mark not in ("start", tells))
                    at = 10**9 + start + 3000 * n + 100 * rank + block + offset + 500_000 * waits
                    times[block, list(MARKS).index(mark)] = at
            made.append(Stamps(kernel, rank, times))
    return made


def test_stamps_become_slices_and_arrows():
    made = of_stamps([stamps([0, 0])], {"device": "two of them"})
    assert check(made.events) == 4
    assert made.about["shift_ns"] == {0: 0, 1: 0}
    assert min(e["ts"] for e in made.events if e["ph"] == "X") == 0
    names = [e["name"] for e in made.events if e["ph"] == "X" and e["pid"] == 1 and e["tid"] == 10_001]
    assert names == [
        "combine",
        "until sent",
        "until arrived",
        "until reduced",
        "until left",
        "dispatch",
        "until announced",
        "until sent",
        "until counted",
        "until copied",
        "until left",
    ]


@pytest.mark.parametrize("fused", [False, True])
def test_a_round_with_stamps(fused, monkeypatch):
    """As on a GPU, in the simulator: kernels write stamps, and nothing is recorded."""
    monkeypatch.setattr(gpu_round, "WARM_UP", 0)
    cfg = EPConfig(2, 2, 1, 8, 1)
    made = of_stamps(gpu_round.stamped_rounds(cfg, LocalWorld(2, seed=0), fused=fused, seed=0), {})
    assert check(made.events) == 4
    kernels = {(e["pid"], e["name"]) for e in made.events if e["ph"] == "X" and e["cat"] == "kernel"}
    names = ("dispatch", "combine") if fused else ("dispatch_async", "dispatch_wait", "combine_async", "combine_wait")
    assert kernels == {(rank + 1, name) for rank in range(2) for name in names}
    assert made.about["shift_ns"] == {0: 0, 1: 0}  # one clock


@pytest.mark.parametrize("tells", ["announced", "claimed"])
@pytest.mark.parametrize("offset", [-50_000, 70_000])
def test_a_clock_that_contradicts_the_signals_is_put_right(offset, tells):
    rounds = [stamps([0, offset], late, tells) for late in (0, 1, None)]
    shifts, doubt = corrections(rounds)
    assert shifts[0] == 0 and abs(shifts[1] + offset) <= doubt[1] <= 10_000
    assert check(of_stamps(rounds, {}).events) == 4
    assert corrections(rounds[:1])[1][1] >= 0
