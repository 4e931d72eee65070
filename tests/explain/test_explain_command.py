"""`python -m epmoe explain`: files, sizes, and what it refuses."""

import json
import os
import subprocess
import sys

import pytest
from epmoe.__main__ import main


def run(capsys, *options):
    status = main(["explain", *options])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_page_figures_and_trace_are_written(tmp_path, capsys):
    status, out, _ = run(capsys, "--ranks", "2", "--experts-per-rank", "1", "--top-k", "1", "--tokens", "2", "--fused",
                         "--seed", "5", "--out", str(tmp_path / "p.html"), "--figures", str(tmp_path / "f"),
                         "--trace", str(tmp_path / "t.json"))
    assert status == 0 and "p.html" in out
    assert "2 ranks, 2 experts, top-1" in (tmp_path / "p.html").read_text()
    assert {p.name for p in (tmp_path / "f").iterdir()} == {f"{n}.svg" for n in (
        "routing", "recv_buf", "rows", "counters", "timeline", "combine", "dispatch")}
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["seed"] == 5


@pytest.mark.parametrize("option, number, said", [
    ("--top-k", 9, "top_k=9"), ("--ranks", 9, "at most 8"),
    ("--tokens", 100_000, "600000 messages, and a page shows at most 1024")])
def test_sizes_that_do_not_fit_are_refused_in_words(tmp_path, capsys, option, number, said):
    status, _, err = run(capsys, option, str(number), "--out", str(tmp_path / "p.html"))
    assert status == 2 and said in err and not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_refused_in_words(tmp_path, capsys):
    status, _, err = run(capsys, "--ranks", "1", "--tokens", "1", "--out", str(tmp_path / "none" / "p.html"))
    assert status == 2 and "cannot be written" in err


def test_png_needs_a_folder_and_resvg(tmp_path, capsys, monkeypatch):
    status, _, err = run(capsys, "--png", "--out", str(tmp_path / "p.html"))
    assert status == 2 and "--figures" in err
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    status, _, err = run(capsys, "--png", "--figures", str(tmp_path / "f"), "--out", str(tmp_path / "p.html"))
    assert status == 2 and "pip install 'epmoe[explain]'" in err and not list(tmp_path.iterdir())


def test_a_gpu_needs_no_simulator():
    """greenlet, on which the simulator stands, is not needed for a trace of a GPU run."""
    code = ("import sys; sys.modules['greenlet'] = None\n"
            "import epmoe.explain.command, epmoe.explain.gpu_round, epmoe.explain.stamped; print('fine')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                          env=os.environ | {"EPMOE_DEVICE": "gpu"})
    assert done.stdout.strip() == "fine", done.stderr
