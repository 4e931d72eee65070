"""`epmoe explain`: files, sizes, refusals."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from epmoe import device
from epmoe.__main__ import main
from epmoe.explain import operations, stills
from epmoe.provenance import install


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Function: runs the command with these words in tmp_path; its status, output and errors."""
    monkeypatch.chdir(tmp_path)

    def called(options):
        status = main(["explain", *options.split()])
        out = capsys.readouterr()
        return status, out.out, out.err

    return called


@pytest.fixture
def without_a_tape(monkeypatch):
    monkeypatch.setattr(operations, "pairs", list)


def data_of(page):
    """What the page's pictures are made of."""
    html = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', html)[1])


def test_page_tape_figures_and_trace_are_written(tmp_path, run, monkeypatch):
    monkeypatch.setattr(stills, "png", lambda text: b"drawn in test_page.py")
    sizes = "--ranks 2 --experts-per-rank 1 --top-k 1 --tokens 2"
    status, out, _ = run(f"{sizes} --fused --seed 5 --out p.html --figures f --trace t.json")
    assert status == 0 and "p.html: 2 ranks x 1 experts, top-1" in out
    assert 'href="p-tape.html"' in (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "2 ranks, 2 experts, top-1" in (tmp_path / "p-tape.html").read_text(encoding="utf-8")
    assert {"01-one-gpu-1.svg", "01-one-gpu-1.png", "animation.svg"} <= {p.name for p in (tmp_path / "f").iterdir()}
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["seed"] == 5


@pytest.mark.parametrize(
    "option, number, said, options",
    [
        ("--top-k", 9, "top_k=9", "--experts, --top-k"),
        ("--experts", 7, "n_experts=7", "--experts, --ranks"),
        ("--ranks", 16, "n_ranks=16 must be at most 8", "--ranks"),  # there is no --p2p-world-size
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_words(tmp_path, run, option, number, said, options):
    status, _, err = run(f"{option} {number} --out p.html")
    assert status == 2 and said in err and err.endswith(f"(see {options})\n") and not list(tmp_path.iterdir())


def test_a_world_too_large_to_draw_says_so_and_draws_a_slice(tmp_path, run, without_a_tape):
    status, out, _ = run("--ranks 8 --tokens 100 --top-k 8 --out p.html")
    assert status == 0
    said = "8 ranks x 2 experts x 100 tokens, top-8, are too many to draw (at most 4 x 3 x 4, top-3)"
    assert said in " ".join(out.split()) and max(map(len, out.splitlines())) <= 80
    assert "\nno tape: a world too large to draw has too many operations\n" in out
    assert [p.name for p in tmp_path.iterdir()] == ["p.html"]
    (tmp_path / "p-tape.html").write_text("old")
    assert "operations; p-tape.html is of an earlier run\n" in run("--ranks 8 --out p.html")[1]
    status, _, err = run("--ranks 8 --trace t.json")
    assert status == 2 and "--trace records every operation" in err


def test_a_users_own_routing_becomes_a_slice_with_totals(tmp_path, run, without_a_tape):
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((640, 64)), axis=1)[:, :8].astype(np.int64)
    np.savez(tmp_path / "dump.npz", topk_ids=ids, n_experts=64)
    status, out, _ = run("--ranks 4 --input dump.npz --out p.html")
    assert status == 0 and "4 ranks x 16 experts, top-8" in out and "too many to draw" in out
    load = data_of(tmp_path / "p.html")["whole"]["load"]
    assert load == np.bincount(ids.reshape(-1), minlength=64).tolist()
    few = np.array([[0, 1], [5, 2], [-1, 3], [4, 0]])
    np.savez(tmp_path / "few.npz", topk_ids=few, n_experts=6)
    status, out, _ = run("--ranks 2 --input few.npz --out few.html")
    drawn = data_of(tmp_path / "few.html")["world"]["ids"]
    assert status == 0 and drawn == [few[:2].tolist(), few[2:].tolist()]
    assert "p.html: 3 ranks x 2 experts" in run("--input few.npz --out p.html")[1]  # 4 do not divide 6
    np.savez(tmp_path / "ids.npz", topk_ids=ids)
    assert "p.html: 4 ranks x 16 experts" in run("--input ids.npz --out p.html")[1]
    guess = "n_experts=66, a guess: the largest id is 63, rounded up to a multiple of 3 ranks; --experts and --ranks"
    assert guess in " ".join(run("--ranks 3 --input ids.npz --out p.html")[1].split())
    np.savez(tmp_path / "none.npz", topk_ids=np.full((4, 2), -1), n_experts=6)
    status, _, err = run("--input none.npz --out n.html")
    assert status == 2 and "no token to draw has an expert" in err
    np.savez(tmp_path / "odd.npz", topk_ids=np.tile([0, 99], (4, 1)), n_experts=64)
    status, _, err = run("--input odd.npz --out q.html")
    assert status == 2 and "has expert 99" in err and not (tmp_path / "q.html").exists()


@pytest.mark.parametrize(
    "options, said",
    [
        ("--out none/p.html", "--out none/p.html cannot be written: none must be a folder you can write to"),
        ("--trace none/t.json", "--trace none/t.json cannot be written: none must be a folder you can write to"),
        ("--out .", "--out . is a folder: name a file"),
        ("--out p.html --trace p.html", "--trace p.html is the file of the page or of the tape"),
        ("--trace ./explain-tape.html", "--trace ./explain-tape.html is the file of the page or of the tape"),
        ("--input file --out file", "--out file is the file that is read, and would be overwritten"),
        ("--out file", "--out file exists and does not end in .html: name another file"),
        ("--trace file", "--trace file exists and does not end in .json: name another file"),
        ("--figures file", "--figures file is a file: name a folder"),
        ("--input file --top-k 5 --tokens 9", "--top-k, --tokens: no meaning with --input"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(tmp_path, run, options, said):
    (tmp_path / "file").write_text("")
    status, _, err = run(options)
    assert status == 2 and said in err and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_page_links_a_tape_whose_name_is_no_text(tmp_path, without_a_tape):
    out = os.fsdecode(bytes(tmp_path) + b"/a \xff.html")
    assert main(["explain", "--ranks", "1", "--tokens", "1", "--out", out]) == 0
    with open(out, encoding="utf-8") as file:
        assert 'href="a%20%FF-tape.html"' in file.read()


def test_figures_say_what_they_lack(tmp_path, run, without_a_tape, monkeypatch):
    options = "--ranks 2 --tokens 1 --out p.html --figures f"
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    status, out, _ = run(options)
    assert status == 0 and f"\n{install('explain')}\n" in out
    assert {p.suffix for p in (tmp_path / "f").iterdir()} == {".svg"}
    monkeypatch.setitem(sys.modules, "dukpy", None)
    (tmp_path / "p.html").unlink()
    status, _, err = run(options)
    assert status == 2 and f"\n{install('explain')}\n" in err and not (tmp_path / "p.html").exists()
    assert f"\nThe page has no pictures for print or without JavaScript: {install('explain')}\n" in run("--tokens 1")[1]


def test_on_a_gpu_options_of_pages_are_refused(run, monkeypatch):
    monkeypatch.setattr(device, "SIM", False)
    status, _, err = run("--trace t.json --figures f --out p.html")
    assert status == 2 and "--out, --figures: no meaning on a GPU" in err


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
