"""Where a number comes from: date, machine and versions, for the files that a soak and the benchmarks write."""

import importlib.metadata as metadata
import platform
from datetime import datetime, timezone

import epmoe

PACKAGES = ("numpy", "ml_dtypes", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "mpi4py", "greenlet")


def provenance(machine) -> dict:
    """Date (UTC), device, interpreter and versions, ready for JSON. machine: a machine of the device layer."""
    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "device": machine.describe(),
            "driver": None if machine.is_simulator else driver(),
            "host": f"{platform.system()} {platform.machine()}", "python": platform.python_version(),
            "versions": {"epmoe": epmoe.__version__} | {name: v for name in PACKAGES if (v := installed(name))}}


def installed(package):
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver():
    """The NVIDIA driver as it names itself, and the CUDA version that it supports."""
    from cuda.bindings import driver as cu

    from epmoe.device.gpu_machine import check

    number = check(cu.cuDriverGetVersion())
    try:
        with open("/proc/driver/nvidia/version") as f:
            name = next((word for word in f.readline().split() if word[:1].isdigit()), "")
    except OSError:
        name = ""
    return f"{name} (CUDA {number // 1000}.{number % 1000 // 10})".strip()
