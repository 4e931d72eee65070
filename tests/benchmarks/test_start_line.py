"""Ranks meet before each phase. If one fails, the others stop waiting and learn why."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import measure
from benchmarks.startline import FAILED, LeftBehind, meeting_kernel
from epmoe import LocalWorld
from epmoe.kernels.params import ParameterBlock
from epmoe_ref.errors import PeerTimeout

ROOT = Path(__file__).resolve().parents[2]


def met(comes, expired):
    """The words of two ranks after their first start line: (flags [2, 2], expired [2]).

    comes: the ranks that arrive. expired: its value before.
    """
    world = LocalWorld(2)
    machine, words = world.machine, ParameterBlock(("flags", 2), ("expired", 1))
    flags = [machine.alloc(256, "flags", rank) for rank in world.ranks]
    blocks = [machine.alloc(8 * words.n_words, "parameters", rank) for rank in world.ranks]
    for rank in world.ranks:
        flags[rank].write(np.array([0, 0, expired, 0], np.uint32))
        blocks[rank].write(words.pack({"flags": [f.address for f in flags], "expired": flags[rank].address + 8}))
    with machine.hold():
        for rank in comes:
            machine.launch(meeting_kernel(2, 1), 1, 32, (blocks[rank].address, 1, rank), stream=world.stream_of(rank))
    machine.synchronize()
    found = np.array([f.read(np.uint32, (3,)) for f in flags])
    return found[:, :2].tolist(), found[:, 2].tolist()


def test_ranks_meet_twice():
    assert met((0, 1), 0) == ([[2, 2], [2, 2]], [0, 0])


def test_nobody_waits_for_a_rank_that_failed():
    # TIMEOUT_S would take the simulator millions of steps
    assert met((0,), FAILED + 1) == ([[2, 0], [2, 0]], 2 * [FAILED + 1])


@pytest.mark.timeout(600)  # its two seconds of work are minutes on a machine that has much else to do
def test_what_a_rank_that_fails_says_to_the_other():
    pytest.importorskip("cuda.bindings")  # not on macOS
    pytest.importorskip("numba_cuda")
    program = Path(__file__).with_name("start_line_program.py")
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
        env=os.environ | {"EPMOE_DEVICE": "gpu", "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (0, "as it should be\n"), done.stderr


class Line:
    """A start line; whether this rank gives up."""

    gave_up = met_again = 0

    def give_up(self):
        self.gave_up += 1

    def meet_again(self):
        self.met_again += 1


def refused(mine, others, monkeypatch):
    """(what all ranks are told, whether this one gave up): rank 0 had the error `mine`, the others told theirs."""

    def times(*_):
        raise mine

    monkeypatch.setattr(measure, "times", times)
    contender = SimpleNamespace(
        phases=("dispatch",), world=SimpleNamespace(tell=lambda value, _: [value, *((error, None) for error in others)])
    )
    line = Line()
    with pytest.raises(measure.Refused) as error:
        measure.rows(contender, line, 1, 100.0)
    assert line.met_again == 1
    return str(error.value), bool(line.gave_up)


def test_everybody_is_told_the_error_that_the_others_follow_from(monkeypatch):
    left, waited, own = LeftBehind("left"), PeerTimeout("waited"), ValueError("own")
    of_others = {error: (measure._follows(error), f"{type(error).__name__}: {error}") for error in (left, waited, own)}
    assert refused(left, [of_others[waited], of_others[own]], monkeypatch) == ("rank 2: ValueError: own", False)
    assert refused(left, [None, of_others[waited]], monkeypatch) == ("rank 2: PeerTimeout: waited", False)
    assert refused(waited, [None, of_others[left]], monkeypatch) == ("rank 0: PeerTimeout: waited", True)
    assert refused(own, [of_others[waited], of_others[left]], monkeypatch) == ("rank 0: ValueError: own", True)


def test_a_peer_that_told_of_an_error_has_failed():
    def of(told):
        return measure.failed_peer(SimpleNamespace(told_already=lambda: told))

    assert of({}) is None and of({1: (None, [3.0]), 2: (None, [4.0])}) is None
    assert of({3: ((0, "ValueError: own"), None), 1: (None, [3.0]), 2: ((2, "LeftBehind: left"), None)}) == 2
