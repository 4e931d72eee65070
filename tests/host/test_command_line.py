"""The command line: options refused, errors in a line, a reader that leaves, Ctrl-C; exit statuses 2, 130, 141."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands_shown import SMALL, shown

from epmoe.__main__ import main
from epmoe.verify import command as verify

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "argv",
    [
        ["--rounds", "0"],
        ["--seeds", "x"],
        ["--format", "fp7"],
        ["--no-such-option"],
        ["--ranks", "0"],
        ["verfy"],
        ["explain", "--experts-per", "4"],
        ["mutants", "--part", "x"],
        ["mutants", "--part", "0/3"],
        ["mutants", "--seeds", "0"],
        ["mutants", "--jobs", "0"],
        ["mutants", "--sample", "-1"],
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense_are_refused(capsys, argv):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--all", "--format", "nvfp4"], "--format: no meaning with --all"),
        (["--sample", "3"], "--sample: no meaning without --all"),
        (["--all", "--tokens", "3", "--fused"], "--tokens, --fused: no meaning with --all"),
        (["--input", "f.npz", "--tokens", "3"], "--tokens: no meaning with --input"),
        (["--input", "no/such.npz"], "no/such.npz"),
        (["--part", "1/2"], "--part: no meaning without --all"),
        (["--all", "--part", "300/300"], "nothing would be compared"),
        (["--all", "--sample", "1", "--part", "2/2"], "nothing would be compared"),
    ],
    ids=" ".join,
)
def test_options_that_would_be_ignored_are_refused(capsys, argv, said):
    status, out = shown(capsys, "verify", *argv)
    assert status == 2 and said in out.err and len(out.err.splitlines()) == 1


@pytest.mark.parametrize(
    "argv, said",
    [
        (["verfy"], "did you mean verify?"),
        (["--rnks", "3"], "did you mean --ranks?"),
        (["soak", "--secnds=3"], "did you mean --seconds?"),
        (["--format", "nvfp"], "did you mean nvfp4?"),
        (["check", "reference", "--jsn"], "did you mean --json?"),
    ],
    ids=" ".join,
)
def test_a_mistyped_word_gets_a_suggestion_and_the_commands_own_usage(capsys, argv, said):
    with pytest.raises(SystemExit) as error:
        main(argv)
    err = capsys.readouterr().err
    of = "" if argv == ["verfy"] else " verify" if argv[0].startswith("-") else f" {argv[0]}"
    assert error.value.code == 2 and said in err and err.startswith(f"usage: epmoe{of} [-h]"), err


@pytest.mark.parametrize(
    "argv, name",
    [
        (["--input", ""], "--input"),
        (["verify", "--dump="], "--dump"),
        (["lesson", "1", "--check", ""], "--check"),
        (["lesson", "1", "--start", " "], "--start"),
        (["vectors", ""], "DIR"),
        (["vectors", "d", "--only", ""], "--only"),
        (["check", ""], "implementation"),
        (["check", "x:Y", "--only", ""], "--only"),
        (["mutants", "--patch", ""], "--patch"),
        (["soak", "--json", ""], "--json"),
        (["explain", "--out", ""], "--out"),
        (["--ranks", ""], "--ranks"),
        ([""], "command"),
    ],
    ids=" ".join,
)
def test_an_empty_word_is_refused_by_name(capsys, argv, name):
    """An unset shell variable must not count as an option that was left out."""
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2 and f"argument {name}: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "check", "mutants", "explain", "soak", "doctor"])
@pytest.mark.by_day(2)
def test_a_device_that_is_none_is_refused_by_every_command(command):
    done = subprocess.run(
        [sys.executable, "-m", "epmoe", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"EPMOE_DEVICE": "nonsense"},
    )
    assert done.returncode == 2 and "EPMOE_DEVICE=nonsense" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_what_cannot_run_names_the_option_that_helps(capsys):
    status, out = shown(capsys, "verify", "--ranks", "9")
    assert status == 2 and "--p2p-world-size" in out.err and len(out.err.splitlines()) == 1


def test_an_unexpected_error_is_no_difference(capsys, monkeypatch):
    def broken(args, console=None):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(verify, "run", broken)
    status, out = shown(capsys, "verify")
    assert status == 2 and "ZeroDivisionError: oops" in out.err and "not a difference" in out.err


def test_a_folder_that_cannot_be_made_is_named(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    status, out = shown(capsys, "vectors", str(tmp_path / "file"))
    assert status == 2 and f"epmoe vectors: {tmp_path / 'file'}: " in out.err


def test_a_reader_that_has_left_sees_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "epmoe", "verify", "--ranks", "2", "--rounds", "1", "--json"],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["pictures", "json"])
@pytest.mark.by_day(1)
def test_an_output_that_is_closed_or_full_is_no_difference(options):
    """Closed from the start: the exit status alone is wanted. Full: the report is lost, so it could not be made."""
    command = [sys.executable, "-m", "epmoe", *SMALL, *options]
    for where, status in ((">&-", 0), (">/dev/full", 2), ("| true; exit ${PIPESTATUS[0]}", 141)):
        done = subprocess.run(
            ["bash", "-c", f'"$@" {where}', "bash", *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == status and "Traceback" not in done.stderr, (where, done.stderr)


def test_an_output_that_cannot_show_boxes_shows_the_rest():
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "epmoe", "lesson", "1"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
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

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs begin without it
    try:
        with hunt.pool(1) as workers:
            assert workers.apply(signal.getsignal, (signal.SIGINT,)) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
