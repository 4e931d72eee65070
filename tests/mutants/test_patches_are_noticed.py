"""Patches as mutants: parsing, applying, refusals; and the unedited kernels."""

import argparse
import difflib
import pickle

import pytest

from epmoe import command_line
from epmoe.mutants import command, edited_kernels, hunt, random_worlds, world_kinds, worlds
from epmoe.mutants.marks import NAME, functions_of, marked_lines
from epmoe.mutants.patches import edit_of
from epmoe.mutants.pieces import Hunt, hunt_of_edits, runs_of_random
from epmoe_ref.errors import EPValueError

SMALL, RUNS = "rows/small/dispatch.py", "pairs/send_back.py"
BARRIER = "                    syncwarp()                      # the part by all lanes, before lane 0 releases it\n"


def diff(file, old, new, path=None, context=3, source=None):
    """A unified diff that replaces the only `old` of a file."""
    before = source or edited_kernels.source_of(file)
    assert before.count(old) == 1
    path = f"epmoe/kernels/{file}" if path is None else path
    lines = difflib.unified_diff(
        before.splitlines(True), before.replace(old, new).splitlines(True), f"a/{path}", f"b/{path}", n=context
    )
    return "".join(lines)


def run(*argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([*argv, "--jobs", "1", "--random", "0"]))


class InTurn:
    """A pool that runs everything in this process."""

    imap_unordered = map

    def apply_async(self, function, given, callback, error_callback):
        callback(pickle.loads(pickle.dumps(function))(*pickle.loads(pickle.dumps(given))))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@pytest.fixture
def in_turn(monkeypatch):
    monkeypatch.setattr(hunt, "pool", lambda jobs: InTurn())


WITHOUT = edited_kernels.source_of(RUNS).replace(BARRIER, "")


@pytest.mark.parametrize(
    "path", [f"epmoe/kernels/{RUNS}", f"kernels/{RUNS}", RUNS, f"/home/somebody/epmoe/kernels/{RUNS}"]
)
@pytest.mark.parametrize("context", [0, 3])
def test_paths_begin_anywhere(path, context):
    edit = edit_of("x", "a mail's head\n" + diff(RUNS, BARRIER, "", path, context) + "-- \n2.39\n")
    assert edit.edits == {RUNS: WITHOUT}
    line = edited_kernels.source_of(RUNS).partition(BARRIER)[0].count("\n") + 1
    assert edit.lines == {RUNS: {line}} and edit.token.place == f"{RUNS}:{line}"


def test_of_files_with_the_same_name_it_is_the_one_that_fits():
    old = next(line for line in edited_kernels.source_of(SMALL).splitlines(True) if "syncthreads()" in line)
    new = old.replace("syncthreads()", "pass")
    assert list(edit_of("x", diff(SMALL, old, new, "dispatch.py")).edits) == [SMALL]
    both = diff(SMALL, old, new) + diff(RUNS, BARRIER, "")
    assert set(edit_of("x", both).edits) == {SMALL, RUNS}
    file = "rows/dispatch.py"
    old = next(line for line in edited_kernels.source_of(file).splitlines(True) if "expand_rows(call" in line)
    assert list(edit_of("x", diff(file, old, f"{old}\n", "dispatch.py")).edits) == [file]


def test_lines_may_have_moved():
    moved = "# one\n# two\n" + edited_kernels.source_of(RUNS)
    assert edit_of("x", diff(RUNS, BARRIER, "", source=moved)).edits == {RUNS: WITHOUT}


def test_an_added_line_and_a_missing_last_newline():
    patch = diff(RUNS, BARRIER, BARRIER + BARRIER, context=0)
    assert edit_of("x", patch).edits[RUNS].count(BARRIER) == 2
    source = edited_kernels.source_of(RUNS)
    last = source.splitlines()[-1]
    patch = (
        f"--- a/{RUNS}\n+++ b/{RUNS}\n@@ -{source.count(chr(10))} +{source.count(chr(10))} @@\n-{last}\n"
        f"+{last}\n\\ No newline at end of file\n"
    )
    assert edit_of("x", patch).edits[RUNS] == source.rstrip("\n")


@pytest.mark.parametrize(
    "patch, says",
    [
        ("hello\n", "holds no change of a file"),
        (
            diff(RUNS, BARRIER, "").replace("a/epmoe/kernels", "a/docs").replace("b/epmoe/kernels", "b/docs"),
            r"docs/pairs/send_back.py is not a source of a kernel; only the files of epmoe/kernels/",
        ),
        (
            diff(RUNS, BARRIER, "").replace("by all lanes", "by no lanes"),
            "the old lines of @@ -.* are neither there nor",
        ),
        (diff(RUNS, BARRIER, "  if\n"), r"leaves invalid Python in epmoe/kernels/pairs/send_back.py: line \d+: "),
        (
            diff(RUNS, BARRIER, "").replace("-                    sync", "                     sync"),
            "the hunk @@ .* ends after 7 old and 7 new",
        ),
        (diff(RUNS, BARRIER, "").rpartition(" ")[0], "the hunk|does not apply"),
        ("--- /dev/null\n+++ b/epmoe/kernels/new.py\n@@ -0,0 +1 @@\n+x = 1\n", "makes or deletes epmoe/kernels/new.py"),
        ("--- a/wait.py\n+++ b/wait.py\n@@ what @@\n", "'@@ what @@' is not the header of a hunk"),
        ("rename from epmoe/kernels/wait.py\n", "does not change lines of a source"),
        (f"--- a/{RUNS}\n+++ b/{RUNS}\n@@ -84 +84 @@\n-{BARRIER}+{BARRIER}", "changes nothing of"),
    ],
)
def test_what_is_wrong_is_said(patch, says):
    with pytest.raises(EPValueError, match=f"^bad.patch: .*({says})"):
        edit_of("bad.patch", patch)


def test_bad_patches_end_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(hunt, "pool", None)
    good, bad = tmp_path / "good.patch", tmp_path / "bad.patch"
    good.write_text(diff(RUNS, BARRIER, ""))
    bad.write_text("hello\n")
    with pytest.raises(EPValueError, match="bad.patch: holds no change"):
        run("--patch", str(good), str(bad))
    with pytest.raises(EPValueError, match="leave it out with --patch"):
        run("--patch", str(good), "--only", "wait.py")


def test_statements_of_lines_are_marked():
    source = "if a and \\\n   b:\n    x = 1; y = 2\nwhile c(\n  1):\n    pass\ndef f(): return 3\n"
    marked = marked_lines("f.py", source, {2, 3, 4, 7})
    assert marked.count("\n") == source.count("\n")
    assert marked == (
        f"if ({NAME}('f.py', -2) and (a and \\\n   b)):\n    {NAME}('f.py', -3); x = 1; "
        f"{NAME}('f.py', -3); y = 2\nwhile ({NAME}('f.py', -4) and (c(\n  1))):\n    pass\n"
        f"def f(): {NAME}('f.py', -7); return 3\n"
    )


def test_every_changed_line_of_a_statement_is_told():
    marked = marked_lines("f.py", "x = (1 +\n  2)\n", {1, 2})
    assert marked == f"{NAME}('f.py', -1) and {NAME}('f.py', -2); x = (1 +\n  2)\n"


def test_a_function_begins_at_its_first_statement():
    source = "X = 1\n\n@outer\ndef f(\n    a,\n):\n    def g():\n        return a\n\n    b = 2\n    return g\n"
    assert [functions_of(source, {line}) for line in (1, 3, 4, 5, 7, 8, 10, 11)] == [
        set(),
        {10},
        {10},
        {10},
        {8},
        {8},
        {10},
        {10},
    ]


def test_worlds_that_run_the_lines_come_first():
    names = fused, small, of_rows = ("absent peer, split", "absent peer, few tokens", "rows, absent peer")
    few = edit_of("few", diff("pairs/few_tokens.py", "# and zeros before sums\n", "# zeros\n"))
    rows = edit_of("rows", diff("rows/small/by_expert.py", "# a lane gets the address at its expert's rank\n", "\n"))
    assert hunt.worlds_of(rows.lines, names) == [of_rows]
    coverage = hunt.cover_lines(InTurn(), [few, rows], names)
    assert coverage.running(few) == [small] and coverage.beside(few) == []
    assert coverage.running(rows) == [] and coverage.beside(rows) == []
    assert hunt_of_edits([few, rows], coverage, 3).runs == [[(small, seed) for seed in range(3)], []]


def test_worlds_that_run_only_the_function_come_last(monkeypatch):
    edit = edit_of("x", diff(RUNS, BARRIER, ""))
    line, around = min(edit.lines[RUNS]), hunt.functions_around(edit.lines)[RUNS]
    seen = {
        "rare": {(RUNS, -at, "") for at in around},
        "twice": {(RUNS, -line, "a"), (RUNS, -line, "b")},
        "random 4": {(RUNS, -line, "")},
        "never": {("wait.py", -1, "")},
    }
    coverage = hunt.Coverage({name: (seen[name], at) for at, name in enumerate(seen)})
    assert coverage.running(edit) == ["twice", "random 4"]
    assert hunt_of_edits([edit], coverage, 2).runs == [[("twice", 0), ("random 4", 0), ("twice", 1), ("rare", 0)]]


def test_progress_counts_runs_to_the_last_one(monkeypatch):
    hunted = Hunt(["noticed", "not"], [[("a", seed) for seed in range(8)]] * 2)
    how = {"noticed": "race", "not": "survives"}
    monkeypatch.setattr(hunt, "hunt_by", lambda m, runs: hunt.Verdict(m, how[m]))
    done = []
    verdicts = list(hunted.verdicts(InTurn(), 1, done.append))
    assert [v.how for v in verdicts] == ["race", "survives"]
    assert sum(done) == hunted.n_runs == 16 and len(done) == 4


def test_a_patch_is_noticed_and_another_changes_nothing(tmp_path, in_turn, monkeypatch, capsys):
    monkeypatch.setattr(worlds, "WORLDS", {"bad ids": worlds.WORLDS["bad ids"]})
    broken, same = tmp_path / "broken.patch", tmp_path / "same.patch"
    broken.write_text(diff(RUNS, BARRIER, ""))
    same.write_text(diff(RUNS, BARRIER, BARRIER.replace("all lanes", "lanes")))
    assert run("--patch", str(broken)) == command_line.EQUAL
    said = capsys.readouterr().out
    assert "PASS" in said and f"{broken}: 1 of 1 worlds run the edited lines, 0 only" in said
    assert run("--patch", str(same), str(broken), "--seeds", "1", "--reports") == command_line.DIFFERS
    said = " ".join(capsys.readouterr().out.split())
    assert "survives: either it changes neither" in said and "2 mutants: 1 noticed" in said
    assert "data race on combine_recv_buf" in said


def test_verdicts_come_as_they_are_found_and_an_interrupted_hunt_says_what_is_known(
    tmp_path, in_turn, monkeypatch, capsys
):
    patches = [tmp_path / f"{name}.patch" for name in ("broken", "same", "later")]
    for patch, new in zip(patches, ("", BARRIER.replace("all lanes", "lanes"), BARRIER * 2)):
        patch.write_text(diff(RUNS, BARRIER, new))
    shown = []

    def hunted(mutant, runs):
        shown.append(capsys.readouterr().out)
        if len(shown) == 4:
            raise KeyboardInterrupt
        return hunt.Verdict(mutant, "survives" if len(shown) > 1 else "race", *runs[0])

    names = "bad ids", "idle blocks"
    monkeypatch.setattr(worlds, "WORLDS", {name: worlds.WORLDS[name] for name in names})
    monkeypatch.setattr(hunt, "hunt_by", hunted)
    assert run("--patch", *map(str, patches)) == command_line.INTERRUPTED
    assert shown[2].startswith("race     pairs/send_back.py:")
    said = " ".join(capsys.readouterr().out.split())
    assert "same.patch: not noticed in 3 of" in said and "later.patch: not noticed in 0 of" in said
    assert "INTERRUPTED" in said and "seed 0" not in said
    assert "3 mutants: 1 noticed, 0 known to be harmless, 0 not as expected, 2 undecided" in said


def test_the_kernels_as_they_are(in_turn, monkeypatch, capsys):
    names = "absent peer, split", "absent peer, fused"
    monkeypatch.setattr(worlds, "WORLDS", {name: worlds.WORLDS[name] for name in names})
    assert run("--as-they-are", "--seeds", "2") == command_line.EQUAL
    assert "2 worlds, 2 seeds each, and 0 random ones: nothing is reported" in " ".join(capsys.readouterr().out.split())

    monkeypatch.setattr(hunt, "attempt", lambda world, seed, edits: ("race", "who and where") if seed else ("", ""))
    assert run("--as-they-are", "--seeds", "2") == command_line.DIFFERS
    said = capsys.readouterr().out
    assert 'race     "absent peer, fused", seed 1\n    who and where\n' in said and "2 runs are reported" in said


def test_random_worlds_are_the_same_everywhere_and_come_last():
    drawn = [random_worlds.named(name) for name in random_worlds.names(40)]
    again = random_worlds._world.__wrapped__(17)
    assert repr(again) == repr(drawn[17]) and len({repr(w) for w in drawn}) == 40
    assert {type(w) for w in drawn} == {world_kinds.World, world_kinds.PublicWorld, world_kinds.RowsWorld}
    assert all(w.n_experts if isinstance(w, world_kinds.RowsWorld) else w.cfg for w in drawn)
    assert runs_of_random(4) == [("random 0", 0), ("random 1", 1), ("random 2", 2), ("random 3", 0)]
    assert random_worlds.named("bad ids") is worlds.WORLDS["bad ids"]
