"""`verify --all` over processes: its kernels are listed in advance, each once, and shared out. Needs no GPU."""

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands_shown import python

from epmoe import __main__
from epmoe.device import kernel_cache
from epmoe.host import compiling
from epmoe.verify import compiled_first
from epmoe.verify.matrix import cases

HERE = Path(__file__).parent
ALL = list(cases(4, 256))


def test_the_pieces_have_every_kernel_that_the_cases_launch(gpu_side):
    found = gpu_side(HERE / "kernels_of_verify.py")
    assert found["launched"] == found["in pieces"] and None not in found["launched"]
    names = Counter(found["launched"].values())
    calls = "dispatch", "combine"
    assert set(names) == {f"{call}{part}" for call in calls for part in ("", "_async", "_wait")}
    assert found["pieces"] <= sum(names.values())


def test_a_piece_is_compiled_once_and_the_longest_come_first():
    pieces = compiled_first.pieces(ALL)
    assert len(ALL) == 252 and len(pieces) == len(set(pieces)) == 92
    cost = [(phase == "combine", not case.fused) for case, phase in pieces]
    assert cost == sorted(cost)
    assert {case.cfg for case in ALL} == {case.cfg for case, phase in pieces if phase == "dispatch"}


def compile_part(part, *sample, **environ):
    """How `verify --all --compile PART` ended."""
    return python("-m", "epmoe", "verify", "--all", *sample, "--compile", part, EPMOE_DEVICE="gpu", **environ)


@pytest.mark.nightly
def test_a_piece_is_compiled_without_a_gpu_and_found_again(tmp_path):
    smallest = "--sample", "1", "--seed", "34"  # a combine without exchange and weights
    cache, times = dict(EPMOE_CACHE_DIR=str(tmp_path), EPMOE_CACHE="1"), []
    for _ in range(2):
        done = compile_part("2/2", *smallest, **cache)
        assert done.returncode == 0, done.stderr
        files = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.cubin")}
        times.append(files)
    assert 1 <= len(files) <= 2 and times[0] == times[1]
    assert all(kernel_cache.read(file)[1].startswith(b"\x7fELF") for file in files)


def test_compiling_into_no_cache_cannot_be_done():
    done = compile_part("1/90", EPMOE_CACHE="0")
    assert done.returncode == 2 and "unset EPMOE_CACHE" in done.stderr
    assert len(done.stderr.splitlines()) == 1


class Kernel:
    def __init__(self, key):
        self.key = key

    def fingerprint(self, cc):
        return self.key


def test_only_what_the_cache_lacks_is_compiled_and_a_second_start_does_not_look_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("EPMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("EPMOE_CACHE", raising=False)
    monkeypatch.setattr(compiling, "device", SimpleNamespace(SIM=False))
    monkeypatch.setattr(os, "cpu_count", lambda: 99)
    asked, started = [], []
    monkeypatch.setattr(compiling, "run_together", started.extend)
    world = SimpleNamespace(
        lists=False,
        host=SimpleNamespace(Get_rank=lambda: 0),
        n_ranks=2,
        machine=SimpleNamespace(compute_capability=(9, 0)),
        tell=lambda value, timeout: [value],
    )

    def ahead():
        return compiling.ahead(world, "run", lambda: asked.append(1) or map(Kernel, ["a", "b", "a", "c"]), ["compile"])

    kernel_cache.write(tmp_path / "a.cubin", "name", b"code")
    assert ahead() == (3, 2, 2) and started == [["compile", "1/2"], ["compile", "2/2"]]
    for key in "bc":
        kernel_cache.write(tmp_path / f"{key}.cubin", "name", b"code")
    assert ahead() == (3, 0, 0) and len(started) == 2 and len(asked) == 1
    (tmp_path / "b.cubin").unlink()
    assert ahead() == (3, 1, 1) and len(asked) == 1


def test_the_simulator_compiles_nothing(capsys):
    assert __main__.main(["verify", "--all", "--compile", "1/2"]) == 2
    assert "EPMOE_DEVICE=gpu" in capsys.readouterr().err
