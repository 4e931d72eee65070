"""`epmoe explain`: files, sizes, refusals."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from epmoe.__main__ import main
from epmoe.explain import operations, stills


def run(capsys, *options):
    status = main(["explain", *options])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_page_tape_figures_and_trace_are_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stills, "png", lambda text: b"drawn in test_page.py")
    status, out, _ = run(
        capsys,
        "--ranks",
        "2",
        "--experts-per-rank",
        "1",
        "--top-k",
        "1",
        "--tokens",
        "2",
        "--fused",
        "--seed",
        "5",
        "--out",
        str(tmp_path / "p.html"),
        "--figures",
        str(tmp_path / "f"),
        "--trace",
        str(tmp_path / "t.json"),
    )
    assert status == 0 and "p.html: 2 ranks x 1 experts, top-1" in out
    assert 'href="p-tape.html"' in (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "2 ranks, 2 experts, top-1" in (tmp_path / "p-tape.html").read_text(encoding="utf-8")
    assert {"01-one-gpu-1.svg", "01-one-gpu-1.png", "animation.svg"} <= {
        p.name for p in (tmp_path / "f").iterdir()
    }
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["seed"] == 5


@pytest.mark.parametrize(
    "option, number, said", [("--top-k", 9, "top_k=9"), ("--experts", 7, "n_experts=7")]
)
def test_sizes_that_do_not_fit_are_refused_in_words(tmp_path, capsys, option, number, said):
    status, _, err = run(capsys, option, str(number), "--out", str(tmp_path / "p.html"))
    assert status == 2 and said in err and not list(tmp_path.iterdir())


def test_a_world_too_large_to_draw_says_so_and_draws_a_slice(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(operations, "pairs", list)
    status, out, _ = run(
        capsys, "--ranks", "8", "--tokens", "100", "--top-k", "8", "--out", str(tmp_path / "p.html")
    )
    assert status == 0 and "8 ranks x 2 experts x 100 tokens are too many to draw" in out
    assert [p.name for p in tmp_path.iterdir()] == ["p.html"]
    status, _, err = run(capsys, "--ranks", "8", "--trace", str(tmp_path / "t.json"))
    assert status == 2 and "--trace records every operation" in err


def test_a_users_own_routing_becomes_a_slice_with_totals(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(operations, "pairs", list)
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((640, 64)), axis=1)[:, :8].astype(np.int64)
    np.savez(tmp_path / "dump.npz", topk_ids=ids, n_experts=64)
    status, out, _ = run(
        capsys,
        "--ranks",
        "4",
        "--input",
        str(tmp_path / "dump.npz"),
        "--out",
        str(tmp_path / "p.html"),
    )
    assert status == 0 and "4 ranks x 16 experts, top-8" in out and "too many to draw" in out
    data = re.search(
        r'id="data">(.*?)</script>', (tmp_path / "p.html").read_text(encoding="utf-8")
    )[1]
    assert json.loads(data)["whole"]["load"] == np.bincount(ids.reshape(-1), minlength=64).tolist()
    few = np.array([[0, 1], [5, 2], [-1, 3], [4, 0]])
    np.savez(tmp_path / "few.npz", topk_ids=few, n_experts=6)
    status, out, _ = run(
        capsys,
        "--ranks",
        "2",
        "--input",
        str(tmp_path / "few.npz"),
        "--out",
        str(tmp_path / "few.html"),
    )
    data = re.search(
        r'id="data">(.*?)</script>', (tmp_path / "few.html").read_text(encoding="utf-8")
    )[1]
    assert status == 0 and json.loads(data)["world"]["ids"] == [few[:2].tolist(), few[2:].tolist()]
    np.savez(tmp_path / "none.npz", topk_ids=np.full((4, 2), -1), n_experts=6)
    status, _, err = run(
        capsys, "--input", str(tmp_path / "none.npz"), "--out", str(tmp_path / "n.html")
    )
    assert status == 2 and "no token to draw has an expert" in err
    np.savez(tmp_path / "odd.npz", topk_ids=np.full((4, 2), 99), n_experts=64)
    status, _, err = run(
        capsys, "--input", str(tmp_path / "odd.npz"), "--out", str(tmp_path / "q.html")
    )
    assert status == 2 and "holds 99" in err and not (tmp_path / "q.html").exists()


def test_a_folder_that_is_not_there_is_refused_in_words(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(operations, "pairs", list)
    status, _, err = run(
        capsys, "--ranks", "1", "--tokens", "1", "--out", str(tmp_path / "none" / "p.html")
    )
    assert status == 2 and "cannot be written" in err


def test_the_page_links_a_tape_whose_name_is_no_text(tmp_path, capsys):
    out = os.fsdecode(bytes(tmp_path) + b"/a \xff.html")
    status, _, err = run(capsys, "--ranks", "1", "--tokens", "1", "--out", out)
    with open(out, encoding="utf-8") as file:
        assert status == 0 and 'href="a%20%FF-tape.html"' in file.read()


def test_figures_say_what_they_lack(tmp_path, capsys, monkeypatch):
    options = (
        "--ranks",
        "2",
        "--tokens",
        "1",
        "--out",
        str(tmp_path / "p.html"),
        "--figures",
        str(tmp_path / "f"),
    )
    monkeypatch.setattr(operations, "pairs", list)
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    status, out, _ = run(capsys, *options)
    assert status == 0 and "pip install 'epmoe[explain]'" in out
    assert {p.suffix for p in (tmp_path / "f").iterdir()} == {".svg"}
    monkeypatch.setitem(sys.modules, "dukpy", None)
    status, _, err = run(capsys, *options)
    assert status == 2 and "pip install 'epmoe[explain]'" in err


def test_a_gpu_needs_no_simulator():
    """A trace of a GPU run does not need greenlet, which the simulator needs."""
    code = (
        "import sys; sys.modules['greenlet'] = None\n"
        "import epmoe.explain.command, epmoe.explain.gpu_round, epmoe.explain.stamped; print('fine')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"EPMOE_DEVICE": "gpu"},
    )
    assert done.stdout.strip() == "fine", done.stderr
