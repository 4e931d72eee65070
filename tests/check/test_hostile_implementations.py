"""No implementation passes without results: some exit, hang, crash, cast, or change results later."""

import json

import hostile_worlds
import pytest
from test_check_command import run_ranks

from epmoe.check import check, guarded
from epmoe.check.implementation import load, whole
from epmoe_ref.errors import EPValueError


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Exits", "dispatch raised SystemExit: 0"),
        ("LeavesAtOnce", "ended the process with exit status 0"),
        ("Crashes", "combine crashed the process: signal 6 (SIGABRT)"),
        ("Interrupts", "dispatch raised KeyboardInterrupt: "),
        ("ReadsStdin", "dispatch raised EOFError: EOF when reading a line"),
        ("TakesNothing", f"but 3 were given ({hostile_worlds.__file__}:"),
        ("CallsTheEpilogue", f"arguments: 'scale' and 'bias' ({hostile_worlds.__file__}:"),
    ],
)
@pytest.mark.by_day(1)
def test_one_that_ends_the_process_differs(name, says, told):
    case = "an epilogue" if name == "CallsTheEpilogue" else "one slot"
    result = told(f"check hostile_worlds:{name} --ranks 2 --only '{case}' --quiet")
    assert result.returncode == 1 and says in result.stdout, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"FAIL hostile_worlds:{name}: ")


def test_one_that_hangs_in_a_case_is_told_so_and_the_other_cases_run(told):
    result = told("check hostile_worlds:Hangs --ranks 2 --only slot --timeout 3 --json")
    record = json.loads(result.stdout)["implementations"][0]
    states = {case["case"]: case["state"] for case in record["cases"]}
    assert result.returncode == 1 and states.pop("one slot") == "differs" and "ok" in states.values(), states
    assert "differs" not in states.values()
    differences = [d for case in record["cases"] for d in case["differences"]]
    says, *stack = differences[0]["says"].splitlines()
    assert len(differences) == 1 and says == "did not return within 3 s (--timeout)"
    assert (differences[0]["what"], differences[0]["round"]) == ("combine", 1) and "in combine" in stack[0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("HangingRank", "'one slot': dispatch of round 1 did not return within 2 s (--timeout)"),
        ("RaisingRank", "combine of round 1 raised ValueError: no memory left; all ranks end\nrank 1:   at File"),
        ("LeavingRank", "raised RuntimeError: the implementation ended the process: sys.exit(0)"),
        ("RankThatLeavesAtOnce", "dispatch of round 1 ended the process: os._exit(0); all ranks end"),
    ],
)
@pytest.mark.by_day(2)
def test_ranks_in_processes_that_hang_or_leave_differ(name, says):
    result = run_ranks(f"check hostile_worlds:{name} --only 'one slot' --timeout 2 --json")
    assert result.returncode == 1 and says in result.stderr, result.stderr
    assert f'  at File "{hostile_worlds.__file__}", line ' in result.stderr
    (case,) = json.loads(result.stdout)["implementations"][0]["cases"]
    (difference,) = case["differences"]
    assert case["case"] == "one slot" and difference["round"] == 1
    assert f"rank {difference['rank']}: epmoe check: hostile_worlds:{name}: " in result.stderr


def test_a_rank_that_crashes_shows_its_stack():
    result = run_ranks("check hostile_worlds:CrashingRank --only 'one slot'")
    assert result.returncode and "PASS" not in result.stdout
    assert f'  File "{hostile_worlds.__file__}", line ' in result.stderr


@pytest.mark.nightly
def test_one_that_hangs_always_is_given_up(told):
    result = told("check hostile_worlds:HangsAlways --ranks 2 --timeout 0.5 --quiet")
    verdict = result.stdout.splitlines()[-1]
    assert result.returncode == 1 and "3 of 26 cases differ from the reference, 23 not run (26 of 53" in verdict


def one_case(implementation, only="uneven ranks"):
    report = check(implementation, n_ranks=2, only=only)
    return [d for outcome in report.outcomes for d in outcome.differences]


def test_results_that_depend_on_a_world_before_are_noticed():
    hostile_worlds.SecondWorldIsWrong.made_before.clear()
    found = one_case(hostile_worlds.SecondWorldIsWrong)
    assert found and all("the case's first run was equal" in d.cause for d in found)


def test_results_that_change_after_they_were_returned_are_noticed():
    found = one_case(hostile_worlds.UsesMemoryAgain)
    assert found and all("changed by a later call" in d.cause and d.round < 3 for d in found)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Fractions", "float64; integers are needed"),
        ("Floats", "float64; integers are needed"),
        ("Nan", "float64; integers are needed"),
        ("Booleans", "bool; integers are needed"),
        ("Wrapped", "[0] is 4294967296, reference 0"),
        ("Unsigned", "[0] is 9223372036854775808, reference 0"),
    ],
)
def test_counts_are_compared_as_they_are(name, says):
    found = one_case(getattr(hostile_worlds, name))
    assert found and {d.what for d in found} == {"row_offsets"} and says in found[0].says, found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Misspelt", "token_formats has 'nvpf4'; did you mean 'nvfp4'?"),
        ("NoTuple", "must be a tuple or set of names"),
        ("MisspeltOption", "options has 'unweigthed'; did you mean 'unweighted'?"),
        ("NoTopK", "NoTopK.max_top_k = 0 must be at least 1"),
        ("OddHidden", "OddHidden.hidden = 100 must be a multiple of 256"),
        ("NoCombine", "NoCombine has no method combine(self, "),
        ("MisspeltType", "combine_dtypes has 'fp8'; there are bf16, fp16, fp32"),
    ],
)
def test_names_that_there_are_not_are_refused(name, says):
    with pytest.raises(EPValueError) as refused:
        whole(getattr(hostile_worlds, name), name)
    assert says in str(refused.value)


def test_one_that_cannot_be_made_here_cannot_be_run(told):
    result = told("check hostile_worlds:NoGpu --ranks 2 --quiet")
    assert (result.returncode, result.stdout) == (2, "") and "there is no GPU" in result.stderr
    result = told("check hostile_worlds:NeverMade --ranks 2 --quiet")
    assert result.returncode == 2 and "make raised RuntimeError: no driver" in result.stdout
    assert "FAIL hostile_worlds:NeverMade: it cannot be made, so nothing was compared (26 of 53" in result.stdout


def test_a_long_import_is_told(told, monkeypatch):
    monkeypatch.setattr(guarded, "SILENT_S", 0)
    result = told("check numpy_world:NumpyWorld --only 'one slot' --quiet")
    assert result.returncode == 0 and "numpy_world:NumpyWorld: still importing or compiling after 0 s" in result.stderr


def test_serving_no_case_is_no_pass(told, run_pytest):
    result = told("check hostile_worlds:ServesNothing --ranks 2 --quiet")
    assert result.returncode == 2 and "no case was run" in result.stdout
    result = run_pytest("--epmoe-check", "hostile_worlds:ServesNothing", "--epmoe-ranks", "2")
    assert result.returncode == 4 and "it serves none of the 53 cases" in result.stderr


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("import no_such_library\n", "needs a module 'no_such_library'"),
        ("raise SystemExit(0)\n", "raised SystemExit"),
        ("x = 1 +\n", "raised SyntaxError"),
        ("x = 1\nx.y\n", "broken_module.py:2)"),
    ],
)
def test_a_module_that_fails_while_it_is_imported_cannot_be_run(module, says, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_module.py").write_text(module)
    with pytest.raises(EPValueError) as refused:
        load("broken_module:Mine")
    assert says in str(refused.value)
