"""A sample of mutants is noticed, harmless ones are not, and the unedited kernels pass a part of the worlds."""

import argparse
import hashlib
import io
import os
import random

import pytest
from rich.console import Console

from epmoe import kernels, progress
from epmoe.mutants import command, edited_kernels, hunt
from epmoe.mutants.harmless import HARMLESS
from epmoe.mutants.pieces import Hunt
from epmoe.mutants.statement_mutations import statement_mutations_of
from epmoe.mutants.verdicts import judge
from epmoe.mutants.world_run import WorldRun
from epmoe.mutants.worlds import WORLDS
from epmoe_ref.errors import EPValueError

SAMPLE, HARMLESS_SAMPLE, STATEMENTS = 6, 1, 3
SEEDS = 3  # as in `epmoe mutants`; the second is for survivors of the first
PARTS = 6  # of all worlds; at least one runs


def arguments(*argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(argv)


def content():
    """A number that changes with every kernel and world."""
    text = repr(sorted(WORLDS)) + "".join(map(edited_kernels.source_of, edited_kernels.files()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_sample_is_noticed_and_harmless_ones_are_not():
    """The choice of mutants and of the first worlds changes with the kernels.

    The unedited kernels must pass that part of the worlds; `epmoe mutants --as-they-are` runs all.
    """
    chance, jobs = random.Random(content()), min(2, os.cpu_count())
    first = chance.sample(list(WORLDS), len(WORLDS) // PARTS)
    with hunt.pool(jobs) as workers:
        coverage = hunt.cover(workers, first)
        seen = {v[:2] for visits in coverage.seen.values() for v in visits}
        run = [m for m in hunt.all_mutants() if (m.token.file, m.token.start) in seen]
        sample = chance.sample([m for m in run if m.key not in HARMLESS], SAMPLE)
        harmless = chance.sample([m for m in run if m.key in HARMLESS], HARMLESS_SAMPLE)
        statements = [s for s in hunt.statements_in_files() if s.key not in HARMLESS and coverage.worlds(s)]
        sample += chance.sample(statements, STATEMENTS)
        runs = []
        for m in sample:
            others = [name for name in hunt.worlds_of([m.token.file], WORLDS) if name not in first]
            runs.append([(name, seed) for seed in range(SEEDS) for name in (*coverage.worlds(m), *others)])
        runs += [[(name, 0) for name in coverage.worlds(m)] for m in harmless]
        hunted = Hunt([*sample, *harmless], runs)
        verdicts = list(hunted.verdicts(workers, jobs))
    assert [f"{v.mutant.key}: {what}" for v, what in judge(verdicts)] == []
    assert sum(v.how == "race" for v in verdicts) > len(sample) // 4


@pytest.mark.parametrize(
    "argv, said",
    [
        ("--only nowhere.py", "no file nowhere.py"),
        ("--only nowhere.py --statements", "no file nowhere.py"),
        ("--only nowhere/", "no file nowhere/ in epmoe/kernels"),
        ("--only waitt.py", "did you mean wait.py"),
        ("--only wait.py:1", "no mutant there"),
        ("--only wait.py --sample 1 --part 2/2", "nothing would be tried"),
    ],
)
def test_options_that_leave_no_mutant_are_refused(argv, said):
    with pytest.raises(EPValueError, match=said):
        command.run(arguments(*argv.split()))


def test_a_folder_is_hunted_alone_in_its_own_worlds():
    chosen = command.choose(arguments("--only", "plain/"), hunt.all_mutants())
    files = {m.token.file for m in chosen}
    assert files >= {"plain/receive.py", "plain/peers.py"}
    assert all(file.startswith("plain/") for file in files)
    worlds = hunt.worlds_of(files, WORLDS)
    assert 20 < len(worlds) < len(WORLDS)
    assert worlds == hunt.worlds_of(["plain/"], WORLDS)
    assert hunt.worlds_of(["plain/peers.py", "formats/row_copy.py"], WORLDS) == list(WORLDS)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_removed_synchronisations_and_statements_in_one_hunt(capsys):
    args = arguments("--only", "plain/peers.py", "--statements", "also", "--jobs", "2", "--list")
    assert command.run(args) == 0
    shown = capsys.readouterr().out
    assert "order: st_release_sys_u64 -> st_relaxed_sys_u64" in shown and "swap: " in shown
    assert "0 not as expected: 100 %;" in shown


def test_a_wait_that_names_another_word_than_it_waited_for_is_noticed(tonight):
    file = "plain/waits.py"
    mutants = statement_mutations_of(file, edited_kernels.source_of(file))
    wrong = [m for m in mutants if m.kind == "off by one"]
    assert len(wrong) == 2
    for mutant in wrong if tonight else wrong[:1]:
        how, report = hunt.attempt(WORLDS["plain, absent peer, fused"], 0, hunt.edits_of(mutant), mutant.seen_by)
        assert how == "wrong" and "names recv_count word" in report


def test_progress_is_told_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0)
    with progress.progress(Console(file=io.StringIO()), "worlds", 2) as shown:
        shown.advance()
        shown.start("mutants", 3)
        shown.advance()
    with progress.progress(Console(file=io.StringIO()), "ranks", 2, hidden=True) as shown:
        shown.advance()
    assert capsys.readouterr().err == "worlds: 1 of 2, 0 s\nmutants: 1 of 3, 0 s\n"


def test_a_wrong_expectation_fails():
    killed = hunt.Verdict(next(m for m in hunt.all_mutants() if m.key in HARMLESS), "race", "split")
    survivor = hunt.Verdict(next(m for m in hunt.all_mutants() if m.key not in HARMLESS), "survives")
    unused = hunt.Verdict(survivor.mutant, "unused")
    assert [what[:30] for _, what in judge([killed, survivor, unused])] == [
        "is listed as harmless, but was",
        "survives: either the synchroni",
        "is run by no world of epmoe/mu",
    ]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["idle blocks", "split", "nvfp4, shared expert, fused"])
def test_unedited_kernels_pass_with_stale_loads_too(name):
    WorldRun(WORLDS[name], kernels, 1, stale=True).go()


def test_an_endless_retry_is_a_hang(monkeypatch):
    class Retry:
        def go(self):
            self.go()

    monkeypatch.setattr(hunt, "run_of", lambda *given, **options: Retry())
    how, report = hunt.attempt(WORLDS["rows"], 0, {})
    assert how == "hang" and report.startswith("RecursionError: ")


@pytest.mark.parametrize("muted", ["0 and 2", "1 and 3"])
def test_an_expired_wait_for_lamport_rows_that_names_a_wrong_rank_is_noticed(muted):
    file, name = "rows/small/lamport.py", f"rows without signals, ranks {muted} mute"
    source = edited_kernels.source_of(file)
    right = "i32(1) if is_late(seen[1], tag) else i32(2) if is_late(seen[2], tag)"
    wrong = "i32(2) if is_late(seen[1], tag) else i32(1) if is_late(seen[2], tag)"
    assert right in source
    assert hunt.attempt(WORLDS[name], 0, {}) == ("", "")
    how, report = hunt.attempt(WORLDS[name], 0, {file: source.replace(right, wrong)})
    assert how == "wrong" and "one of the mute ranks" in report


@pytest.mark.parametrize(
    "name", ["a row by expert", "rows without signals, no room at first", "skip_a2a, unreduced fp16"]
)
def test_unedited_kernels_pass_a_world_of_each_kind(name):
    assert hunt.attempt(WORLDS[name], 0, {}) == ("", "")
