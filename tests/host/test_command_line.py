"""The command line: options refused, errors in a line, a reader that leaves, Ctrl-C; exit statuses 2, 130, 141."""

import json
import os
import signal
import subprocess
import sys

import pytest
from commands_shown import ROOT, SMALL, SMALL_BUT_EXPERTS, python, refused_in_a_line, shown

import epmoe
from epmoe.__main__ import main
from epmoe.verify import command as verify


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--rounds", "0"], "argument --rounds: "),
        (["--seeds", "x"], "argument --seeds: "),
        (["--format", "fp7"], "argument --format: "),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--ranks", "0"], "argument --ranks: "),
        (["explain", "--experts-per", "4"], "unrecognized arguments: --experts-per"),
        (["mutants", "--part", "x"], "argument --part: "),
        (["mutants", "--part", "0/3"], "argument --part: "),
        (["mutants", "--seeds", "0"], "argument --seeds: "),
        (["mutants", "--jobs", "0"], "argument --jobs: "),
        (["mutants", "--sample", "-1"], "argument --sample: "),
        (["lesson", "11"], "11 is none of the lessons: N is 1 to 10\n"),
        (["puzzle", "one"], "one is none of the puzzles: N is 1 to 16\n"),
        (["--experts", "8", "--experts-per-rank", "4"], "not allowed with argument --experts"),
        (["verfy"], "did you mean verify?"),
        (["--rnks", "3"], "did you mean --ranks?"),
        (["--tok", "3"], "did you mean --tokens?"),
        (["--fast"], "unrecognized arguments: --fast\n"),
        (["soak", "--secnds=3"], "did you mean --seconds?"),
        (["--format", "nvfp"], "did you mean nvfp4?"),
        (["check", "reference", "--jsn"], "did you mean --json?"),
        # an unset shell variable must not count as an option that was left out
        (["--input", ""], "argument --input: "),
        (["verify", "--dump="], "argument --dump: "),
        (["lesson", "1", "--check", ""], "argument --check: "),
        (["lesson", "1", "--start", " "], "argument --start: "),
        (["vectors", ""], "argument DIR: "),
        (["vectors", "d", "--only", ""], "argument --only: "),
        (["check", ""], "argument implementation: "),
        (["check", "x:Y", "--only", ""], "argument --only: "),
        (["mutants", "--patch", ""], "argument --patch: "),
        (["soak", "--json", ""], "argument --json: "),
        (["explain", "--out", ""], "argument --out: "),
        (["--ranks", ""], "argument --ranks: "),
        ([""], "argument command: "),
    ],
    ids=" ".join,
)
def test_words_that_make_no_sense_are_refused_by_name_with_the_commands_own_usage(capsys, argv, said):
    with pytest.raises(SystemExit) as error:
        main(argv)
    err = capsys.readouterr().err
    of = "" if argv[0] in ("verfy", "") else " verify" if argv[0].startswith("-") else f" {argv[0]}"
    assert error.value.code == 2 and said in err and err.startswith(f"usage: epmoe{of} [-h]"), err


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--all", "--format", "nvfp4"], "--format: no meaning with --all"),
        (["--sample", "3"], "--sample: no meaning without --all"),
        (["--all", "--tokens", "3", "--fused"], "--tokens, --fused: no meaning with --all"),
        (["--input", "f.npz", "--tokens", "3"], "--tokens: no meaning with --input"),
        (["--input", "no/such.npz"], "no/such.npz"),
        (["--part", "1/2"], "--part: no meaning without --all"),
        (["--part", "1/2", "--input", "f.npz", "--top-k", "3"], "--part: no meaning without --all"),
        (["--words", "--top-k", "3", "--input", "f.npz"], "--top-k, --input: no meaning with --words"),
        (["--all", "--part", "300/300"], "nothing would be compared"),
        (["--all", "--sample", "1", "--part", "2/2"], "nothing would be compared"),
        (["--words", "--format", "nvfp4"], "--format: no meaning with --words"),
        (["--cc", "9.0"], "--cc: no meaning without --compile"),
        (["--epilogue", "--weights", "none"], "--epilogue: no meaning with --weights none"),
        (["--shared-expert", "--weights", "none"], "--shared-expert: no meaning with --weights"),
        (["--ranks", "9"], "--p2p-world-size"),
        (["--ranks", "16"], "cross p2p worlds: add --p2p-world-size 8, or --skip-a2a (see --ranks)"),
        ([*SMALL_BUT_EXPERTS, "--experts", "5"], "n_experts=5 must be a multiple of n_ranks=2"),
        ([*SMALL, "--hidden", "12"], "hidden=12"),
        ([*SMALL, "--format", "nvfp4"], "hidden=16"),
        (["mutants", "--write"], "--write: no meaning without --faults"),
        (["mutants", "--random", "5"], "--random: no meaning without --patch or --as-they-are"),
        (["mutants", "--faults", "--random", "5", "--list"], "--list, --random: no meaning with --faults"),
        (["mutants", "--as-they-are", "--only", "plain/"], "--only: no meaning with --as-they-are"),
    ],
    ids=lambda given: " ".join(given[-4:]) if isinstance(given, list) else "",
)
def test_what_a_command_would_ignore_or_cannot_run_is_explained_in_a_line(capsys, argv, said):
    refused_in_a_line(capsys, said, *argv)


@pytest.mark.parametrize("command", ["verify", "doctor", "check", "mutants", "explain", "soak"])
@pytest.mark.by_day(2)
def test_a_device_that_is_none_is_refused_by_every_command(command):
    done = python("-m", "epmoe", command, EPMOE_DEVICE="nonsense")
    assert done.returncode == 2 and "EPMOE_DEVICE=nonsense" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"epmoe {epmoe.__version__}\n"


def test_a_missing_mpi_library_is_explained_in_a_line(capsys, monkeypatch):
    class WithoutLibrary:
        @property
        def MPI(self):
            raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "mpi4py", WithoutLibrary())
    refused_in_a_line(capsys, "MPI cannot be used (cannot load MPI library): pip install", "--world", "mpi")


def test_an_unexpected_error_is_no_difference(capsys, monkeypatch):
    def broken(args, console=None):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(verify, "run", broken)
    status, out = shown(capsys, "verify")
    assert status == 2 and "ZeroDivisionError: oops" in out.err and "not a difference" in out.err


def test_what_cannot_run_is_told_in_json_too(capsys):
    status, out = shown(capsys, "verify", "--ranks", "2", "--experts", "5", "--json")
    told = json.loads(out.out)
    assert status == 2 and not told["passed"] and "n_experts=5 must be a multiple" in told["cannot_run"]


def test_a_folder_that_cannot_be_made_is_named(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    status, out = shown(capsys, "vectors", str(tmp_path / "file"))
    assert status == 2 and f"epmoe vectors: {tmp_path / 'file'} is a file: give a folder" in out.err


@pytest.mark.parametrize("words", [["lesson"], SMALL, [*SMALL, "--json"]], ids=["list", "pictures", "json"])
@pytest.mark.by_day(1)
def test_an_output_that_is_closed_or_full_is_no_difference(words):
    """Closed from the start: the exit status alone is wanted. Full: the report is lost, so it could not be made.

    A reader that has left sees nothing more. Output is buffered, so the interpreter writes the rest when it ends.
    """
    command, env = [sys.executable, "-m", "epmoe", *words], os.environ | {"PYTHONUNBUFFERED": ""}
    for where, status in ((">&-", 0), (">/dev/full", 2), ("| true; exit ${PIPESTATUS[0]}", 141)):
        shell = ["bash", "-c", f'"$@" {where}', "bash", *command]
        done = subprocess.run(shell, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == status and "Traceback" not in done.stderr, (where, done.stderr)
        assert status != 141 or not done.stderr, done.stderr


def test_an_output_that_cannot_show_boxes_shows_the_rest():
    done = python("-m", "epmoe", "lesson", "1", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "?import numpy as np" in done.stdout, done.stderr


def test_ctrl_c_ends_a_command_without_a_traceback(capsys, monkeypatch):
    def interrupted(args, console=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "run", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().err == "epmoe verify: interrupted\n"


def test_ctrl_c_is_left_to_the_process_that_can_end_the_others():
    """A worker that died by it kept the lock of its queue, and the command never ended."""
    from epmoe.mutants import hunt

    # a shell's background jobs begin without it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with hunt.pool(1) as workers:
            assert workers.apply(signal.getsignal, (signal.SIGINT,)) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
