"""Each lesson runs in a terminal of 80 columns and asserts its own claims."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from epmoe.__main__ import main
from epmoe.lessons import FILES, exercise, measured, own_routing
from epmoe.lessons.answers import Wrong, load
from epmoe.lessons.command import new_answer
from epmoe.lessons.telling import EXERCISES, WORKED, cells, exercise_text, plain_simulator, tell, title, worked_problems

ROOT = Path(__file__).resolve().parents[2]


def test_they_are_numbered_from_one():
    assert list(FILES) == list(range(1, len(FILES) + 1))
    assert all(title(f.read_text()).startswith(f"Lesson {n}: ") for n, f in FILES.items())


@pytest.mark.parametrize(
    "number",
    # the longest two at night: they run on every change as notebooks too
    [pytest.param(n, marks=pytest.mark.nightly if n in (5, 10) else []) for n in FILES],
)
def test_a_lesson_runs_and_fits_the_terminal(capsys, number):
    tell(FILES[number])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80, [line for line in lines if len(line) > 80]
    source = FILES[number].read_text()
    for kind, *cell in cells(source):  # in order: each piece of text and code that is shown
        if kind in ("answer", "check"):
            continue
        for at, line in enumerate(cell[-1]):
            line = f"{cell[0] + at:3}│{line}" if kind == "code" else line.removeprefix("## ")
            lines = lines[[shown.rstrip() for shown in lines].index(line.rstrip()) + 1 :]


@pytest.mark.parametrize("number", FILES)
def test_a_lesson_ends_with_worked_problems_and_exercises_and_asks_for_predictions(number):
    found = cells(FILES[number].read_text())
    texts = [cell[1] for cell in found if cell[0] == "text"]
    headings = [lines[0] for lines in texts if lines[0].startswith("## ")]
    assert headings[-2:] == [WORKED, EXERCISES]
    problems = found[found.index(("text", [WORKED])) : found.index(("text", [EXERCISES]))]
    kinds = [cell[0] for cell in problems]
    assert 3 <= kinds.count("answer") <= 5
    assert kinds.count("check") == kinds.count("answer"), "an answer's numbers are not checked"
    assert sum(cell[0] == "predict" for cell in found) >= 2
    text = exercise_text(FILES[number].read_text())
    at = [text.index(f"{part}.") for part in ("WARM-UP", "CORE", "STRETCH")]
    words = " ".join(text.split())
    assert at == sorted(at) and "Set WARM_UP" in words and "Set STRETCH" in words


@pytest.mark.parametrize("number", FILES)
def test_every_line_of_a_lesson_is_told(number):
    source = FILES[number].read_text()
    told = [line.strip() for cell in cells(source) for line in cell[-1] if line.strip()]
    code = source.split("raise SystemExit\n", 1)[1].splitlines()
    assert told == [(line[2:] if line.startswith("#") else line).strip() for line in code if line.strip("# ")]


def test_a_lesson_runs_as_a_plain_file():
    done = subprocess.run(
        [sys.executable, FILES[1]],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stdout.startswith(title(FILES[1].read_text())), done.stderr


def test_text_code_and_output_take_turns_until_a_claim_fails(capsys, tmp_path):
    file = tmp_path / "lesson.py"
    file.write_text(
        '"""A lesson."""\n# ## One\n#\n# Text\n# goes on.\n\ndef f():\n    # code\n    return 1\n\n\n'
        'print("a")\nprint()\nprint("b", end="")\nprint("c")\n# ## Two\nassert f() == 2\n# ## Three\n'
    )
    with pytest.raises(AssertionError) as error:
        tell(file)
    assert error.traceback[-1].lineno + 1 == 17 and str(error.traceback[-1].path) == str(file)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "A lesson.",
        "",
        "One",
        "",
        "Text",
        "goes on.",
        "",
        "  7│def f():",
        "  8│    # code",
        "  9│    return 1",
        " 10│",
        " 11│",
        ' 12│print("a")',
        " 13│print()",
        ' 14│print("b", end="")',
        ' 15│print("c")',
        "",
        "    a",
        "",
        "    bc",
        "",
        "Two",
        "",
        " 17│assert f() == 2",
    ]


def test_a_step_at_a_time(monkeypatch, tmp_path):
    file, asked = tmp_path / "lesson.py", []
    file.write_text('"""A lesson."""\n# ## One\n# ## Two\n# ## Three\n')
    monkeypatch.setattr("builtins.input", asked.append)
    tell(file, pause=True)
    assert len(asked) == 2

    def ends(question):
        asked.append(question)
        raise EOFError

    monkeypatch.setattr("builtins.input", ends)
    tell(file, pause=True)
    assert len(asked) == 3  # without input it waits no more


def test_a_prediction_is_asked_for_before_the_code_and_recalled_after_it(capsys, monkeypatch, tmp_path):
    file = tmp_path / "lesson.py"
    file.write_text('"""A lesson."""\n# Text.\n#\n# Predict: One or\n# two?\n#\n# Run:\n\nprint("two")\n# End.\n')

    def answered(question):
        print(question)
        return "one"

    monkeypatch.setattr("builtins.input", answered)
    tell(file, pause=True)
    told = capsys.readouterr().out
    said = (
        "Text.",
        "Predict: One or\ntwo?",
        "Your prediction: ",
        "Run:",
        "print",
        "    two",
        "You predicted: one",
        "End.",
    )
    at = [told.index(text) for text in said]
    assert at == sorted(at)
    tell(file)
    told = capsys.readouterr().out
    assert "Predict: One or\ntwo?" in told and "predict" not in told


def test_answers_are_folded_and_their_numbers_checked(capsys, tmp_path):
    file = tmp_path / "lesson.py"
    file.write_text(
        '"""Lesson 0: Sums."""\n# ## Worked problems\n# 1. Six times seven?\n#\n# Answer: 42, of\n# course.\n\n'
        "n = 6 * 7\nassert n == 42\n\n# 2. More?\n#\n# ## Exercises\n#\n# CORE. Go on.\n"
    )
    tell(file)
    told = capsys.readouterr().out
    assert "folded. `epmoe lesson 0 --answers` shows" in told and "Six times" in told and "2. More?" in told
    assert "42" not in told and "course" not in told
    assert worked_problems(file.read_text()) == "1. Six times seven?\n\nAnswer: 42, of\ncourse.\n\n2. More?"
    file.write_text(file.read_text().replace("6 * 7", "6 * 9"))
    with pytest.raises(AssertionError):
        tell(file)


@pytest.mark.parametrize("number", FILES)
def test_answers_are_shown_with_their_questions(capsys, number):
    status, text = run(capsys, str(number), "--answers")
    assert status == 0 and text.startswith("1. ")
    assert "Exercises" not in text
    assert text.count("Answer: ") == len(re.findall(r"^\d\. ", text, re.M)) >= 3


def test_options_of_the_simulator_do_not_reach_a_lesson(monkeypatch, tmp_path):
    monkeypatch.setenv("EPMOE_RACECHECK", "1")
    file = tmp_path / "lesson.py"
    file.write_text('"""A lesson."""\nfrom epmoe import LocalWorld\nassert not LocalWorld(1).machine.racecheck\n')
    tell(file)
    assert os.environ["EPMOE_RACECHECK"] == "1"


def run(capsys, *argv):
    status = main(["lesson", *argv])
    told = capsys.readouterr()
    return status, told.out + told.err


def test_the_list_names_every_lesson(capsys):
    status, text = run(capsys)
    assert status == 0 and max(map(len, text.splitlines())) <= 80
    for file in FILES.values():
        assert title(file.read_text()).partition(": ")[2].rstrip(".") in text


def test_start_writes_the_question_and_spares_what_is_there(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, text = run(capsys, "2", "--start")
    assert status == 0 and "--check answer2.py" in text
    assert exercise_text(FILES[2].read_text()) in (tmp_path / "answer2.py").read_text()
    (tmp_path / "answer2.py").write_text("mine")
    status, text = run(capsys, "2", "--start")
    assert status == 2 and "is left alone" in text and (tmp_path / "answer2.py").read_text() == "mine"
    assert run(capsys, "2", "--start", "here")[0] == 0 and (tmp_path / "here").exists()
    assert run(capsys, "2", "--check", "here")[0] == 1
    (tmp_path / "a b").mkdir()
    assert run(capsys, "2", "--start", "a b/c.py")[1].endswith("lesson 2 --check 'a b/c.py'\n")
    assert run(capsys, "2", "--start", "a b/c.py")[1].endswith("--start 'a b/c_2.py'\n")
    status, text = run(capsys, "2", "--start", str(tmp_path / "no" / "folder.py"))
    assert status == 2 and "folder.py: No such file or directory" in text


@pytest.mark.parametrize("number", FILES)
def test_what_start_writes_is_python_and_not_yet_an_answer(capsys, number, tmp_path):
    file = tmp_path / "fresh.py"
    assert run(capsys, str(number), "--start", str(file))[0] == 0
    assert max(map(len, new_answer(number).splitlines())) <= 120 and exercise(number).STUB
    answer = load(file, number)
    for judged in (
        lambda: exercise(number).judge(answer),
        lambda: exercise(number).WARM_UP.judge(answer, "WARM_UP"),
        lambda: exercise(number).STRETCH.judge(answer, "STRETCH"),
    ):
        with plain_simulator(), pytest.raises(Wrong):
            judged()


def test_lesson_7_takes_a_routing_of_the_readers_own(capsys, tmp_path):
    file, ids = tmp_path / "routing.npz", np.tile([[9, 1, -1], [9, 2, 3]], (50, 1))
    np.savez(file, topk_ids=ids)
    found = own_routing.read(file, 4)
    assert (found[0] == ids).all() and found[1] == 12  # the least number that 4 divides
    np.savez(file, topk_ids=ids, n_experts=16)
    assert own_routing.read(file, 4)[1] == 16
    status, text = run(capsys, "7", "--input", str(file))
    assert status == 0 and f"{file}: 100 tokens, 16 experts, top 3" in text.replace("\n    ", " ")
    assert "hottest experts: [100  50  50  50" in text
    assert own_routing.INPUT is None  # the next lesson of this process draws its own


@pytest.mark.parametrize(
    "argv, says",
    [
        (["6", "--input", "x.npz"], "lesson 7 --input FILE"),
        (["7", "--check", "--input", "x.npz"], "lesson 7 --input FILE"),
        (["7", "--input", "nothing.npz"], "nothing.npz cannot be read"),
        (["7", "--input", "six.npz"], "which the lesson's 4 ranks do not divide"),
        (["7", "--input", "none.npz"], "holds no pair"),
    ],
)
def test_a_routing_that_lesson_7_cannot_take_is_refused(argv, says, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    np.savez("six.npz", topk_ids=[[0, 5]], n_experts=6)
    np.savez("none.npz", topk_ids=[[-1, -1]], n_experts=8)
    status, text = run(capsys, *argv)
    assert status == 2 and says in text and len(text.splitlines()) == 1


def test_lesson_9_shows_a_table_of_loops_if_there_is_one(capsys, monkeypatch, tmp_path):
    row = dict(kernels="ExpertParallel", arrays="new", tokens=128, us=55.5)
    record = dict(device="GPU X, 1", date="2", n_ranks=2, rows=[], loop=[row])
    (tmp_path / "a.json").write_text(json.dumps(record))
    older = record | dict(date="1", loop=[row | dict(us=1)])
    (tmp_path / "b.json").write_text(json.dumps(older))
    (tmp_path / "c.json").write_text(json.dumps(older | dict(date="3", device="the simulator")))
    slow = row | dict(arrays="same", us=77, slow=3)
    (tmp_path / "d.json").write_text(json.dumps(older | dict(date="0", loop=[slow])))
    (tmp_path / "e.json").write_text(json.dumps(older | dict(device="GPU Y, 1", loop=[row | dict(tokens=1)])))
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    assert measured.loop() == ([slow, row], "2 x GPU X") and measured.newest() is None
    file = tmp_path / "lesson.py"
    file.write_text(FILES[9].read_text().partition("# ## Graphs")[0])
    tell(file)
    told = capsys.readouterr().out
    assert f"{128:10}   77.0*       -\n" in told and "unless a graph replays the kernels" in told
    assert "us a pair of dispatch and combine, 128 tokens, 2 x GPU X" in told
    assert (
        f"{'ExpertParallel':38}   77.0*    55.5       -       -\n" in told and told.count("    *: on a slow CPU\n") == 2
    )
    (tmp_path / "d.json").unlink()
    tell(file)
    told = capsys.readouterr().out
    assert "    *: on a slow CPU\n" not in told and "    -: not measured\n" in told
