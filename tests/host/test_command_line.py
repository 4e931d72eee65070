"""The command line: options refused, errors in a line, a reader that leaves, Ctrl-C; exit statuses 2, 130, 141."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands_shown import shown
from epmoe.__main__ import main
from epmoe.verify import command as verify

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("argv", [["--rounds", "0"], ["--seeds", "x"], ["--format", "fp7"], ["--no-such-option"],
                                  ["--ranks", "0"], ["verfy"], ["explain", "--experts-per", "4"],
                                  ["mutants", "--part", "x"], ["mutants", "--part", "0/3"], ["mutants", "--seeds", "0"],
                                  ["mutants", "--jobs", "0"], ["mutants", "--sample", "-1"]],
                         ids=" ".join)
def test_options_that_make_no_sense_are_refused(capsys, argv):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2


@pytest.mark.parametrize("argv, said", [
    (["--all", "--format", "nvfp4"], "--format: no meaning with --all"),
    (["--sample", "3"], "--sample: no meaning without --all"),
    (["--all", "--tokens", "3", "--fused"], "--tokens, --fused: no meaning with --all"),
    (["--input", "f.npz", "--tokens", "3"], "--tokens: no meaning with --input"),
    (["--input", "no/such.npz"], "no/such.npz"),
    (["--part", "1/2"], "--part: no meaning without --all")], ids=" ".join)
def test_options_that_would_be_ignored_are_refused(capsys, argv, said):
    status, out = shown(capsys, "verify", *argv)
    assert status == 2 and said in out.err and len(out.err.splitlines()) == 1


def test_a_folder_that_cannot_be_made_is_named(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    status, out = shown(capsys, "vectors", str(tmp_path / "file"))
    assert status == 2 and f"epmoe vectors: {tmp_path / 'file'}: " in out.err


def test_a_reader_that_has_left_sees_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "epmoe", "verify", "--json"], cwd=ROOT, stdout=writer,
                          stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_output_that_cannot_show_boxes_shows_the_rest():
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "epmoe", "lesson", "1"], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "? import numpy as np" in done.stdout, done.stderr


def test_ctrl_c_ends_a_command_without_a_traceback(capsys, monkeypatch):
    def interrupted(args, console=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "run", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().err == "python -m epmoe verify: interrupted\n"


def test_ctrl_c_is_left_to_the_process_that_can_end_the_others():
    """A worker that died by it kept the lock of its queue, and the command never ended."""
    from epmoe.mutants import hunt

    before = signal.signal(signal.SIGINT, signal.default_int_handler)   # a shell's background jobs begin without it
    try:
        with hunt.pool(1) as workers:
            assert workers.apply(signal.getsignal, (signal.SIGINT,)) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
