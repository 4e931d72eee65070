"""`epmoe puzzle --grade`: a folder of answers, each in a process that cannot write, connect or outlive its time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from answer_files import right, wrong

from epmoe.__main__ import main
from epmoe.puzzles import limits

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def classroom(tmp_path, monkeypatch):
    """Four students; the last two write into the folder of the first, and open a connection. One more file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stolen = tmp_path / "class" / "ann" / "puzzle01.py"
    for student, text in (
        ("ann", right(1)[0]),
        ("bob", wrong(1)[0][0]),
        ("eve", f"open({str(stolen)!r}, 'a').write('#')\n" + right(1)[0]),
        ("mal", "import socket\nsocket.create_connection(('127.0.0.1', 9))\n" + right(1)[0]),
    ):
        (tmp_path / "class" / student).mkdir(parents=True)
        (tmp_path / "class" / student / "puzzle01.py").write_text(text)
    (tmp_path / "class" / "carol.py").write_text(right(1)[0])
    return tmp_path / "class"


def test_a_folder_of_answers_is_graded(classroom, capsys):
    before = {path: path.read_bytes() for path in classroom.rglob("*") if path.is_file()}
    assert main(["puzzle", "--grade", str(classroom), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    records = {r["student"]: r for r in told["answers"]}
    assert [r["passed"] for r in told["answers"]] == [True, False, False, False]
    assert told["skipped"] == [str(classroom / "carol.py")]
    assert "each block copies one row only" in records["bob"]["verdict"]
    assert "outside its folder" in records["eve"]["verdict"]
    assert "it opens a network connection" in records["mal"]["verdict"]
    assert ("by Linux namespaces" in told["isolation"]) == bool(limits.namespaces())
    assert {path: path.read_bytes() for path in classroom.rglob("*") if path.is_file()} == before


def test_single_files_need_the_puzzle_s_number(tmp_path, capsys):
    (tmp_path / "ann.py").write_text(right(1)[0])
    assert main(["puzzle", "--grade", str(tmp_path)]) == 2
    assert f"Files STUDENT.py are judged by `epmoe puzzle N --grade {tmp_path}`" in capsys.readouterr().err
    (tmp_path / "numpy.py").write_text("1 +")
    assert main(["puzzle", "1", "--grade", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "ann              puzzle  1  RIGHT" in said and "1 of 2 answers are right" in said
    assert "numpy.py line 1 is not Python" in said
    (tmp_path / "bob").mkdir()
    (tmp_path / "ann.py").rename(tmp_path / "bob" / "puzzle01.py")
    assert main(["puzzle", "--grade", str(tmp_path)]) == 0
    assert f"skipped: {tmp_path / 'numpy.py'} does not say" in capsys.readouterr().out


@pytest.mark.parametrize("make, says", [("class", "no answer is in"), ("", "is not a folder")])
def test_what_cannot_be_graded_is_refused(tmp_path, capsys, make, says):
    folder = tmp_path / "class"
    if make:
        folder.mkdir()
    assert main(["puzzle", "--grade", str(folder)]) == 2
    assert says in capsys.readouterr().err


def test_the_kernel_itself_refuses_network_and_writing(tmp_path):
    """The barrier behind the audit hook."""
    words = limits.namespaces()
    if not words:
        pytest.skip("no unshare, or no namespaces for this user: the audit hook is all there is")
    code = (
        "import ctypes, socket\n"
        "from epmoe.puzzles import limits\n"
        "limits.seal('.')\n"
        "open('here', 'w').write('x')\n"
        f"for act in (lambda: open({str(tmp_path.parent / 'there')!r}, 'w'),\n"
        "            lambda: socket.create_connection(('192.0.2.1', 80), 1)):\n"
        "    try: print('done', act())\n"
        "    except OSError as error: print(type(error).__name__, error.errno)\n"
        "print('mount', ctypes.CDLL(None).mount(b'.', b'.', None, 4096, None))\n"
    )
    done = subprocess.run(
        [*words, sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["OSError 30", "OSError 101", "mount -1"], done.stderr
    assert (tmp_path / "here").exists() and not (tmp_path.parent / "there").exists()
