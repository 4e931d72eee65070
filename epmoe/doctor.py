"""`epmoe doctor`: lists what this machine has, what is missing, and how to fix it."""

import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from epmoe.capability import FAST, OLDEST
from epmoe.command_line import CANNOT_RUN, EQUAL
from epmoe.provenance import install, installed
from epmoe.worlds import launcher

OK, OPTIONAL, MISSING, WRONG = "ok", "optional", "missing", "wrong"  # optional: not needed
OPEN_MPI_SAYS_NO = (
    "but only with these variables set. First line: as root (or mpirun --allow-run-as-root); second (4.x) or "
    "third (5.x): with fewer cores than ranks\n"
    "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n"
    "export OMPI_MCA_rmaps_base_oversubscribe=1\n"
    "export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report: the item, its state, the details found, and how to fix it.

    Lines of the remedy after the first are commands.
    """

    what: str
    state: str
    saw: str
    remedy: str = ""


def numbers(text):
    """'2.4.6' -> (2, 4, 6). Everything after the first non-number is dropped."""
    parts = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def python():
    """The interpreter: 3.10 to 3.14."""
    saw = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    fits = (3, 10) <= sys.version_info[:2] <= (3, 14)
    return Finding("Python", OK if fits else WRONG, saw, "" if fits else "use Python 3.10 to 3.14")


def packages():
    """The packages that the reference and the simulator need."""
    for name in ("numpy", "ml_dtypes", "numba", "greenlet", "rich"):
        found = installed(name)
        yield Finding(name, OK if found else MISSING, found or "not installed", "" if found else f"pip install {name}")


def numpy_pair(numpy_version, numba_cuda_version):
    """numba-cuda, and the NumPy version used with it."""
    if numba_cuda_version is None:
        if sys.platform == "darwin":
            return Finding("numba-cuda", OK, "not installed (macOS: simulator only)")
        return Finding("numba-cuda", OPTIONAL, "not installed", f"for GPUs:\n{install('gpu')}")
    return Finding("numba-cuda", OK, f"numba-cuda {numba_cuda_version} with numpy {numpy_version}")


def driver():
    """The NVIDIA driver and the GPUs it shows."""
    no_gpu = "none needed: the simulator runs everything; for GPUs install NVIDIA's driver"
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        yield Finding("GPU driver", OPTIONAL, "no libcuda.so.1", no_gpu)
        return
    error = cuda.cuInit(0)
    number, count = ctypes.c_int(), ctypes.c_int()
    if error or cuda.cuDeviceGetCount(ctypes.byref(count)):
        yield Finding(
            "GPU driver",
            WRONG,
            f"libcuda.so.1 is present, but cuInit returns {error}",
            "is a GPU passed to this container or job, and does `nvidia-smi` work?",
        )
        return
    cuda.cuDriverGetVersion(ctypes.byref(number))
    cuda_version = (number.value // 1000, number.value % 1000 // 10)
    saw = f"for CUDA {cuda_version[0]}.{cuda_version[1]}, {count.value} GPU(s)"
    if cuda_version < (13, 0):
        yield Finding(
            "GPU driver", WRONG, saw, "the extra [gpu] installs CUDA 13: use driver 580 or newer, or numba-cuda[cu12]"
        )
    else:
        yield Finding(
            "GPU driver",
            OK if count.value else WRONG,
            saw,
            "" if count.value else "CUDA_VISIBLE_DEVICES hides them all, or none is passed to this container",
        )
    for ordinal in range(count.value):
        yield gpu(cuda, ordinal)


def gpu(cuda, ordinal):
    """One GPU: its name, memory and compute capability. The capability decides which kernels it runs."""
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(96)
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, 96, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    capability = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    saw = f"{name.value.decode()}, {memory.value / 2**30:.0f} GiB, sm_{capability[0]}{capability[1]}"
    if tuple(capability) < OLDEST:
        return Finding(
            f"GPU {ordinal}",
            WRONG,
            saw,
            "the kernels need compute capability %d.%d or newer: EPMOE_DEVICE=sim" % OLDEST,
        )
    return Finding(f"GPU {ordinal}", OK, saw if tuple(capability) >= FAST else saw + ": the plain kernels only")


def compiler():
    """NVVM, NVRTC and nvJitLink, which compile kernels, even without a GPU."""
    if sys.platform == "darwin":
        return Finding("GPU compiler", OK, "none on macOS: simulator only")
    seen, name = [], "nvvm"
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        for name in ("nvvm", "nvrtc", "nvJitLink"):
            seen.append(Path(load_nvidia_dynamic_lib(name).abs_path).name)
    except Exception as e:  # pathfinder's error classes differ between its versions
        return Finding(
            "GPU compiler",
            OPTIONAL,
            f"lib{name} not found ({type(e).__name__})",
            f"to compile kernels for GPUs:\n{install('gpu')}",
        )
    return Finding("GPU compiler", OK, f"{', '.join(seen)}, nvidia-nvvm {installed('nvidia-nvvm') or 'of the system'}")


def device():
    """The device that epmoe would use in this process."""
    try:
        from epmoe import device as chosen
        from epmoe.device.gpu_present import gpu_present
    except Exception as e:
        return Finding("epmoe runs on", WRONG, f"importing epmoe.device fails: {e}", "see the lines above")
    why = [f"{name}={os.environ[name]}" for name in ("EPMOE_DEVICE", "NUMBA_ENABLE_CUDASIM") if os.environ.get(name)]
    saw = "the simulator" if chosen.SIM else "the GPU"
    saw = f"{saw} ({', '.join(why)})" if why else saw
    if not chosen.SIM and not gpu_present():
        return Finding(
            "epmoe runs on",
            WRONG,
            f"{saw}, and none can be used",
            "EPMOE_DEVICE=sim, or unset it, for the simulator; as it is, kernels can only be compiled",
        )
    return Finding("epmoe runs on", OK, saw)


def kernel_cache():
    """The folder of compiled kernels."""
    from epmoe.device.kernel_cache import folder_or_reason

    folder, reason = folder_or_reason()
    if folder is not None:
        return Finding("kernel cache", OK, str(folder))
    return Finding(
        "kernel cache",
        OPTIONAL,
        f"not used: {reason}",
        "every process compiles its kernels again: "
        + ("unset EPMOE_CACHE" if "EPMOE_CACHE=" in reason else "set EPMOE_CACHE_DIR to a folder of your own"),
    )


def find_mpirun():
    """Path of mpirun (or mpiexec): next to this Python, where pip puts it, else on PATH; None if there is none."""
    beside = str(Path(sys.executable).parent)
    for name in ("mpirun", "mpiexec"):
        found = shutil.which(name, path=beside) or shutil.which(name)
        if found:
            return found
    return None


def mpi():
    """mpi4py, an MPI library, and an mpirun that belongs to that library (another one starts N worlds of size 1)."""
    if importlib.util.find_spec("mpi4py") is None:
        yield Finding("MPI", OPTIONAL, "mpi4py is not installed", f"for one rank a process:\n{install('mpi')}")
        return
    size, started_by = launcher.launched_size()
    if size is not None:  # a program that calls MPI_Init inside a job counts as one of its ranks
        yield Finding(
            "MPI",
            OK,
            f"mpi4py {installed('mpi4py')}, not tried: {started_by} started this process",
            "to test the library and mpirun, run this without a launcher:\nepmoe doctor",
        )
        return
    code = (
        "from mpi4py import MPI; "  # two ranks may print on the same line
        "print(f'<{MPI.COMM_WORLD.size}>{MPI.Get_library_version().splitlines()[0]}', end=' ')"
    )
    alone = _run([sys.executable, "-c", code])
    if alone is None or alone.returncode:
        last = (alone.stderr.strip().splitlines() or ["no message"])[-1] if alone else "no answer in 30 s"
        yield Finding(
            "MPI",
            OPTIONAL,
            f"mpi4py {installed('mpi4py')} finds no MPI library: {last[:90]}",
            f"for one rank a process:\n{install('mpi')}",
        )
        return
    library = launcher.library(alone.stdout.partition(">")[2])[:50]
    yield Finding("MPI", OK, f"mpi4py {installed('mpi4py')} with {library}")
    mpirun = find_mpirun()
    if mpirun is None:
        yield Finding(
            "mpirun", OPTIONAL, "neither next to this Python nor on PATH", f"for one rank a process:\n{install('mpi')}"
        )
        return
    # Open MPI refuses to run as root or with few cores; mpirun and library may still match
    pair = _run([mpirun, "-n", "2", sys.executable, "-c", code], env=launcher.trial_environment())
    sizes = re.findall(r"<(\d+)>", pair.stdout) if pair else []
    if sizes == ["2", "2"]:
        bare = _run([mpirun, "-n", "2", sys.executable, "-c", ""])
        bare = "" if bare is not None and bare.returncode == 0 else OPEN_MPI_SAYS_NO
        yield Finding("mpirun", OK, f"{mpirun} starts 2 ranks of one world", bare)
    elif sizes == ["1", "1"]:
        yield Finding(
            "mpirun",
            WRONG,
            f"{mpirun} starts 2 worlds of size 1: it belongs to a different MPI than {library}",
            f"use the mpirun of {library.split(' v')[0]}, or install MPICH, which puts its mpirun next to this "
            "Python:\npip install mpich",
        )
    else:
        said = _first_words(pair.stderr + pair.stdout) if pair else "no answer in 30 s"
        yield Finding(
            "mpirun",
            WRONG,
            f"{mpirun} -n 2 fails: {said}",
            "does the first command work? If not, that MPI is not set up; the second one installs one that is\n"
            f"{mpirun} -n 2 hostname\npip install mpich",
        )


def nvshmem():
    """NVSHMEM and its Python binding, needed only between hosts (several p2p worlds)."""
    binding, library = installed("nvshmem4py-cu13"), installed("nvidia-nvshmem-cu13")
    remedy = f"for several p2p worlds (nvshmem4py-cu13, nvidia-nvshmem-cu13>=3.5.21, cffi):\n{install('shmem')}"
    if binding is None or library is None:
        saw = f"nvshmem4py-cu13 {binding or 'no'}, nvidia-nvshmem-cu13 {library or 'no'}"
        return Finding("NVSHMEM", OPTIONAL, saw, remedy)
    saw = f"nvshmem4py {binding}, NVSHMEM {library}"
    if numbers(library) < (3, 5, 21):
        return Finding("NVSHMEM", WRONG, saw + ": its headers do not compile under NVRTC before 3.5.21", remedy)
    if importlib.util.find_spec("cffi") is None:
        return Finding("NVSHMEM", WRONG, saw + ", but cffi is missing, which the binding imports", "pip install cffi")
    unfound = [name for name in ("nvshmem", "cccl", "cudart") if not _headers(name)]
    if unfound:
        return Finding(
            "NVSHMEM",
            WRONG,
            f"{saw}, but no headers of {', '.join(unfound)}, which kernels need",
            f"set CUDA_HOME to a CUDA 13 toolkit, or install one:\n{install('gpu,shmem')}",
        )
    return Finding("NVSHMEM", OK, saw)


def _headers(name):
    """The folder with the headers of one of CUDA's libraries; None if they are not found."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        return find_nvidia_header_directory(name)
    except Exception:  # pathfinder's error classes differ between its versions
        return None


def _first_words(text):
    lines = [line.strip() for line in text.splitlines() if any(c.isalpha() for c in line)]
    return lines[0][:90] if lines else "no output"


def _run(command, env=None):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None


def findings():
    """All findings of this machine, in the order of the report."""
    yield python()
    yield from packages()
    yield numpy_pair(installed("numpy"), installed("numba-cuda"))
    yield compiler()
    yield from driver()
    yield device()
    yield kernel_cache()
    yield from mpi()
    yield nvshmem()


def add_arguments(parser):
    """Add doctor's option."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args, console=None):
    """Print the report. The exit status is 0 if `epmoe` can run here (simulator or GPU), else 2."""
    seen = list(findings())
    needed = ("Python", "numpy", "ml_dtypes", "numba", "greenlet", "rich", "epmoe runs on")
    able = all(f.state == OK for f in seen if f.what in needed)
    if args.json:
        print(json.dumps({"able": able, "findings": [asdict(f) for f in seen]}, indent=1))
        return EQUAL if able else CANNOT_RUN
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console(highlight=False)
    style = {OK: "green", OPTIONAL: "dim", MISSING: "red", WRONG: "red"}
    for f in seen:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True, min_width=max(map(len, style)))
        table.add_column(no_wrap=True, min_width=max(len(f.what) for f in seen))
        table.add_column(overflow="fold")
        remedy, *commands = f.remedy.splitlines() or [""]
        text = Text(f.saw)
        if remedy:
            text.append(f"\n-> {remedy}", style="cyan")
        table.add_row(Text(f.state, style=style[f.state]), f.what, text)
        console.print(table)
        for command in commands:  # never broken, so that it can be pasted
            console.print(f"    {command}", style="cyan", markup=False, soft_wrap=True)
    console.print(f"\n`epmoe` {'can' if able else 'cannot'} run here.", style="green" if able else "red")
    return EQUAL if able else CANNOT_RUN
