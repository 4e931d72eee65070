"""A tiny run in the simulator: the table, the file, and what is refused with words."""

import json

import pytest
from benchmarks import figure, table
from benchmarks.__main__ import main

TINY = "--ranks 2 --shapes 3x64/4/2 --iterations 2".split()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(record of the file, what rank 0 printed)."""
    import contextlib
    import io

    file, out = tmp_path_factory.mktemp("results") / "tiny.json", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*TINY, "--against", "nccl", "--json", str(file)]) == 0
    return json.loads(file.read_text()), out.getvalue()


def test_every_contender_has_a_row_for_each_phase(tiny):
    record, _ = tiny
    assert {(r["kernels"], r["phase"]) for r in record["rows"]} == {
        (k, p) for k in ("pairs fused", "pairs split", "rows", "expert-major") for p in ("dispatch", "combine")
    } | {("rows", "cached")}
    for r in record["rows"]:
        assert r["iterations"] == 2 and 0 < r["p20_us"] <= r["us"] <= r["p80_us"] and r["host_us"] > 0
        assert r["floor_us"] == pytest.approx(r["bytes"] / record["link_gbps"] / 1e3, rel=0.01)


def test_the_file_says_where_it_comes_from(tiny):
    record, printed = tiny
    assert record["date"][:4].isdigit() and "simulator" in record["device"] and record["versions"]["numpy"]
    assert record["n_ranks"] == 2 and "written: " in printed


def test_the_table_has_a_line_for_each_row_and_units(tiny):
    record, printed = tiny
    lines = table.table(record["rows"]).splitlines()
    assert len(lines) == 1 + len(record["rows"]) and all(line in printed for line in lines)
    assert lines[0].split("  ")[0] == "kernels" and "MB to others" in lines[0] and "x floor" in lines[0]


def test_what_cannot_run_here_is_named_with_the_reason(tiny):
    record, printed = tiny
    assert [n["kernels"] for n in record["not_run"]] == ["nccl"]
    assert "mpirun" in record["not_run"][0]["why"] and "not run: nccl" in printed


def test_curves_of_the_figure_come_from_the_rows(tiny):
    times, floors = figure.curves(tiny[0]["rows"], "combine")
    assert set(times) == {"pairs fused", "pairs split", "rows", "expert-major"} and set(floors) == {"pairs", "rows"}
    assert all(points[0][0] == 3 for points in times.values())


def test_a_bad_shape_is_refused(capsys):
    assert main(["--shapes", "nonsense", "--json", "-"]) == 2
    assert "TOKENSxHIDDEN/EXPERTS" in capsys.readouterr().err


def test_cpu_numbers(tmp_path, capsys):
    file = tmp_path / "cpu.json"
    sizes = "--tokens 8 --hidden 64 --ranks 2 --experts 16 --repeats 1".split()
    assert main(["cpu", *sizes, "--json", str(file)]) == 0
    what = [line["what"] for line in json.loads(file.read_text())["lines"]]
    assert "reference dispatch" in what and sum("simulator" in w for w in what) == 2
    assert "operations_per_second" in capsys.readouterr().out


@pytest.mark.gpu
def test_benchmark_on_a_gpu(tmp_path):
    file = tmp_path / "gpu.json"
    assert main(["--ranks", "2", "--shapes", "16x1024/16/4", "--iterations", "5", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert not record["not_run"] and any(r["graph"] for r in record["rows"])
