"""Judges a folder of answers, each in a process, a folder and, where it can be had, namespaces of its own."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from epmoe.command_line import DIFFERS, EQUAL
from epmoe.lessons.telling import for_terminal
from epmoe.puzzles import FILES, limits
from epmoe.puzzles.child import verdict
from epmoe_ref.errors import EPValueError

OF_PUZZLE = re.compile(r"puzzle(\d+)\.py$")
IN_ALL_S = 120
BY_KERNEL = (
    "enforced by Linux namespaces: no network, no file written outside a scratch folder, no process survives; "
    "and by resource limits: 1 GiB of memory, 60 s of CPU time"
)
BY_HOOK = (
    "enforced by resource limits: 1 GiB of memory, 60 s of CPU time; refused by an audit hook, which stops "
    "mistakes and not attacks: network, other processes, files written outside a scratch folder. For more, "
    "run on Linux with `unshare`"
)


@dataclass(frozen=True)
class Answer:
    """One file of one student."""

    student: str
    puzzle: int
    file: str


def answers_in(folder, number=None):
    """(Answers in a folder, files skipped): STUDENT/puzzleNN.py, or with a number also STUDENT.py.

    Without a number STUDENT.py is skipped. EPValueError if there are no answers.
    """
    if not folder.is_dir():
        raise EPValueError(f"{folder} is not a folder: --grade takes one with a file or folder a student")
    found, skipped = [], []
    for path in sorted(folder.iterdir()):
        files = sorted(path.glob("puzzle*.py")) if path.is_dir() else []
        for file in files:
            of = OF_PUZZLE.match(file.name)
            if of and int(of[1]) in FILES and number in (None, int(of[1])):
                found.append(Answer(path.name, int(of[1]), str(file)))
        if path.suffix == ".py" and path.is_file():
            if number is None:
                skipped.append(str(path))
            else:
                found.append(Answer(path.stem, number, str(path)))
    if not found:
        raise EPValueError(
            f"no answer is in {folder}: name the files STUDENT/puzzleNN.py. Files STUDENT.py are judged by "
            f"`epmoe puzzle N --grade {folder}`"
        )
    return found, skipped


def grade(folder, number, as_json):
    """Judge all answers of a folder; prints a line each, or one JSON object."""
    (answers, skipped), words = answers_in(folder, number), limits.namespaces()
    isolation = BY_KERNEL if words else BY_HOOK
    records = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for record in pool.map(lambda answer: judged(answer, words), answers):
            records.append(record)
            if not as_json:
                _tell(record)
    passed = sum(r["passed"] for r in records)
    if as_json:
        print(json.dumps(dict(isolation=isolation, answers=records, skipped=skipped), indent=1))
    else:
        for file in skipped:
            print(f"skipped: {file} does not say which puzzle it answers; epmoe puzzle N --grade {folder} does")
        print(for_terminal(f"{passed} of {len(records)} answers are right. Isolation: {isolation}."))
    return EQUAL if passed == len(records) else DIFFERS


def judged(answer, words):
    """The record of one Answer. words: of limits.namespaces()."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="epmoe_grading_") as scratch:
        # not in the working directory, from where a student's numpy.py would be imported
        file = Path(scratch, "answer", Path(answer.file).name)
        file.parent.mkdir()
        shutil.copyfile(answer.file, file)
        what, says = verdict(
            answer.puzzle,
            file,
            sealed=bool(words),
            in_all_s=IN_ALL_S,
            before=words,
            folder=scratch,
            output=subprocess.DEVNULL,
        )
    seconds = round(time.monotonic() - begin, 1)
    return asdict(answer) | dict(passed=what == "right", verdict=says, seconds=seconds)


def _tell(record):
    cause = " ".join(record["verdict"].partition("\n\n")[0].split())
    word = "RIGHT  " if record["passed"] else "NOT YET"
    text = "" if record["passed"] else f"  {cause}"
    print(f"{record['student']:16} puzzle {record['puzzle']:2}  {word}{text}", flush=True)
