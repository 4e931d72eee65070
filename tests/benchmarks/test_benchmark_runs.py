"""A tiny run in the simulator: the table, the file, refusals, and runs in parts."""

import contextlib
import io
import json

import pytest

from benchmarks import cpu, figure, results, table
from benchmarks.__main__ import main
from benchmarks.measure import together
from benchmarks.shapes import Shape
from epmoe_ref.errors import PeerTimeout

TINY = "--ranks 2 --shapes 2x16/2/1 --iterations 2".split()
PHASES = {
    ("pairs fused", "dispatch"),
    ("pairs fused", "combine"),
    ("pairs plain", "dispatch"),
    ("pairs plain", "combine"),
    ("pairs split", "dispatch"),
    ("pairs split", "combine"),
    ("rows", "dispatch"),
    ("rows", "combine"),
    ("rows", "cached"),
    ("rows, host waits", "dispatch"),
    ("expert-major", "dispatch"),
    ("expert-major", "combine"),
}


def printed_by(*words):
    """The output of a command, which must succeed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(list(words)) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(record of the file, what rank 0 printed)."""
    file = tmp_path_factory.mktemp("results") / "tiny.json"
    out = printed_by(*TINY, "--against", "nccl", "--json", str(file))
    return json.loads(file.read_text()), out


def test_every_contender_has_a_row_for_each_phase(tiny):
    record, _ = tiny
    assert {(r["kernels"], r["phase"]) for r in record["rows"]} == PHASES
    for r in record["rows"]:
        assert r["iterations"] == 2 and 0 < r["p20_us"] <= r["us"] <= r["p80_us"] and r["host_us"] > 0
        assert r["piece_us"] > 0
        assert r["floor_us"] == pytest.approx(r["bytes"] / record["link_gbps"] / 1e3, rel=0.01)


def test_the_file_says_where_it_comes_from(tiny):
    record, printed = tiny
    assert record["date"][:4].isdigit() and "simulator" in record["device"] and record["versions"]["numpy"]
    assert record["n_ranks"] == 2 and "commit" in record and "written: " in printed
    assert record["cpus_of_ranks"] and "a piece of Python that is always the same took" in printed


def test_the_table_has_a_line_for_each_row_and_units(tiny):
    record, printed = tiny
    lines = table.table(record["rows"]).splitlines()
    assert len(lines) == 1 + len(record["rows"]) and all(line in printed for line in lines)
    assert lines[0].split("  ")[0] == "kernels" and "MB to others" in lines[0] and "x floor" in lines[0]


def test_what_cannot_run_here_is_named_with_the_reason(tiny):
    record, printed = tiny
    assert [n["kernels"] for n in record["not_run"]] == ["nccl all-to-all"]
    assert "mpirun" in record["not_run"][0]["why"] and "not run: nccl" in printed


def test_curves_of_the_figure_come_from_the_rows(tiny):
    record, _ = tiny
    lines, constants, floor = figure.curves(record, ("rows", "expert-major"), "combine", lambda shape: True)
    us = {r["kernels"]: r["us"] for r in record["rows"] if r["phase"] == "combine"}
    assert lines == {name: [(2, us[name])] for name in ("rows", "expert-major")}
    assert [n for n, _ in floor] == [2] and not constants  # they hold on H200s


def test_parts_of_a_run_are_merged_and_resumed(tiny, tmp_path):
    parts = [str(tmp_path / f"{only}.json") for only in ("fused", "expert-major")]
    for part, only in zip(parts, ("fused", "expert-major")):
        printed_by(*TINY, "--only", only, "--json", part)
    whole = tmp_path / "whole.json"
    printed_by("merge", *parts, "--json", str(whole))
    record = results.read(whole)
    assert {(r["kernels"], r["phase"]) for r in record["rows"]} == {
        p for p in PHASES if p[0] in ("pairs fused", "expert-major")
    } and len(record["parts"]) == 2
    out = printed_by(*TINY, "--only", "pairs,expert-major", "--resume", "--json", str(whole))
    again = results.read(whole)
    assert "2 cases" in out and len(again["parts"]) == 3 and len(again["rows"]) == len(record["rows"]) + 4
    assert [r for r in again["rows"] if r["kernels"] not in ("pairs plain", "pairs split")] == record["rows"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--shapes", "nonsense"], "TOKENSxHIDDEN/EXPERTS"),
        (["--only", "pears"], "no such section"),
        (["--quick", "--shapes", "1x64/4"], "shapes of its own"),
        (["--shapes", "3x64/4/2", "--ranks", "3"], "3 ranks cannot share 4 experts"),
        (["--shapes", "3x64/4"], "8 of 4 experts"),
        (["--resume"], "--json FILE"),
        (["--quick"], "there is no GPU"),
    ],
)
def test_options_that_make_no_sense_are_refused(words, said, capsys):
    assert main([*words, "--json", "-"]) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_measures_nothing_fails_and_leaves_no_file(tmp_path, capsys):
    file = tmp_path / "none.json"
    assert main([*TINY, "--only", "nccl", "--json", str(file)]) == 2
    assert "nothing was measured" in capsys.readouterr().out and not file.exists()


@pytest.mark.parametrize("words", [["--iterations", "0"], ["--ranks", "x"], ["compile", "--part", "3/2"]], ids=" ".join)
def test_numbers_that_make_no_sense_are_refused(words, capsys):
    with pytest.raises(SystemExit) as error:
        main(words)
    assert error.value.code == 2 and words[-1] in capsys.readouterr().err


def test_a_case_that_fails_leaves_the_others_alone(monkeypatch, tmp_path):
    from benchmarks.pairs import Pairs

    def launch(self, phase):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Pairs, "launch", launch)
    file = tmp_path / "some.json"
    out = printed_by(*TINY, "--only", "fused,expert-major", "--json", str(file))
    record = results.read(file)
    assert "not run: pairs fused at 2x16/2/1:bf16:uniform: RuntimeError: on purpose" in out
    assert [n["kernels"] for n in record["not_run"]] == ["pairs fused"]
    assert {r["kernels"] for r in record["rows"]} == {"expert-major"}


def test_cpu_numbers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cpu, "ROUND", Shape(2, 64, 4, 2))
    monkeypatch.setattr(cpu, "ROUND_RANKS", 2)
    file = tmp_path / "cpu.json"
    sizes = "--tokens 8 --hidden 64 --ranks 2 --experts 16 --repeats 1".split()
    assert main(["cpu", *sizes, "--json", str(file)]) == 0
    what = {line["what"]: line for line in json.loads(file.read_text())["lines"]}
    assert "reference dispatch" in what and "memcpy" in what
    simulated = [line for name, line in what.items() if "simulator" in name]
    assert len(simulated) == 2 and all(
        line["accesses_per_second"] > line["threads_per_second"] > 0 for line in simulated
    )
    assert "accesses_per_second" in capsys.readouterr().out


@pytest.mark.gpu
def test_benchmark_on_a_gpu(tmp_path):
    file = tmp_path / "gpu.json"
    assert main(["--ranks", "2", "--shapes", "16x1024/16/4", "--iterations", "5", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert not record["not_run"] and any(r["graph"] for r in record["rows"])


def test_what_failed_here_is_told_although_the_others_do_not_come():
    class Alone:
        def tell(self, value, timeout):
            raise PeerTimeout("rank 1, telling: rank 0 did not come")

    def fails():
        raise ValueError("7 rows, 8 are needed")

    with pytest.raises(PeerTimeout, match="rank 0 did not come; before that, here: ValueError: 7 rows") as raised:
        together(Alone(), fails)
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(PeerTimeout, match="did not come$"):
        together(Alone(), lambda: 1)
