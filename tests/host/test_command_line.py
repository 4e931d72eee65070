"""The command line: verify shows and decides, files go in and out, doctor reports; exit statuses 0, 1, 2."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from epmoe import doctor, routing
from epmoe.__main__ import main
from epmoe.kernels import transport
from epmoe.verify import command as verify, matrix
from epmoe_ref.errors import EPValueError
from worlds_at_hand import config

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--ranks", "2", "--experts-per-rank", "2", "--top-k", "2", "--hidden", "16", "--tokens", "4", "--rounds", "2"]


def shown(capsys, *argv):
    status = main(list(argv))
    return status, capsys.readouterr()


def test_the_main_job_passes_and_shows_what_it_did():
    """The very command, with its own defaults, in an 80-column terminal."""
    done = subprocess.run([sys.executable, "-m", "epmoe"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout
    for part in ("4 ranks x 4 experts, top-4", "(0 tokens)", "to rank 3", "dispatch_recv_count", "16 of 16", "round 3:",
                 "PASS"):
        assert part in text
    assert text.count("dispatch equal   combine equal") == 3
    assert max(len(line) for line in text.splitlines()) <= 80


def test_the_default_batch_is_uneven_with_an_empty_rank_and_empty_slots():
    args = options(["--ranks", "4"])
    case = verify.case_of(args)
    for batch in verify.batches(case, args, 0, None):
        assert {0, case.cfg.max_tokens_per_rank} < set(batch.num_tokens)
        ids = np.concatenate(batch.topk_ids)
        assert (ids == -1).any() and (ids >= 0).any()


def options(argv):
    import argparse

    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    return parser.parse_args(argv)


def test_json_says_the_same(capsys):
    status, out = shown(capsys, *SMALL, "--json", "--fused", "--seed", "3")
    record = json.loads(out.out)
    assert status == 0 and record["passed"] and record["config"]["hidden"] == 16
    assert "simulator, seed 3" in record["machine"]
    rounds = record["seeds"][0]["rounds"]
    assert [r["round"] for r in rounds] == [1, 2] and all(r["dispatch"] == r["combine"] == "equal" for r in rounds)
    for r in rounds:
        assert np.array(r["routing"]).shape == (2, 4) and not r["differences"]
        assert not np.any(r["counters"]["combined"]["reserved"])


@pytest.mark.parametrize("argv", [["--format", "fp8_blockwise", "--hidden", "128"], ["--shared-expert", "--epilogue"],
                                  ["--skip-a2a", "--shared-expert", "--fused"], ["--weights", "none"],
                                  ["--weights", "function", "--combine-dtype", "fp32"],
                                  ["--racecheck", "--rounds", "1"],
                                  ["--format", "mxfp4_rows", "--preshuffle", "--hidden", "256", "--fused"],
                                  ["--seeds", "2", "--experts", "6", "--ranks", "3"]], ids=" ".join)
def test_every_option_verifies(capsys, argv):
    status, out = shown(capsys, *SMALL, *argv)
    assert status == 0 and "PASS" in out.out, out.out + out.err


@pytest.mark.parametrize("argv, said", [(["--experts", "5"], "n_experts=5 must be a multiple of n_ranks=2"),
                                        (["--hidden", "12"], "hidden=12"),
                                        (["--format", "nvfp4"], "hidden=16")], ids=str)
def test_what_cannot_run_is_explained_in_a_line(capsys, argv, said):
    status, out = shown(capsys, *SMALL, *argv)
    assert status == 2 and said in out.err and "Traceback" not in out.err and len(out.err.splitlines()) == 1


@pytest.mark.parametrize("argv", [["--rounds", "0"], ["--seeds", "x"], ["--format", "fp7"], ["--no-such-option"],
                                  ["--ranks", "0"], ["verfy"], ["explain", "--experts-per", "4"],
                                  ["mutants", "--part", "x"], ["mutants", "--part", "0/3"], ["mutants", "--seeds", "0"],
                                  ["mutants", "--jobs", "0"], ["mutants", "--sample", "-1"]],
                         ids=" ".join)
def test_options_that_make_no_sense_are_refused(capsys, argv):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2


class Forgetful:
    """The kernels, but combine_wait is told that all tokens came without their last slot's weight."""

    def __getattr__(self, name):
        from epmoe import kernels

        made = getattr(kernels, name)
        if name != "combine_wait_kernel":
            return made

        def factory(cfg, *args, **options):
            call = made(cfg, *args, **options)

            def launch(*arguments, machine, router_weights, **named):
                weights = np.full((arguments[0].n, cfg.top_k), 2, np.float32)
                address = machine.adopt(weights, "wrong weights", arguments[4])
                call(*arguments, machine=machine, router_weights=address, **named)

            launch.close = call.close
            return launch

        return factory


def test_a_wrong_kernel_fails_with_the_first_difference(capsys, monkeypatch):
    import functools

    monkeypatch.setattr(verify, "rounds_of", functools.partial(verify.rounds_of, kernels=Forgetful()))
    status, out = shown(capsys, *SMALL)
    assert status == 1 and "FAIL" in out.out and "combine DIFFERS" in out.out and "dispatch equal" in out.out
    text = " ".join(out.out.split())
    for part in ("rank ", "token ", "column ", "reference", "rule:"):
        assert part in text[text.index("FAIL"):], out.out
    assert "round 2" not in out.out
    status, out = shown(capsys, *SMALL, "--json")
    record = json.loads(out.out)
    first = record["seeds"][0]["rounds"][0]["differences"][0]
    assert status == 1 and not record["passed"] and first["what"] == "output" and first["column"] is not None


@pytest.mark.parametrize("fused", [[], ["--fused"]], ids=["split", "fused"])
def test_a_race_is_reported_with_the_seed_that_shows_it_again(capsys, monkeypatch, fused):
    """Signals that release nothing: the messages behind them race, between the halves of a split dispatch too."""
    monkeypatch.setattr(transport, "st_release_sys_u64", transport.st_relaxed_sys_u64)
    status, out = shown(capsys, *SMALL, "--racecheck", "--seed", "5", "--seeds", "2", *fused)
    text = out.out[out.out.index("FAIL"):]
    assert status == 1 and text.startswith("FAIL (seed 5: --seed 5 in the place of --seeds runs the same again)"), text
    assert "RaceError in round 1: data race on dispatch_recv_buf[" in text and "st_relaxed_sys_u64" in text
    status, out = shown(capsys, *SMALL, "--racecheck", "--seed", "5", "--json", *fused)
    record = json.loads(out.out)
    assert status == 1 and not record["passed"]
    assert text.rstrip().endswith(record["seeds"][0]["reported"])


def test_dump_and_input_are_a_round_trip(capsys, tmp_path):
    file = tmp_path / "routing.npz"
    status, first = shown(capsys, *SMALL, "--rounds", "1", "--dump", str(file), "--json")
    assert status == 0
    status, second = shown(capsys, "--ranks", "2", "--input", str(file), "--json")
    assert status == 0
    a, b = (json.loads(out.out) for out in (first, second))
    assert a["seeds"][0]["rounds"][0]["routing"] == b["seeds"][0]["rounds"][0]["routing"]
    assert b["config"]["n_experts"] == 4 and b["config"]["top_k"] == 2 and b["config"]["hidden"] == 16
    batch = routing.load(file)
    assert batch.x.dtype == ml_dtypes.bfloat16 and batch.notes == [] and len(batch.rank_offsets) == 3


def saved(tmp_path, **changes):
    """A file of 7 tokens of 16 float32 elements, top-2 of 6 experts."""
    rng = np.random.default_rng(0)
    arrays = dict(x=rng.standard_normal((7, 16)).astype(np.float32), topk_ids=np.tile([0, 5], (7, 1)),
                  topk_weights=np.full((7, 2), 0.5)) | changes
    path = tmp_path / "mine.npz"
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


def test_a_users_file_is_split_evenly_and_converted_with_a_note(capsys, tmp_path):
    status, out = shown(capsys, "--ranks", "3", "--input", str(saved(tmp_path)))
    assert status == 0 and "(3 tokens)" in out.out and out.out.count("(2 tokens)") == 2, out.out
    assert "x: float32 rounded to bfloat16" in out.out and "topk_weights: float64 converted to float32" in out.out


def test_bf16_saved_by_numpy_is_read(tmp_path):
    x = np.arange(112).reshape(7, 16).astype(ml_dtypes.bfloat16)
    for form in (x, x.view(np.uint16)):
        batch = routing.load(saved(tmp_path, x=form))
        assert batch.x.dtype == ml_dtypes.bfloat16 and np.array_equal(batch.x.astype(float), x.astype(float))


@pytest.mark.parametrize("changes, said", [
    (dict(topk_weights=None), "no topk_weights"), (dict(x=np.zeros((6, 16))), "topk_ids in the file has shape (7, 2)"),
    (dict(topk_ids=np.zeros((7, 2))), "float64; integers"), (dict(topk_weights=np.zeros((7, 3))), "(7, 3)"),
    (dict(x=np.zeros((7, 16), int)), "int64; floats"), (dict(rank_offsets=[0, 4, 3, 7]), "never fall"),
    (dict(rank_offsets=[0, 2, 5]), "end at N=7"), (dict(rank_offsets=[0, 3, 5, 7]), "for 3 ranks"),
    (dict(topk_ids=np.full((7, 2), 3)), "row 0 holds [3, 3]; the ids of a token must be distinct"),
    (dict(topk_ids=np.tile([0, -2], (7, 1))), "holds -2"),
    (dict(n_experts=4), "row 0, slot 1 holds 5, outside [0, n_experts=4)"),
    (dict(x=np.zeros((7, 12))), "hidden=12")], ids=lambda c: next(iter(c)) if isinstance(c, dict) else c)
def test_what_does_not_fit_in_a_file_is_explained(capsys, tmp_path, changes, said):
    status, out = shown(capsys, "--ranks", "2", "--input", str(saved(tmp_path, **changes)))
    assert status == 2 and said in out.err and len(out.err.splitlines()) == 1, out.err


def test_a_file_that_is_no_npz_is_explained(capsys, tmp_path):
    path = tmp_path / "x.npz"
    path.write_text("hello")
    status, out = shown(capsys, "--input", str(path))
    assert status == 2 and "cannot be read as an .npz" in out.err


def test_the_least_number_of_experts_that_holds_the_ids(tmp_path):
    batch = routing.load(saved(tmp_path))
    assert [batch.experts_for(n) for n in (1, 2, 3, 4, 5)] == [6, 6, 6, 8, 10]


def test_the_matrix_has_every_combination_once():
    cases = list(matrix.cases(n_ranks=2, hidden=256))
    assert len(cases) == len(set(map(str, cases))) == 7 * 2 * 2 * (5 + 4)
    for fused in (False, True):
        for shared in (False, True):
            for skip in (False, True):
                some = [c for c in cases
                        if (c.fused, c.cfg.fused_shared_expert, c.cfg.skip_a2a) == (fused, shared, skip)]
                assert len({(c.cfg.token_format, c.cfg.fuse_a_scale_preshuffle) for c in some}) == 7


def test_a_sample_of_the_matrix_passes(capsys):
    status, out = shown(capsys, "verify", "--all", "--sample", "4")
    assert status == 0 and "PASS  4 cases" in out.out and "mxfp4_rows slots" in out.out, out.out
    assert max(len(line) for line in out.out.splitlines()) <= 80


def test_the_matrix_has_as_many_ranks_as_asked_for(capsys):
    status, out = shown(capsys, "verify", "--all", "--sample", "1", "--ranks", "3")
    assert status == 0 and "3 ranks x 2 experts" in out.out and "PASS  1 case in" in out.out, out.out


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


def test_a_case_that_differs_fails_the_matrix(capsys, monkeypatch):
    monkeypatch.setattr(matrix, "check", lambda case, *_: "round 1: wrong" if case.fused else None)
    status, out = shown(capsys, "verify", "--all", "--sample", "9", "--json")
    record = json.loads(out.out)
    assert status == 1 and not record["passed"]
    assert {c["difference"] for c in record["cases"]} == {None, "round 1: wrong"}
    status, out = shown(capsys, "verify", "--all", "--sample", "9")
    assert status == 1 and "FAIL" in out.out and "round 1: wrong" in out.out


def test_doctor_reports_and_finds_this_machine_able(capsys):
    status, out = shown(capsys, "doctor", "--json")
    record = json.loads(out.out)
    by_name = {f["what"]: f for f in record["findings"]}
    assert status == 0 and record["able"] and by_name["Python"]["state"] == "ok"
    assert "simulator" in by_name["epmoe runs on"]["saw"]
    assert all(f["remedy"] for f in record["findings"] if f["state"] != "ok"), "each thing that is missing has a remedy"
    status, out = shown(capsys, "doctor")
    assert status == 0 and "can run here" in out.out


def test_a_gpu_that_is_asked_for_and_not_there_is_no_able_machine(monkeypatch):
    from epmoe import device
    from epmoe.device import gpu_present

    monkeypatch.setattr(device, "SIM", False)
    monkeypatch.setattr(gpu_present, "gpu_present", lambda: False)
    finding = doctor.device()
    assert finding.state == "wrong" and "EPMOE_DEVICE=sim" in finding.remedy


@pytest.mark.parametrize("numpy, state", [("2.4.6", "ok"), ("2.5.0", "wrong"), ("3.0", "wrong")])
def test_doctor_knows_the_pair_that_breaks(numpy, state):
    finding = doctor.numpy_pair(numpy, "0.30.4")
    assert finding.state == state and ("numpy<2.5" in finding.remedy) == (state == "wrong")


def test_doctor_recognises_an_mpirun_of_another_mpi(monkeypatch):
    def answer(stdout):
        return subprocess.CompletedProcess([], 0, stdout, "")

    monkeypatch.setattr(doctor, "find_mpirun", lambda: "/usr/bin/mpirun")
    monkeypatch.setattr(doctor, "_run", lambda command, env=None:
                        answer("<1>MPICH v5 " * (1 + command[0].endswith("mpirun"))))
    found = {f.what: f for f in doctor.mpi()}
    assert found["mpirun"].state == "wrong" and "2 worlds of size 1" in found["mpirun"].saw
    assert "MPICH" in found["mpirun"].remedy


def test_doctor_starts_no_job_inside_of_one(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(doctor, "_run", lambda *_, **__: pytest.fail("starts another job"))
    finding, = doctor.mpi()
    assert finding.state == "ok" and "not tried: MPICH's mpirun" in finding.saw
    assert "without a launcher" in finding.remedy


@pytest.mark.parametrize("text, parts", [("2.4.6", (2, 4, 6)), ("2.5.0rc1", (2, 5, 0)), ("3", (3,)),
                                         ("1.2.dev3", (1, 2))])
def test_version_numbers(text, parts):
    assert doctor.numbers(text) == parts


def test_the_pictures_of_a_large_world_fit(capsys):
    from epmoe.verify import pictures
    from rich.console import Console

    cfg = config(n_ranks=8, n_experts=256, top_k=8, max_tokens_per_rank=64)
    routed = routing.make(cfg, 0)
    out = io.StringIO()
    Console(file=out, width=80).print(pictures.routing(cfg, routed))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and sum("rank" in line for line in lines) == 9 and "busiest experts" in lines[-1]
    totals = pictures.counts(cfg, routed.topk_ids)
    assert totals.sum() == sum(int((a >= 0).sum()) for a in routed.topk_ids)


def test_a_batch_for_skip_a2a_is_the_same_on_all_ranks():
    routed = routing.make(config(skip_a2a=True), 0)
    assert all(np.array_equal(routed.topk_ids[0], a) for a in routed.topk_ids)


def test_rank_offsets_must_match_the_ranks(tmp_path):
    batch = routing.load(saved(tmp_path, rank_offsets=[0, 3, 7]))
    assert batch.split(2).num_tokens == [3, 4]
    with pytest.raises(EPValueError, match="--ranks 2"):
        batch.split(3)


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

    with hunt.pool(1) as workers:
        assert workers.apply(signal.getsignal, (signal.SIGINT,)) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
