"""doctor: what this machine has and lacks, each with a remedy."""

import json
import subprocess
from pathlib import Path

import pytest
from commands_shown import shown

from epmoe import doctor


def test_doctor_reports_and_finds_this_machine_able(capsys, monkeypatch):
    found = doctor.findings()
    monkeypatch.setattr(doctor, "findings", lambda: found)
    status, out = shown(capsys, "doctor", "--json")
    record = json.loads(out.out)
    by_name = {f["what"]: f for f in record["findings"]}
    assert status == 0 and record["able"] and by_name["Python"]["state"] == "ok"
    assert "simulator" in by_name["epmoe runs on"]["saw"]
    assert all(f["remedy"] for f in record["findings"] if f["state"] != "ok"), "each thing that is missing has a remedy"
    status, out = shown(capsys, "doctor")
    assert status == 0 and "can run here" in out.out


def test_a_compiler_without_one_of_its_libraries_is_incomplete(monkeypatch):
    pathfinder = pytest.importorskip("cuda.pathfinder")
    load = pathfinder.load_nvidia_dynamic_lib

    def without_nvrtc(name):
        if name == "nvrtc":
            raise pathfinder.DynamicLibNotFoundError(name)
        return load(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", without_nvrtc)
    finding = doctor.compiler()
    assert finding.state == "optional" and "libnvrtc not found" in finding.saw and "[gpu]" in finding.remedy


def test_a_kernel_cache_that_is_off_is_turned_on_by_its_own_variable(monkeypatch):
    monkeypatch.setenv("EPMOE_CACHE", "0")
    assert doctor.kernel_cache().remedy.endswith("again: unset EPMOE_CACHE")


def test_what_is_not_needed_is_called_optional_and_its_remedy_works_from_a_checkout(monkeypatch):
    monkeypatch.setattr(doctor, "find_mpirun", lambda: None)
    monkeypatch.chdir(Path(doctor.__file__).parents[1])
    mpirun = next(f for f in doctor.mpi() if f.what == "mpirun")
    assert mpirun.state == "optional" and "pip install -e '.[mpi]'" in mpirun.remedy
    monkeypatch.chdir("/")
    mpirun = next(f for f in doctor.mpi() if f.what == "mpirun")
    assert f"pip install -e '{Path(doctor.__file__).parents[1]}[mpi]'" in mpirun.remedy


def test_a_command_is_printed_in_one_line_that_can_be_pasted(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    command = "pip install -e '/a/long/path/to/a checkout[gpu,shmem]'"
    found = [doctor.Finding("NVSHMEM", "wrong", "no headers", f"set CUDA_HOME, or install one:\n{command}")]
    monkeypatch.setattr(doctor, "findings", lambda: found)
    assert f"\n    {command}\n" in shown(capsys, "doctor")[1].out


def test_a_machine_that_cannot_run_it_ends_with_2(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "findings", lambda: [doctor.Finding("Python", "wrong", "3.9", "use Python 3.10")])
    status, out = shown(capsys, "doctor", "--json")
    assert status == 2 and not json.loads(out.out)["able"]


def test_a_gpu_that_is_asked_for_and_not_there_is_no_able_machine(monkeypatch):
    from epmoe import device
    from epmoe.device import gpu_present

    monkeypatch.setattr(device, "SIM", False)
    monkeypatch.setattr(gpu_present, "gpu_present", lambda: False)
    finding = doctor.device()
    assert finding.state == "wrong" and "EPMOE_DEVICE=sim" in finding.remedy


def test_numba_cuda_is_shown_with_the_numpy_beside_it():
    finding = doctor.numpy_pair("2.5.0", "0.30.4")
    assert (finding.state, finding.saw) == ("ok", "numba-cuda 0.30.4 with numpy 2.5.0")


def test_doctor_recognises_an_mpirun_of_another_mpi(monkeypatch):
    def run(command, env=None):
        return subprocess.CompletedProcess([], 0, "<1>MPICH v5 " * (1 + command[0].endswith("mpirun")), "")

    monkeypatch.setattr(doctor, "find_mpirun", lambda: "/usr/bin/mpirun")
    monkeypatch.setattr(doctor, "_run", run)
    found = {f.what: f for f in doctor.mpi()}
    assert found["mpirun"].state == "wrong" and "2 worlds of size 1" in found["mpirun"].saw
    assert "MPICH" in found["mpirun"].remedy


def test_doctor_starts_no_job_inside_of_one(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(doctor, "_run", lambda *_, **__: pytest.fail("starts another job"))
    (finding,) = doctor.mpi()
    assert finding.state == "ok" and "not tried: MPICH's mpirun" in finding.saw
    assert "without a launcher" in finding.remedy


@pytest.mark.parametrize(
    "text, parts", [("2.4.6", (2, 4, 6)), ("2.5.0rc1", (2, 5, 0)), ("3", (3,)), ("1.2.dev3", (1, 2))]
)
def test_version_numbers(text, parts):
    assert doctor.numbers(text) == parts


@pytest.mark.parametrize(
    "capability, state, word",
    [
        ((7, 0), "wrong", "7.5 or newer: EPMOE_DEVICE=sim"),
        ((7, 5), "ok", "the plain kernels only"),
        ((9, 0), "ok", "sm_90"),
    ],
)
def test_a_gpu_is_judged_by_its_compute_capability(capability, state, word):
    class Driver:
        """The driver's functions that doctor asks, for a GPU of this capability."""

        def cuDeviceGetAttribute(self, value, attribute, device):
            value._obj.value = capability[attribute - 75]

        def __getattr__(self, name):
            return lambda *arguments: 0

    finding = doctor.gpu(Driver(), 0)
    assert finding.state == state and word in finding.saw + finding.remedy
