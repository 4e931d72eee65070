"""Which device a test run uses: the simulator, or with `-m gpu` the GPU. The device layer picks once a process.

Which tests run, and how: a plain run checks every law once; `-m nightly` runs everything that needs no GPU and no
browser, with the race detector everywhere (CONTRIBUTING.md has a table).

Also whether tests/epmoe_torch and tests/book can run: without torch or Sphinx they are left out, and the run says so.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from covering import covering

ROOT = Path(__file__).resolve().parents[1]

# The files that take longest, the longest first: begun last, one of them would run alone.
LONGEST = [
    "mutants/test_mutants_are_noticed.py",
    "fused_a2a/test_fused_a2a_as_ptx.py",
    "kernels/test_kernels_as_ptx.py",
    "fused_a2a/test_fused_a2a_kernels.py",
    "check/test_wrong_implementations_are_told_apart.py",
    "check/test_check_command.py",
    "processes/test_ranks_as_processes.py",
    "processes/test_a_rank_fails.py",
    "soak/test_soak_finds_what_is_wrong.py",
    "explain/test_explain_command.py",
    "shmem/test_shmem_worlds.py",
    "shmem/test_rounds_over_the_network.py",
    "device/test_device_ptx.py",
    "kernels/test_plain_as_ptx.py",
    "kernels/test_rounds.py",
    "kernels/test_lamport_combine.py",
    "benchmarks/test_ranks_launch_alike.py",
    "host/test_host_cost.py",
    "oracle/test_corner_worlds.py",
    "shmem/test_shmem_kernels_as_ptx.py",
    "processes/test_kernels_are_compiled_first.py",
    "kernels/test_formats_ptx.py",
    "host/test_command_line.py",
]

# Folders of epmoe that no kernel imports (test_layering): what changes there compiles nothing anew.
ABOVE_KERNELS = {"check", "explain", "lessons", "museum", "mutants", "puzzles", "routing_report", "soak", "torch"}

WORLDS_OF_A_NIGHT = "1000"  # random ones, of tests/fuzz

# Of the simulator's network, whose words they import: on a GPU these are NVSHMEM's, which need not be installed.
SIMULATED_NETWORK = {"test_network_order.py", "test_ordering_is_needed.py"}

# folders whose tests need more than the extra `test`: a module, and the extra that brings it
NEEDS = {"epmoe_torch": ("torch", "torch"), "book": ("myst_nb", "book")}
LEFT_OUT = {f: need for f, need in NEEDS.items() if not importlib.util.find_spec(need[0])}
collect_ignore_glob = [f"{folder}/*" for folder in LEFT_OUT]


def gpu_count():
    """Number of CUDA devices the driver shows; 0 without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def wants_gpu(config):
    expression = config.getoption("markexpr") or ""
    return "gpu" in expression and "not gpu" not in expression


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # Runs before any test module is imported, hence before epmoe.device looks.
    os.environ["EPMOE_DEVICE"] = "gpu" if wants_gpu(config) else "sim"
    if wants_nightly(config):
        os.environ.setdefault("EPMOE_FUZZ", WORLDS_OF_A_NIGHT)
    from epmoe.check.ranks import process_number, started_with_others

    # under mpirun each rank writes a JUnit file of its own
    if config.option.xmlpath and started_with_others():
        path = Path(config.option.xmlpath)
        config.option.xmlpath = str(path.with_name(f"{path.stem}.rank{process_number()}{path.suffix}"))


class Detector:
    """Whether simulators look for data races if a test does not say so itself."""

    on = False


def wants_nightly(config):
    return "nightly" in (config.getoption("markexpr") or "")


@pytest.fixture(autouse=True, scope="session")
def race_detector(request):
    """Simulators whose ranks are all in this process look for data races: at night, and in tests marked racecheck.

    Not by EPMOE_RACECHECK, which processes that tests begin would inherit, and which ranks in processes refuse.
    """
    if wants_gpu(request.config):
        yield
        return
    from epmoe.device.sim.machine import SimMachine

    begin = SimMachine.__init__

    def with_detector(self, n_ranks, *, rank=None, racecheck=None, **options):
        if racecheck is None and rank is None and Detector.on and "EPMOE_RACECHECK" not in os.environ:
            racecheck = True
        begin(self, n_ranks, rank=rank, racecheck=racecheck, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimMachine, "__init__", with_detector)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    Detector.on = wants_nightly(item.config) or item.get_closest_marker("racecheck") is not None


def pytest_report_header(config):
    if wants_gpu(config):
        return f"epmoe: tests marked gpu, {gpu_count()} GPU(s)"
    return "epmoe: simulator; tests for the GPU run with -m gpu, those in a browser with -m browser"


def pytest_ignore_collect(collection_path, config):
    """With `-m gpu` the files of the simulator's network, which hold nothing for a GPU, are not imported."""
    return True if wants_gpu(config) and collection_path.name in SIMULATED_NETWORK else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Drops what runs elsewhere, before `-m` selects: tests for a GPU, a browser, or the night, which are counted so.

    With `-m gpu` and no GPU the run fails at once; `-m browser` fails in each test that finds no browser. `-m nightly`
    is every test but these two kinds.
    """
    if wants_gpu(config):
        if gpu_count() == 0:
            raise pytest.UsageError("-m gpu: the driver shows no GPU; `epmoe doctor` says what is missing")
        return
    items.sort(key=_longest_first)
    unwanted = {"gpu", "browser", "nightly"}
    if "browser" in (config.getoption("markexpr") or ""):
        unwanted = {"gpu"}
    elif wants_nightly(config):
        unwanted = {"gpu", "browser"}
        for item in items:
            item.add_marker("nightly")
    else:
        leave_to_the_night(items)
    chosen = [item for item in items if not unwanted & {mark.name for mark in item.iter_markers()}]
    dropped = [item for item in items if unwanted & {mark.name for mark in item.iter_markers()}]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = chosen


def pytest_collection_finish():
    """What tests are made of stays: those that collect garbage need not look at it."""
    gc.collect()
    gc.freeze()


def leave_to_the_night(items):
    """Of a parametrised test marked by_day, marks the cases `nightly` that a run by day does without.

    By day each value of each parameter occurs once; with by_day(n), n cases run that have as many values as possible.
    """
    tests = {}
    for item in items:
        if item.get_closest_marker("by_day") and not item.get_closest_marker("nightly"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        wanted = (cases[0].get_closest_marker("by_day").args or (len(cases),))[0]
        values = [{(name, repr(v)) for name, v in case.callspec.params.items()} for case in cases]
        chosen = covering(values, wanted)
        for i, case in enumerate(cases):
            if i not in chosen:
                case.add_marker("nightly")


def _longest_first(item):
    name = item.path.relative_to(ROOT / "tests").as_posix() if item.path.is_relative_to(ROOT / "tests") else ""
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With -n a file's tests go to one process: what they share, such as compiled kernels, is made once.

    Files begin in the order of their tests here, not by how many tests they have. Batches of random worlds share
    nothing, and each may go to a process of its own.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return nodeid if nodeid.startswith("tests/fuzz/") else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter):
    for folder, (module, extra) in LEFT_OUT.items():
        terminalreporter.write_line(f"tests/{folder}: not run, {module} is not installed (pip install -e '.[{extra}]')")


def content_of_kernels(program):
    """A digest of all that decides what a program compiles: the source of kernels, the programs, the compilers."""
    from importlib import metadata

    sources = (ROOT / "epmoe").rglob("*.py")
    files = [
        *(file for file in sources if file.relative_to(ROOT).parts[1] not in ABOVE_KERNELS),
        *(ROOT / "epmoe_ref").rglob("*.py"),
        *program.parent.glob("*.py"),
    ]
    digest = hashlib.sha256(sys.version.encode())
    for name in ("numba-cuda", "numba", "llvmlite", "numpy", "nvidia-cuda-nvcc", "nvshmem4py-cu13"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            digest.update(f"{name} {metadata.version(name)};".encode())
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="session")
def gpu_side(request):
    """Function (program, *names) -> what it prints, from JSON; it runs with the device layer's GPU side, without a GPU.

    A process of its own, because this one has the simulator; once a session for each program and names. What a program
    with names (of kernels to compile) printed is kept in pytest's cache as long as no source is another.
    """
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda has no wheels for this system; there is no PTX without it")

    @functools.cache
    def printed_by(program, *names):
        kept = None
        if names and getattr(request.config, "cache", None):
            key = hashlib.sha256(repr((content_of_kernels(program), program.name, names)).encode()).hexdigest()
            kept = request.config.cache.mkdir("epmoe-ptx") / f"{key}.json"
            if kept.exists():
                return json.loads(kept.read_text())
        environment = os.environ | {
            "EPMOE_DEVICE": "gpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(program.parent)]),
        }
        environment.pop("NUMBA_ENABLE_CUDASIM", None)
        done = subprocess.run(
            [sys.executable, str(program), *names], capture_output=True, text=True, env=environment, timeout=870
        )
        assert done.returncode == 0, done.stderr[-4000:]
        if kept is not None:
            other = kept.with_suffix(f".{os.getpid()}")
            other.write_text(done.stdout)
            other.replace(kept)
        return json.loads(done.stdout)

    return printed_by


@pytest.fixture(scope="session")
def tonight(request):
    """Whether this is the nightly run."""
    return wants_nightly(request.config)
