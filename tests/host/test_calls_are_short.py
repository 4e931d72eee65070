"""A call goes through few files of the host: the third of its kind, of one rank, in the simulator."""

import sys
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import epmoe
from epmoe import EPConfig, ExpertParallel, LocalWorld, fused_a2a

HOST = Path(epmoe.__file__).parent
MOST = {  # files, moves between them
    "dispatch": (9, 28),
    "combine": (9, 28),
    "fused_dispatch": (9, 30),
    "fused_combine": (7, 18),
}


@cache
def file_of_host(name):
    """A file's path below epmoe; None if it is not of the host."""
    path = Path(name)
    if HOST not in path.parents or path.relative_to(HOST).parts[0] in ("kernels", "device"):
        return None
    return str(path.relative_to(HOST))


def way_of(function, *arguments):
    """The files of the host that a call runs through, in order, and its result."""
    files = []

    def look(frame, event, _):
        frame = frame if event == "call" else frame.f_back
        if event not in ("call", "return") or frame is None:
            return
        name = file_of_host(frame.f_code.co_filename)
        if name and (not files or files[-1] != name):
            files.append(name)

    sys.setprofile(look)
    try:
        result = function(*arguments)
    finally:
        sys.setprofile(None)
    return files, result


class OneRank(LocalWorld):
    """A rank whose arguments are no lists, as with one rank a process."""

    lists = False


@pytest.fixture(scope="module")
def ways():
    """{call: files} of third calls."""
    rng, found = np.random.default_rng(0), {}
    x = [rng.standard_normal((2, 16)).astype(ml_dtypes.bfloat16)]
    ids, weights = [rng.integers(0, 4, (2, 1), np.int32)], [rng.random((2, 1), np.float32)]
    group, of_group = OneRank(1), (x[0], ids[0], weights[0], 4)
    with ExpertParallel(EPConfig(1, 4, 1, 16, 4), LocalWorld(1), kernels="fast") as ep:
        for _ in range(2):  # the first one grows memory, the second one plans for it
            d = ep.dispatch(x, ids)
            ep.combine([one.output_tokens for one in d], d, weights)
            made = fused_a2a.fused_dispatch(*of_group, group)
            fused_a2a.fused_combine(made[0], group, made[-1])
        found["dispatch"], d = way_of(ep.dispatch, x, ids)
        rows = [one.output_tokens for one in d]
        found["combine"], _ = way_of(ep.combine, rows, d, weights)
        found["fused_dispatch"], made = way_of(fused_a2a.fused_dispatch, *of_group, group)
        found["fused_combine"], _ = way_of(fused_a2a.fused_combine, made[0], group, made[-1])
    return found


@pytest.mark.parametrize("call", MOST)
def test_a_call_goes_through_few_files(ways, call):
    files, (most_files, most_moves) = ways[call], MOST[call]
    assert len(set(files)) <= most_files, sorted(set(files))
    assert len(files) - 1 <= most_moves, files
