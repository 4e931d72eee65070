"""The origin of a measurement: date, machine, versions, commit, for the files that a soak and the benchmarks write."""

import importlib.metadata as metadata
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import epmoe

PACKAGES = (
    "numpy",
    "ml_dtypes",
    "numba",
    "numba-cuda",
    "cuda-core",
    "cuda-bindings",
    "mpi4py",
    "greenlet",
    "torch",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13",
    "deep_ep",
)
CHECKOUT = Path(epmoe.__file__).parent.parent


def provenance(machine) -> dict:
    """Date (UTC), device, interpreter, versions and commit, for JSON. machine: a machine of the device layer."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": machine.describe(),
        "driver": None if epmoe.device.SIM else driver(),
        "host": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": commit(),
        "versions": {"epmoe": epmoe.__version__} | {name: v for name in PACKAGES if (v := installed(name))},
    }


def installed(package):
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def install(extra):
    """The command that installs an extra of this project: from the checkout if epmoe was imported from one."""
    if not (CHECKOUT / "setup.cfg").exists():
        return f"pip install 'epmoe[{extra}]'"
    where = "." if Path.cwd() == CHECKOUT else CHECKOUT
    return f"pip install -e '{where}[{extra}]'"


def commit(checkout=CHECKOUT):
    """The commit of the source, with "-changed" if files differ from it; None outside a checkout.

    An archive made by `git archive` has no .git, but a file with its commit.
    """
    if (checkout / ".git").exists():
        # describe --dirty would write the index of a repository that is not ours
        words = ["git", "--no-optional-locks", "-C", str(checkout), "status", "--porcelain=v2"]
        words += ["--branch", "--untracked-files=no"]
        try:
            said = subprocess.run(words, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        lines = said.stdout.splitlines()
        oid = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "(")
        changed = any(not line.startswith("#") for line in lines)
        return None if oid.startswith("(") else oid + "-changed" * changed
    try:
        said = (checkout / ".git_archival.txt").read_text().partition("commit: ")[2].strip()
    except OSError:
        return None
    return said if said and "$" not in said else None


def driver():
    """The NVIDIA driver's version, and the CUDA version that it supports."""
    from cuda.bindings import driver as cu

    from epmoe.device.gpu_driver import check

    number = check(cu.cuDriverGetVersion())
    try:
        with open("/proc/driver/nvidia/version") as f:
            name = next((word for word in f.readline().split() if word[:1].isdigit()), "")
    except OSError:
        name = ""
    return f"{name} (CUDA {number // 1000}.{number % 1000 // 10})".strip()
