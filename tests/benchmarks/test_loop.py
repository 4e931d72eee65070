"""benchmarks loop: back-to-back calls with the same arrays, with new arrays, and with results kept."""

import json

import pytest

from benchmarks import loop, loop_contenders, results, worlds
from benchmarks.__main__ import main
from benchmarks.shapes import Shape

SHAPE = Shape(3, 64, 4, 2)


def test_each_way_of_giving_arrays_has_a_row_and_a_piece_of_python_beside_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loop, "REPEATS", 2)
    monkeypatch.setattr(loop, "PATIENCE", 0)
    monkeypatch.setattr(loop, "LAYERS", 2)
    file = tmp_path / "loop.json"
    words = "loop --ranks 2 --shapes 2x16/2/1 --pairs 1 --only ExpertParallel --against nccl --json".split()
    assert main([*words, str(file)]) == 0
    record = results.read(file)
    assert {(r["kernels"], r["arrays"]) for r in record["loop"]} == {
        ("ExpertParallel", a) for a in ("same", "new", "layers")
    }
    assert all(0 < r["p20_us"] <= r["us"] <= r["p80_us"] and r["piece_us"] > 0 for r in record["loop"])
    assert {n["kernels"] for n in record["not_run"]} == {"NCCL all-to-all", "NCCL all-gather + reduce-scatter"}
    assert "us a pair" in capsys.readouterr().out and results.merged([record, record])["loop"] == record["loop"]


def addresses(given):
    return [
        of_rank.data_ptr() if hasattr(of_rank, "data_ptr") else of_rank.ctypes.data for of in given for of_rank in of
    ]


@pytest.mark.parametrize("kind", [loop_contenders.Pairs, loop_contenders.RowsOnDevice])
def test_new_arrays_lie_elsewhere_and_hold_the_same_tokens(kind):
    contender = kind(worlds.make(2), SHAPE)
    first, second = contender.inputs(0), contender.inputs(1)
    assert not set(addresses(first)) & set(addresses(second))
    for a, b in zip(first[1], second[1]):
        assert sorted(map(tuple, a.tolist())) == sorted(map(tuple, b.tolist()))
    contender.close()


def test_a_run_that_is_cut_off_leaves_the_shapes_before(tmp_path, monkeypatch):
    def cut_off(world, chosen, against, record, *how):
        if record["loop"]:
            raise KeyboardInterrupt
        record["loop"] = [row]

    row = {"kernels": "ExpertParallel", "arrays": "same", "us": 1.0}
    row |= {"tokens": 3, "hidden": 64, "experts": 4, "top_k": 2}
    monkeypatch.setattr(loop, "measure_all", cut_off)
    file = tmp_path / "loop.json"
    words = "loop --ranks 2 --shapes 3x64/4/2 5x64/4/2 --only ExpertParallel --json".split()
    assert main([*words, str(file)]) == 130  # interrupted
    record = results.read(file)
    assert record["loop"] == [row]
    (missing,) = record["not_run"]
    assert (missing["kernels"], missing["shape"]) == ("ExpertParallel", str(Shape(5, 64, 4, 2)))
    later = record | {"loop": [row | {"tokens": 5}], "not_run": []}
    assert results.merged([record, later])["not_run"] == []


@pytest.mark.parametrize("words", ["loop", "--only loop"])
def test_a_run_that_is_cut_off_in_a_shape_leaves_the_rows_before(tmp_path, monkeypatch, words):
    """Each row is written as soon as it is measured."""

    def row_of(world, contender, arrays, n_pairs, cpu):
        if arrays == "new":
            raise KeyboardInterrupt
        sizes = dict(tokens=3, hidden=64, experts=4, top_k=2)
        return {"kernels": contender.name, "arrays": arrays, "us": 1.0, "piece_us": 1.0} | sizes

    monkeypatch.setattr(loop, "_row", row_of)
    contenders = loop_contenders.Pairs, loop_contenders.RowsOnDevice
    monkeypatch.setattr(loop_contenders, "OURS", contenders)
    file = tmp_path / "loop.json"
    given = f"{words} --ranks 2 --shapes 3x64/4/2 --json {file}".split()
    assert main(given) == 130  # interrupted
    record = results.read(file)
    assert [row["arrays"] for row in record["loop"]] == ["same"]
    if words == "loop":
        assert [one["kernels"] for one in record["not_run"]] == [contenders[1].name]


@pytest.mark.nightly
def test_a_run_of_the_matrix_can_end_with_the_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(loop_contenders, "OURS", (loop_contenders.Pairs,))
    file = tmp_path / "whole.json"
    assert main("--ranks 2 --shapes 3x64/4/2 --only loop --json".split() + [str(file)]) == 0
    assert {r["kernels"] for r in json.loads(file.read_text())["loop"]} == {"ExpertParallel"}


def test_without_a_gpu_it_says_that_times_mean_nothing(capsys):
    assert main(["loop"]) == 2
    assert "no GPU" in capsys.readouterr().err and loop.CHAIN == 128
