"""Every right answer to a puzzle passes, and every wrong one gets its own cause."""

import re
from dataclasses import replace

import pytest
from answer_files import RIGHT, WRONG, edited, right, wrong

from epmoe import puzzles
from epmoe.lessons.answers import Wrong, load
from epmoe.puzzles import FILES, own_kernels, puzzle
from epmoe.puzzles import p15_your_own_dispatch as puzzle_15
from epmoe.puzzles import p16_your_own_combine as puzzle_16
from epmoe.puzzles.holes import answers
from epmoe.puzzles.judging import SCHEDULES, judge

FEW = SCHEDULES[:3] + SCHEDULES[-1:]  # by day, of right answers
# puzzles whose judge takes seconds: check, and each synchronisation broken in turn
WHOLE = (15, 16)
BY_DAY = 3  # wrong answers of a puzzle, 1 of these


def handed_in(number, text, tmp_path):
    """The module of a student's file with this text."""
    file = tmp_path / f"puzzle{number:02}.py"
    file.write_text(text)
    return load(file, number, "puzzle")


def verdict(number, text, tmp_path, schedules=SCHEDULES):
    return judge(puzzles.puzzle(number), handed_in(number, text, tmp_path), schedules)


@pytest.mark.parametrize("number, i", [pytest.param(n, i, marks=[pytest.mark.nightly] if i else []) for n, i in RIGHT])
def test_right_answers_pass(number, i, tmp_path, tonight, monkeypatch):
    if number in WHOLE and not tonight:
        monkeypatch.setattr(puzzles, "puzzle", without_more)
    assert verdict(number, right(number)[i], tmp_path, SCHEDULES if tonight else FEW)


def without_more(number):
    return replace(puzzle(number), more=None)


def by_night(number, i):
    return [pytest.mark.nightly] if i >= (1 if number in WHOLE else BY_DAY) else []


@pytest.mark.parametrize("number, i", [pytest.param(n, i, marks=by_night(n, i)) for n, i in WRONG])
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


@pytest.mark.parametrize(
    "number, old, new, says",
    [
        (6, r"# ---- your 5 lines ----", "# mine", "has 0 of 2 pairs"),
        (15, r" *# -{10,}\n", "", "has 0 of 4 pairs"),
        (5, "    # -{10,}", "    x = (\n    # ----------\n    0)", "is no Python without your lines"),
        (4, "== NOT_YET", "!= NOT_YET", "other lines than that file in receive"),
        (15, r"store_i32\(there \+ u64\(row_bytes\), token\)", "pass", "other lines than that file in write_message"),
    ],
)
def test_marks_and_given_lines_must_stay(number, old, new, says, tmp_path):
    with pytest.raises(Wrong, match=says):
        verdict(number, re.sub(old, new, right(number)[0]), tmp_path)


def test_a_file_may_end_in_a_mark_without_a_newline(tmp_path):
    assert verdict(6, right(6)[0].rstrip("\n"), tmp_path, FEW[:1])


def test_a_function_of_ones_own_is_broken_too():
    source = right(15)[0] + "\n\n@device_fn\ndef mine(word):\n    red_add_release_sys_i32(word, 1)\n"
    found = own_kernels.losses("puzzle15.py", source, puzzle(15).start)
    assert any("red_add_release_sys_i32 -> " in loss.change for loss in found)


def test_a_failure_shows_memory_schedule_and_report_in_the_students_lines(tmp_path):
    text, _ = wrong(3)[1]
    line = next(n for n, code in enumerate(text.splitlines(), 1) if "store_i32(place" in code)
    with pytest.raises(Wrong) as error:
        verdict(3, text, tmp_path)
    told = str(error.value)
    assert f"1. write puzzle03.py:{line} store_i32" in told
    assert re.search(r"Order of threads: (plain turns|schedule \d+)\.", " ".join(told.split()))
    assert re.search(r"should be.*\bis\n  token 0 .*<- first difference", told, re.DOTALL)
    assert re.search(r"what happened to seen\[0, \d+\] of rank 0:\n  puzzle03.py:41 ", told)


def test_a_right_answer_that_does_too_much_gets_a_remark(tmp_path):
    too_far, too_many = edited(3, [("_gpu_", "_sys_")]), edited(7, [("sums[w]", "sums[w] + 0 * load_i32(counts)")])
    assert "Scope gpu would do instead of sys" in verdict(3, too_far, tmp_path, FEW[:1])
    assert "128 threads load 320 counts. Sums" in verdict(7, too_many, tmp_path, FEW[:1])


def test_a_picture_shows_the_region_that_the_cause_names(tmp_path):
    with pytest.raises(Wrong, match="\n\ncounts of rank 0, src_rank 0 to 1  "):
        verdict(5, puzzle(5).start, tmp_path)


def test_a_hang_says_that_a_signal_is_not_yet_there(tmp_path):
    text = edited(4, [("st_release_sys_u64", "#")])
    with pytest.raises(Wrong, match=r"recv_count\[.*\] of rank \d, which holds NOT_YET"):
        verdict(4, text, tmp_path)


def test_each_synchronisation_in_the_students_lines_can_be_lost():
    source = right(15)[0]
    found = own_kernels.losses("puzzle15.py", source, puzzle(15).start)
    lines = {loss.change: source.splitlines()[loss.line - 1] for loss in found}
    assert "syncwarp()" in lines["syncwarp() -> nothing"]
    assert {"order", "scope", "plain", "barrier", "reset", "wait"} == {loss.kind for loss in found}
    assert all(loss.source.count("\n") == source.count("\n") for loss in found)
    waits = [loss for loss in found if loss.kind == "wait"]
    assert len(waits) == 2 and "while ld_acquire_gpu" not in waits[0].source
    kept = source.replace("    syncwarp()\n", "    syncwarp()  # kept: for the picture\n")
    assert len(own_kernels.losses("puzzle15.py", kept, puzzle(15).start)) == len(found) - 1


def of_one_loss(number, edit, chosen, world, tmp_path, monkeypatch):
    """(a Loss, function () -> what is said of it), in one world: the whole judgement is for the night."""
    text, module = edited(number, [edit]), {15: puzzle_15, 16: puzzle_16}[number]
    answer = handed_in(number, text, tmp_path)
    asked = replace(puzzle(number), worlds=lambda: module.worlds()[world : world + 1])
    loss = next(x for x in own_kernels.losses(f"puzzle{number}.py", text, asked.start) if re.search(chosen, x.change))
    monkeypatch.setattr(own_kernels, "losses", lambda *_: [loss])
    monkeypatch.setattr(own_kernels, "TRIED", own_kernels.TRIED[:2])
    given = own_kernels.tests_of(answer), own_kernels.GOOD_TESTS
    tests, good = (own_kernels.tested(tests, module.world, module.COMPARED) for tests in given)
    return loss, lambda: own_kernels.broken(asked, answer, tests, good, lambda: None)


WAIT = "finished.*the wait -> nothing"


@pytest.mark.parametrize(
    "number, edit, chosen, world, says",
    [
        (16, ("acq_rel_gpu", "acq_rel_sys"), "acq_rel_sys_i32 -> .*acq_rel_gpu", 1, "something is superfluous"),
        (16, ("TESTS = ", "[((3, 2), 1)]"), r"store_i32\(done, 0\) -> nothing", 1, "your TESTS are too weak"),
        (15, ("TESTS = ", "[((1, 0), 3)]"), WAIT, 0, "your TESTS are too weak"),
    ],
)
def test_what_is_superfluous_or_missed_is_told(number, edit, chosen, world, says, tmp_path, monkeypatch):
    loss, said = of_one_loss(number, edit, chosen, world, tmp_path, monkeypatch)
    with pytest.raises(Wrong, match=says) as error:
        said()
    assert f"line {loss.line}: {loss.change}" in str(error.value)


def test_a_lost_wait_is_noticed_with_several_tokens(tmp_path, monkeypatch):
    _, said = of_one_loss(15, ("TESTS = ", "[((7, 5), 2)]"), WAIT, 0, tmp_path, monkeypatch)
    assert "miss" not in said()


@pytest.mark.parametrize("tests", ["3", "[]", "[((1, 2, 3), 1)]", "[((1, 2), 99)]"])
def test_tests_that_are_no_tests_are_refused(tests, tmp_path):
    with pytest.raises(Wrong, match="TESTS is "):
        own_kernels.tests_of(handed_in(15, edited(15, [("TESTS = ", tests)]), tmp_path))
