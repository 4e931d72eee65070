"""Tables, picture and verdicts are made correctly from a made-up file of results.

The tables in README and docs equal those made from their files."""

import importlib.util
import re
from pathlib import Path

import pytest

from benchmarks import aims, loop_table, pages, peers, plan, readme_table, results, shapes, targets, traffic
from benchmarks.__main__ import main
from benchmarks.measure import Row
from benchmarks.shapes import Shape
from epmoe.provenance import install

ROOT = Path(__file__).resolve().parents[2]
LINK = 350.0
OURS, NCCL = "pairs fused", "nccl all-to-all"
HEADING = "| " + " | ".join(readme_table.HEADINGS) + " |"


def row(kernels, phase, shape, us, *, graph=False, sms=None):
    nbytes = shape.tokens * shape.top_k * traffic.payload_bytes(shape, shape.format) // 2
    floor = nbytes / LINK / 1e3
    sizes = shape.tokens, shape.hidden, shape.experts, shape.top_k, shape.format, shape.routing
    times = us, us, us, 30, nbytes, nbytes / us / 1e3, floor, round(us / floor, 2), 10.0, None
    return Row(kernels, phase, *sizes, graph, sms, *times).asdict()


@pytest.fixture
def record():
    small, large = Shape(128, 7168, 256), Shape(4096, 7168, 256)
    rows = [
        row(OURS, "dispatch", small, 40.0),
        row(OURS, "combine", small, 46.0),
        row(NCCL, "dispatch", small, 50.0),
        row(OURS, "dispatch", small, 30.0, graph=True),
        row(NCCL, "combine", small, 90.0),
        row("rows", "dispatch", large, 450.0),
        row("rows", "dispatch", large, 600.0, sms=24),
        row("rows", "dispatch", shapes.parse("4096x7168/256:zipf"), 540.0),
    ]
    made = {
        "device": "NVIDIA H200, 132 multiprocessors",
        "n_ranks": 4,
        "world": "MPIWorld",
        "not_run": [],
        "date": "2026-11-21T10:00:00+00:00",
        "commit": "abc",
        "link_gbps": LINK,
        "rows": rows,
    }
    peers.annotate(made)
    return made


def test_the_best_peer_is_the_fastest_of_this_run_and_of_the_constants(record):
    of = {(r["kernels"], r["phase"], r["sms"], r["graph"]): r for r in record["rows"] if r["routing"] == "uniform"}
    ours, combine = of[OURS, "dispatch", None, False], of[OURS, "combine", None, False]
    assert ours["peer"] == NCCL and ours["peer_here"] and not combine["peer_here"]
    assert (combine["peer"], combine["peer_us"]) == ("DeepEP low latency", 62.7)
    assert combine["to_peer"] == pytest.approx(46.0 / 62.7, abs=0.01)
    assert of["rows", "dispatch", None, False]["peer"] == "DeepEP V1"
    assert of[NCCL, "dispatch", None, False]["peer"] is None


def test_constants_are_for_such_machines_only(record):
    assert not peers.constants("simulator, seed 0", 4) and not peers.constants("NVIDIA H200", 3)
    assert not peers.constants("NVIDIA H200, shared by 4 virtual ranks", 4)
    assert all(shapes.parse(p.shape) and p.name in peers.ALL for p in peers.CONSTANTS)
    lines = peers.report(record)
    assert "not of this run" in lines[0] and len(lines) == 1 + len(peers.constants("NVIDIA H200", 4))


def test_verdicts_are_of_launches_without_a_graph(record):
    found = {str(v): (v.value, v.wanted, v.reached) for v in targets.verdicts(record["rows"], 4)}
    assert found["pairs fused dispatch 128x7168/256:bf16:uniform"] == (40.0, 42, True)
    assert found["pairs fused combine 128x7168/256:bf16:uniform"] == (46.0, 45, False)
    few_sms = found["rows dispatch, speed with 24 SMs 4096x7168/256:bf16:uniform"]
    assert few_sms == (0.75, 0.9, False)
    assert found["rows dispatch, against uniform 4096x7168/256:bf16:zipf"] == (1.2, 1.3, True)
    assert found["rows host 4096x7168/256:bf16:uniform"] == (10.0, 12, True)
    assert targets.report(record)[-1].endswith(f"of {len(found)} reached")
    assert not targets.report(record | {"device": "simulator, seed 0"})


def test_a_host_that_was_slow_just_then_is_told_from_a_slow_call(record, tmp_path, capsys):
    tokens = (1, 16, 128, 1024)
    record["rows"] = [
        row("rows", "dispatch", Shape(n, 7168, 256), 10.0) | dict(host_us=host_us, piece_us=piece_us)
        for n, host_us, piece_us in zip(tokens, (9.0, 14.0, 13.0, 8.0), (4.0, 6.8, 4.4, 6.8))
    ]
    of_host = [v for v in targets.verdicts(record["rows"], 4) if v.what == targets.HOST]
    assert [(v.shape.tokens, v.reached, v.slow) for v in of_host] == [
        (1, True, False),
        (16, False, True),
        (128, False, False),
        (1024, True, True),
    ]
    assert sum(s.endswith("MISSED, on a slow CPU") for s in targets.report(record)) == 1
    file = tmp_path / "4.json"
    results.write(record, file)
    assert main(["aims", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "| 8 to 14 **missed by 2 of 4 shapes**, 1 of them on a slow CPU |" in printed
    assert "Slow CPU: a fixed piece of Python" in " ".join(printed.split())


def test_every_target_is_a_case_of_a_quick_run():
    import argparse

    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    quick = {(c.kernels, c.shape, c.sms) for c in plan.cases(parser.parse_args(["--quick"]))}
    assert {(t.kernels, shapes.parse(t.shape), None) for t in targets.TARGETS} <= quick
    large = Shape(4096, 7168, 256)
    zipf = shapes.parse("4096x7168/256:zipf")
    assert quick >= {("rows", large, targets.FEW_SMS), ("rows", zipf, None)}
    whole = {(c.kernels, c.shape, c.sms) for c in plan.cases(parser.parse_args([]))}
    assert quick <= whole


def test_readme_table_has_our_times_floors_and_peers(record, tmp_path, capsys):
    file = tmp_path / "made.json"
    results.write(record, file)
    assert main(["table", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| pairs | 128 |" in lines[2] and "**40.0**" in lines[2] and "50.0 NCCL |" in lines[2]
    assert "**46.0**" in lines[2] and "62.7 DeepEP LL† |" in lines[2]
    assert lines[3].startswith("| rows | 4096 |") and lines[4].startswith("| rows Zipf | 4096 |")
    assert len({line.count("|") for line in lines[:5]}) == 1 and len(lines[0].split("|")) == 2 + len(
        readme_table.HEADINGS
    )
    below = " ".join(lines[lines.index("") + 1 :])
    assert below.startswith("Microseconds on 4 x NVIDIA H200, 2026-11-21, kernels of commit abc (`")
    assert str(file) in below
    assert "350 GB/s" in below


def test_the_table_takes_its_place_in_a_page(record, tmp_path, capsys):
    file, page = tmp_path / "made.json", tmp_path / "page.md"
    results.write(record, file)
    page.write_text("# A page\n\nno table\n")
    assert main(["table", str(file), "--into", str(page)]) == 2
    assert "has no table" in capsys.readouterr().err
    page.write_text(f"# A page\n\n{HEADING}\n| stale |\n| staler |\n\nwords\n")
    assert main(["table", str(file), "--into", str(page)]) == 0
    lines = page.read_text().splitlines()
    assert lines[:3] == ["# A page", "", HEADING] and lines[-2:] == ["", "words"]
    assert "stale" not in page.read_text()
    assert sum(line.startswith("|") for line in lines) == 5 and "**40.0**" in lines[4]


def test_a_page_has_a_table_for_each_number_of_gpus(record, tmp_path):
    page, files = tmp_path / "page.md", {}
    for n in (2, 4):
        files[n] = tmp_path / f"{n}.json"
        results.write(record | {"n_ranks": n, "commit": f"{n}" * 7}, files[n])
    page.write_text(
        f"{HEADING}\n| stale |\n\nMicroseconds on 4 x NVIDIA H200, stale.\n\nwords\n\n"
        f"{HEADING}\n| stale |\n\n"
        "Microseconds on 2 x NVIDIA H200, stale,\nof two lines.\n\nmore words\n"
    )
    for _ in range(2):  # the second time it finds its own output
        for n in (2, 4):
            assert main(["table", str(files[n]), "--into", str(page)]) == 0
        text = page.read_text()
        assert "stale" not in text and "of two lines" not in text and text.count(HEADING) == 2
        first, second = text.partition("\n\nwords\n\n")[::2]
        assert "4 x NVIDIA H200" in first and "4444444" in first
        assert "2 x NVIDIA H200" in second and "2222222" in second
        assert first.count("Microseconds") == 1 and second.endswith(".\n\nmore words\n")


def test_targets_stand_beside_what_is_reached(record, tmp_path, capsys):
    files, large = [tmp_path / "4.json", tmp_path / "2.json"], shapes.parse(targets.PLAIN_SHAPE)
    record["rows"] += [row(OURS, "combine", large, 1000.0)]
    record["rows"] += [row("pairs plain", "combine", large, 1500.0)]
    for n, file in zip((4, 2), files):
        results.write(record | {"n_ranks": n}, file)
    assert main(["aims", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    of_both = "4 GPUs: target | reached | 2 GPUs: target | reached |"
    assert lines[0] == "| kernels | tokens a rank | what | " + of_both
    assert "| pairs | 128 | dispatch | 42 | 40 | 33 | 40 **missed** |" in lines
    assert "| pairs | 128 | combine | 45 | 46 **missed** | 36 | 46 **missed** |" in lines
    assert "| pairs plain | 4096 | against fast | 4 | 1.5 to 1.5 | 4 | 1.5 to 1.5 |" in lines
    assert "| rows |  | against uniform | 1.3 | 1.2 to 1.2 | 1.3 | 1.2 to 1.2 |" in lines
    assert "| rows |  | host | 12 | 10 to 10 | 12 | 10 to 10 |" in lines
    assert main(["aims", str(files[0]), str(files[0])]) == 2
    assert "one for each number" in capsys.readouterr().err


def test_the_picture_is_written_as_svg(record, tmp_path, capsys):
    file = tmp_path / "made.json"
    results.write(record, file)
    status = main(["figure", str(file), "--out", str(tmp_path / "picture")])
    if importlib.util.find_spec("matplotlib") is None:
        assert status == 2 and install("bench") in capsys.readouterr().err
        return
    assert status == 0
    assert (tmp_path / "picture.svg").read_text().count("<path") > 20


@pytest.mark.parametrize("file", ["README.md", "benchmarks/results/2026-11-21-cpu.json", "no/such.json"])
@pytest.mark.parametrize("command", ["table", "merge"])
def test_files_of_something_else_are_refused_in_a_line(command, file, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    more = ["--json", str(tmp_path / "all.json")] if command == "merge" else []
    assert main([command, file, *more]) == 2
    said = capsys.readouterr().err
    assert file in said and len(said.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_of_loops_the_last_counts(record):
    row = dict(kernels="a", arrays="same", tokens=1, hidden=64, experts=4, top_k=2)
    runs = [record | {"loop": [row | dict(us=us)]} for us in (2.0, 1.0, 3.0)]
    assert results.merged(runs)["loop"] == [row | dict(us=3.0)]


def test_results_of_different_machines_are_not_merged(record):
    with pytest.raises(ValueError, match="device"):
        results.merged([record, record | {"device": "another"}])


def measured(name):
    """Of docs/measured.md: the table above the paragraph that begins so, the paragraph, the files that it names."""
    text = (ROOT / "docs" / "measured.md").read_text()
    before, found, after = text.partition(name)
    table = before.rstrip().rpartition("\n\n")[2]
    paragraph = found + after.partition("\n\n")[0]
    return (table.splitlines(), paragraph.splitlines(), re.findall(r"`(benchmarks/results/[\w-]+\.json)`", paragraph))


@pytest.mark.parametrize("n_ranks", [4, 2])
def test_docs_show_what_the_files_of_results_say(n_ranks):
    table, paragraph, files = measured(f"Microseconds on {n_ranks} x NVIDIA H200,")
    record = results.merged([results.read(ROOT / file) for file in files])
    peers.annotate(record)
    assert table == readme_table.markdown(record) and record["n_ranks"] == n_ranks
    assert paragraph == pages.paragraph(readme_table.below(record, files))


def test_docs_show_the_loops_that_a_file_of_results_holds():
    table, paragraph, files = measured("Wall clock on")
    record = results.merged([results.read(ROOT / file) for file in files])
    assert table == loop_table.markdown(record)
    assert paragraph == pages.paragraph(loop_table.below(record, files))


def test_readme_shows_a_part_of_the_table_of_4_gpus():
    whole, _, _ = measured("Microseconds on 4 x NVIDIA H200,")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in whole]
    shown = [[cells[i] for i in (0, 1, 2, 5, 6, 9)] for cells in lines]  # without the floors
    text = (ROOT / "README.md").read_text()
    table = re.findall(r"^\| (?:pairs|rows|expert-major)[^|]*\|.*$", text[text.index("## Measured") :], re.M)
    assert 4 <= len(table) <= 8
    assert all([cell.strip() for cell in line.split("|")[1:-1]] in shown for line in table)


def test_readme_shows_a_part_of_the_table_of_loops():
    whole, _, _ = measured("Wall clock on")
    cells = [[cell.strip().partition(" / ")[0] for cell in line.split("|")[1:-1]] for line in whole]
    text = (ROOT / "README.md").read_text().partition("## Measured")[2]
    table = text[text.index(whole[0]) :].partition("\n\n")[0].splitlines()
    assert 8 <= len(table) <= 14
    assert all([cell.strip() for cell in line.split("|")[1:-1]] in cells for line in table)


def test_docs_show_the_targets_beside_what_the_files_of_results_say():
    table, paragraph, files = measured("Targets, set from")
    records = [results.merged([results.read(ROOT / file)]) for file in files]
    assert table == aims.markdown(records) and [record["n_ranks"] for record in records] == [4, 2]
    assert paragraph == pages.paragraph(aims.below(records, files))
