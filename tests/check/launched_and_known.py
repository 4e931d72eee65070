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
    # only a batch that is larger than any before is sent again
    assert set(launched) | {k for k in known if k.name == "rows_resend"} == set(known), (
        sorted(k.name for k in launched),
        sorted(k.name for k in known),
    )
    print(f"{name}:{only}: {len(known)} kernels\n", end="", flush=True)
