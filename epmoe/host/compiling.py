"""Compiles kernels into the disk cache in many processes, before ranks wait for each other."""

import contextlib
import os
import subprocess
import time

from epmoe import device
from epmoe.device import kernel_cache

MOST_PROCESSES = 64
TIMEOUT_S = 240


def ahead(world, run, kernels, command):
    """Compile the kernels that the disk cache lacks: each host's first rank, while the others wait; collective.

    run: identifies the set of kernels. kernels(): all of them, for any rank. command: the command line of a process
    that compiles its part; "i/n" is appended, i from 1. Returns numbers of the host of rank 0: (kernels, compiled ones,
    processes that compiled them). Does nothing in the simulator.
    """
    counts = 0, 0, 0
    if not device.SIM and (world.lists or world.host.Get_rank() == 0):
        cc = world.machine.compute_capability
        keys = kernel_cache.keys_of((run, cc), lambda: list({k.fingerprint(cc) for k in kernels()}))
        missing = sum(not kernel_cache.has(key) for key in keys)
        n = min(MOST_PROCESSES, max(1, os.cpu_count() - world.n_ranks), missing) if kernel_cache.folder() else 0
        run_together([[*command, f"{i}/{n}"] for i in range(1, n + 1)])
        counts = len(keys), missing if n else 0, n
    return world.tell(counts, TIMEOUT_S + 60)[0]


def run_together(commands):
    """Run these commands at the same time. A rank later compiles any kernel that they could not.

    They use the device layer's GPU side but open no GPU, since GPU contexts are created one after another.
    """
    how = dict(env=os.environ | {"EPMOE_DEVICE": "gpu"}, preexec_fn=_on_all_cores)
    running = [subprocess.Popen(command, **how) for command in commands]
    deadline = time.monotonic() + TIMEOUT_S
    for process in running:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _on_all_cores():
    """Use all cores: mpirun may have bound this rank to one, and its child processes would share it."""
    with contextlib.suppress(AttributeError, OSError):  # not on macOS
        os.sched_setaffinity(0, range(os.cpu_count()))
