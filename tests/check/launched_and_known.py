"""One rank of a check over MPI, in the simulator: it compares launched kernels with those that would be compiled first."""

import sys

from epmoe import device
from epmoe.check import check, compiled_first
from epmoe.check.adapters.kernels import Kernels
from epmoe.check.implementation import load

Kernels.kernels = "fast"  # as on the GPUs for which kernels are compiled first
launched, launch = {}, device.machine.launch


def noted(machine, kernel, *arguments, **options):
    launched[kernel] = None
    return launch(machine, kernel, *arguments, **options)


device.machine.launch = noted
for name, only in (words.split(":") for words in sys.argv[1:]):
    launched.clear()
    report = check(load(name), only=only)
    assert report.run and report.passed, str(report)
    known = compiled_first.kernels_of(name, str(report.n_ranks), only)
    # rows are moved where earlier results are in use: here until the round ends, as they are views of the pool
    launched = {kernel: None for kernel in launched if kernel.name != "rows_move"}
    assert set(launched) == set(known), [sorted(k.name for k in kernels) for kernels in (launched, known)]
    print(f"{name}:{only}: {len(known)} kernels\n", end="", flush=True)
