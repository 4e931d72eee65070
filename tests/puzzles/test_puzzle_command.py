"""`epmoe puzzle` as a student uses it, and the limits on a file."""

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from answer_files import right, wrong

from epmoe import puzzles
from epmoe.__main__ import main
from epmoe.puzzles import child
from epmoe.puzzles.holes import answers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def test_from_the_list_to_a_solved_puzzle(folder, capsys):
    assert main(["puzzle"]) == 0
    listed = capsys.readouterr().out
    assert "   1  Copy rows\n      blocks share rows" in listed
    assert max(map(len, listed.splitlines())) <= 80
    assert main(["puzzle", "1"]) == 0
    assert "In NumPy:" in capsys.readouterr().out
    assert main(["puzzle", "1", "--start"]) == 0
    assert main(["puzzle", "1", "--start", "here"]) == 0 and (folder / "here").exists()
    capsys.readouterr()
    assert main(["puzzle"]) == 0
    assert re.search(r" 1  Copy rows +begun\n", capsys.readouterr().out)
    assert main(["puzzle", "1", "--check"]) == 1
    assert "NOT YET  no row has been copied yet" in capsys.readouterr().out
    (folder / "puzzle01.py").write_text("")
    assert main(["puzzle", "1", "--check"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "puzzle01.py has no ROWS: is it the file that `epmoe puzzle 1 --start` wrote?" in said
    (folder / "puzzle01.py").write_text(right(1)[0])
    assert main(["puzzle", "1", "--check"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("RIGHT  ") and said.endswith("Next: epmoe puzzle 2\n")
    assert main(["puzzle"]) == 0
    assert re.search(r" 1  Copy rows +solved\n", capsys.readouterr().out)


def test_a_verdict_fits_the_terminal_though_its_numbers_are_wide(folder, capsys):
    (folder / "puzzle10.py").write_text(wrong(10)[0][0])
    assert main(["puzzle", "10", "--check"]) == 1
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert re.search(r"should be\n.*\n  token 0 +\[ *-5.12227e-09\].*\n +<- first diff", said, re.S)


def test_a_folder_that_cannot_be_written_gets_its_verdict(folder, capsys):
    (folder / "puzzle01.py").write_text(right(1)[0])
    (folder / ".puzzles_solved.json").mkdir()  # stands for a read-only folder, which stops no administrator
    assert main(["puzzle", "1", "--check"]) == 0
    assert capsys.readouterr().out.startswith("RIGHT")


def test_a_verdict_as_json(folder, capsys):
    (folder / "mine.py").write_text("print('hello')\n" + wrong(1)[3][0])
    assert main(["puzzle", "1", "--check", "mine.py", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["puzzle"] == 1 and record["file"] == "mine.py" and not record["passed"]
    assert "no multiple of 16" in " ".join(record["verdict"].split())


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--check"], "need a number"),
        (["1", "--json"], "--json goes together with --check or --grade"),
        (["1", "--check", "nothing.py"], "epmoe puzzle 1 --start nothing.py"),
        (["1", "--gpu"], "--gpu goes together with --check"),
        (["1", "--hint", "9"], "has 3 hints; `epmoe puzzle 1 --show` prints the answer"),
        (["1", "--start", "there.py"], "is left alone"),
    ],
)
def test_what_cannot_be_done_is_refused(folder, capsys, argv, says):
    (folder / "there.py").write_text("")
    assert main(["puzzle", *argv]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.nightly
def test_a_machine_without_a_gpu_says_so(folder, capsys, monkeypatch):
    """The kernels are right, but there is no GPU to run them."""
    monkeypatch.setattr(child, "verdict", lambda *_, **__: ("right", "fine"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (folder / "puzzle01.py").write_text(right(1)[0])
    assert main(["puzzle", "1", "--check", "--gpu"]) == 2
    said = capsys.readouterr().err
    assert "no CUDA GPU can be used" in said and said.endswith("; leave out --gpu\n")


def test_hints_grow_stronger(folder, capsys):
    assert main(["puzzle", "1", "--hint"]) == 0
    assert "--hint 2" in capsys.readouterr().out
    assert main(["puzzle", "1", "--hint", "3"]) == 0
    assert "Hint 3 of 3:\n    row = block_idx()\n    while row < num_tokens:\n        i = " in capsys.readouterr().out


def test_the_answer_is_shown_in_a_checkout_and_missing_elsewhere(folder, capsys, monkeypatch):
    assert main(["puzzle", "1", "--show"]) == 0
    assert "load16(rows + at)" in capsys.readouterr().out
    assert main(["puzzle", "15", "--show"]) == 0
    said = capsys.readouterr().out
    assert "\n# hole 1: send_pair\n" in said and "\n# hole 4: clean_up\n" in said
    assert f"\nTESTS = {answers(15).TESTS}\n" in said
    monkeypatch.setattr("epmoe.puzzles.holes.ANSWERS", folder)
    assert main(["puzzle", "1", "--show"]) == 2
    assert "the answers are not installed with epmoe" in capsys.readouterr().err


@pytest.mark.parametrize(
    "code, says",
    [
        ("import os; os._exit(0)", "ended the process with exit status 0"),
        pytest.param("import sys; sys.exit(0)", "line 1: SystemExit", marks=pytest.mark.nightly),
        ("import os\nwhile True: os.fork()", "line 2: Refused while the file was read: it starts a process"),
        ("x = bytearray(10**10)", "more than 1 GiB"),
        pytest.param("import os; os.kill(os.getppid(), 9)", "it sends a signal", marks=pytest.mark.nightly),
        ("try: __import__('os').system('ls')\nexcept Exception: pass", "it starts a process"),
    ],
)
def test_a_hostile_file_gets_a_verdict(folder, capsys, code, says):
    begin = time.monotonic()
    (folder / "puzzle01.py").write_text(f"{code}\n{right(1)[0]}")
    assert main(["puzzle", "1", "--check"]) == 1
    assert says in " ".join(capsys.readouterr().out.split())
    assert time.monotonic() - begin < 10


def test_an_endless_loop_gets_a_verdict(folder, capsys, monkeypatch):
    assert child.PATIENCE_S < 10
    monkeypatch.setattr(child, "PATIENCE_S", 1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    (folder / "puzzle01.py").write_text(right(1)[0].replace("row += grid_dim()", "while True: pass"))
    assert main(["puzzle", "1", "--check"]) == 1
    said = capsys.readouterr()
    assert said.err == "judging ...\n" and "at puzzle01.py line 43: is there a loop" in said.out


@pytest.mark.nightly
def test_the_wheel_has_the_puzzles_and_not_the_answers(tmp_path):
    """As CI builds it, from a copy."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, str(ROOT)],
        check=True,
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert {f"epmoe/puzzles/{stem}.py" for stem in puzzles.FILES.values()} <= set(names)
    assert not [name for name in names if "answers/" in name]
