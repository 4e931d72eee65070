"""A fixed sample of mutants is killed, harmless ones are not, and the unedited kernels pass every world."""

import argparse
import functools
import os

import pytest
from epmoe import kernels
from epmoe.mutants import command, hunt
from epmoe.mutants.harmless import HARMLESS
from epmoe.mutants.harmless_slips import HARMLESS_SLIPS
from epmoe.mutants.pieces import hunt_of
from epmoe.mutants.verdicts import judge
from epmoe.mutants.world_run import WorldRun
from epmoe.mutants.worlds import WORLDS

SAMPLE, HARMLESS_SAMPLE, SLIPS = 8, 1, 4

all_mutants = functools.cache(hunt.all_mutants)     # which takes some seconds


def arguments(*argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_harmless_ones_are_mutants_that_there_are():
    assert set(HARMLESS) <= {m.key for m in all_mutants()}
    assert set(HARMLESS_SLIPS) <= {m.key for m in hunt.slips_in_files()}


@pytest.mark.timeout(1800)
def test_a_sample_is_noticed_and_harmless_ones_are_not():
    mutants = all_mutants()
    sample = [m for m in mutants if m.key not in HARMLESS][::len(mutants) // SAMPLE]
    sample += [m for m in mutants if m.key in HARMLESS][:HARMLESS_SAMPLE]
    slips = [s for s in hunt.slips_in_files() if s.key not in HARMLESS_SLIPS]
    sample += slips[::len(slips) // SLIPS]
    jobs = min(2, os.cpu_count())
    with hunt.pool(jobs) as workers:
        verdicts = list(hunt_of(sample, hunt.cover(workers), seeds=1).verdicts(workers, jobs))
    assert [f"{v.mutant.key}: {what}" for v, what in judge(verdicts)] == []
    assert sum(v.how == "race" for v in verdicts) > len(sample) // 3


def test_one_place_by_the_command_line(capsys):
    assert command.run(arguments("--only", "nowhere.py")) == command.CANNOT_RUN
    assert "no synchronising token there" in capsys.readouterr().err


def test_a_wrong_expectation_fails():
    killed = hunt.Verdict(next(m for m in all_mutants() if m.key in HARMLESS), "race", "split")
    survivor = hunt.Verdict(next(m for m in all_mutants() if m.key not in HARMLESS), "survives")
    unused = hunt.Verdict(survivor.mutant, "unused")
    assert [what[:30] for _, what in judge([killed, survivor, unused])] == [
        "is written down as harmless, a", "survives: either the synchroni", "is run by no world of epmoe/mu"]


@pytest.mark.parametrize("name", ["split", "nvfp4, shared expert, fused", "idle blocks"])
def test_unedited_kernels_pass_with_stale_loads_too(name):
    WorldRun(WORLDS[name], kernels, 1, stale=True).go()
