"""The clock of a soak starts after the kernels are compiled and loaded."""

import json
from types import SimpleNamespace

import pytest
from commands_shown import python

from epmoe import EPConfig, LocalWorld
from epmoe.__main__ import main
from epmoe.device import kernel_cache
from epmoe.soak import command, compiled_first
from epmoe.soak.soak import Soak

CFG = EPConfig(2, 4, 2, 16, 3)
SIZES = "--ranks 2 --experts 4 --top-k 2 --hidden 16 --tokens 3".split()


def test_the_time_limit_and_the_rate_are_of_rounds_alone(tmp_path, capsys, monkeypatch):
    now, round_of, file = [0.0], Soak.round, tmp_path / "soak.json"

    def compile_all(cfg, world, **options):
        now[0] += 100
        return 7, 6, 5

    def round_of_a_second(soak, number):
        now[0] += 1
        round_of(soak, number)

    monkeypatch.setattr(command, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(compiled_first, "compile_all", compile_all)
    monkeypatch.setattr(Soak, "round", round_of_a_second)
    assert main(["soak", "--seconds", "2", "--json", str(file), *SIZES]) == 0
    said, record = capsys.readouterr().out, json.loads(file.read_text())
    assert max(map(len, said.splitlines())) <= 80
    assert "7 kernels ready in 100.0 s, 6 of them compiled by 5 processes\n" in said
    assert "PASS  2 rounds, 0 errors, 2.0 s, 1.00 rounds/s" in said
    assert (record["rounds"], record["seconds"], record["rounds_per_second"]) == (2, 2, 1)
    assert (record["kernels"], record["kernels_compiled"], record["kernels_ready_seconds"]) == (7, 6, 100)


def test_kernels_are_compiled_without_a_gpu(tmp_path):
    run = compiled_first.as_words(CFG, fused=True, seed=0, poison=False)
    where = dict(EPMOE_DEVICE="gpu", EPMOE_CACHE_DIR=str(tmp_path), EPMOE_CACHE="1")
    done = python("-m", compiled_first.__name__, run, "9.0", "2/7", **where)
    assert done.returncode == 0, done.stderr
    ((name, code),) = map(kernel_cache.read, tmp_path.glob("*.cubin"))
    assert "count" in name and code.startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.parametrize("options", [dict(fused=True), dict(fused=False, poison=True)], ids=["fused", "split"])
@pytest.mark.parametrize("token_format", ["bf16", "mxfp8"])
def test_rounds_load_no_kernel_that_was_not_ready(options, token_format, monkeypatch):
    from epmoe.device import gpu_machine

    cfg = EPConfig(2, 4, 2, 1024, 3, token_format=token_format)
    options = dict(seed=0, poison=False) | options
    world = LocalWorld(2)
    assert compiled_first.compile_all(cfg, world, **options)[0] >= 7

    def late(kernel, cc):
        raise AssertionError(f"{kernel.name} was not ready")

    monkeypatch.setattr(gpu_machine, "LoadedKernel", late)
    with Soak(cfg, world, **options) as soak:
        soak.round(0)
        assert [f.errors for f in soak.found()] == [0, 0]
