"""Every right answer to a puzzle passes, and every wrong one is told its own cause."""

import re

import pytest
from answer_files import RIGHT, WRONG, right, wrong

from epmoe.lessons.answers import Wrong, load
from epmoe.puzzles import FILES, puzzle
from epmoe.puzzles.holes import answers
from epmoe.puzzles.judging import SCHEDULES, judge

FEW = SCHEDULES[:4] + SCHEDULES[-1:]  # by day, of right answers


def verdict(number, text, tmp_path, schedules=SCHEDULES):
    file = tmp_path / f"puzzle{number:02}.py"
    file.write_text(text)
    return judge(puzzle(number), load(file, number, "puzzle"), schedules)


@pytest.mark.parametrize("number, i", RIGHT)
def test_right_answers_pass(number, i, tmp_path, tonight):
    assert verdict(number, right(number)[i], tmp_path, SCHEDULES if tonight else FEW)


@pytest.mark.parametrize("number, i", WRONG)
def test_wrong_answers_are_told_their_cause(number, i, tmp_path):
    text, says = wrong(number)[i]
    with pytest.raises(Wrong) as error:
        verdict(number, text, tmp_path)
    cause = " ".join(str(error.value).partition("\n\n")[0].split())
    assert any(words in cause for words in says.split("|")), str(error.value)


@pytest.mark.parametrize("number", FILES)
def test_the_file_to_start_with_is_not_right_yet(number, tmp_path):
    with pytest.raises(Wrong):
        verdict(number, puzzle(number).start, tmp_path)


@pytest.mark.parametrize("number", FILES)
def test_each_puzzle_knows_six_wrong_answers_by_their_own_causes(number):
    causes = {says for _, says in answers(number).WRONG}
    assert len(causes) >= 6
    assert answers(number).EXPLANATION and answers(number).ALSO_RIGHT is not None
    assert 3 <= len(puzzle(number).hints) <= 5


def test_a_failure_shows_memory_schedule_and_report_in_the_students_lines(tmp_path):
    text, _ = wrong(3)[1]
    line = next(n for n, code in enumerate(text.splitlines(), 1) if "store_i32(place" in code)
    with pytest.raises(Wrong) as error:
        verdict(3, text, tmp_path)
    told = str(error.value)
    assert f"1. write puzzle03.py:{line} store_i32" in told
    assert re.search(r"Order of threads: (plain turns|schedule \d+)\.", " ".join(told.split()))
    assert re.search(r"should be +is\n  token 0 .*<- first difference", told)
    assert "what happened to seen[0, 1] of rank 0:\n  puzzle03.py:41" in told
