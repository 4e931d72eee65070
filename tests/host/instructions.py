"""How many instructions calls run: `python tests/host/instructions.py [NAME ...]` steps through the benchmark's calls.

Unlike microseconds they are the same on a busy machine. Each instruction of a process of its own is stepped through and
counted (ptrace, on Linux, about 15 us each), after rounds enough that all calls are known; the driver does nothing.
"""

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

os.environ["EPMOE_DEVICE"] = "gpu"
sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from counted_driver import counted_machine  # noqa: E402
from host_cost import OneRankHere, without_python  # noqa: E402

from benchmarks.pairs import Pairs  # noqa: E402
from benchmarks.rows import Hybrid, Rows  # noqa: E402
from benchmarks.shapes import parse  # noqa: E402
from epmoe.device import forks  # noqa: E402

TRACE_ME, CONTINUE, STEP = 0, 7, 9  # requests of ptrace
KNOWN_AFTER, COUNTED = 12, 5  # rounds
CONTENDERS = {
    "pairs fused": lambda world: Pairs(world, parse("4x128/16"), kind="fused"),
    "pairs split": lambda world: Pairs(world, parse("4x128/16"), kind="split"),
    "rows": lambda world: Rows(world, parse("4x128/16")),
    "rows FP8": lambda world: Rows(world, parse("4x128/16:fp8")),
    "expert-major": lambda world: Hybrid(world, parse("4x128/16")),
}

_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.argtypes = ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p
_ptrace.restype = ctypes.c_long


def instructions(function, arguments):
    """[median number of instructions of function(argument) for each], called in turn in a copy of this process."""
    forks._made.clear()  # the copy may use the world
    child = os.fork()
    if child == 0:
        try:
            _in_turn(function, arguments)
        finally:
            os._exit(0)
    spans, n, inside = [], 0, False
    while True:
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            break
        stopped_by, passed_on = os.WSTOPSIG(status), None
        if stopped_by == signal.SIGSTOP:
            if inside:
                spans.append(n)
            inside, n = not inside, 0
        elif stopped_by == signal.SIGTRAP:
            n += 1
        else:
            passed_on = stopped_by
        _ptrace(STEP if inside else CONTINUE, child, None, passed_on)
    every = 1 + len(arguments)
    if len(spans) != every * COUNTED:
        raise RuntimeError(f"{len(spans)} of {every * COUNTED} calls were counted: may this process be traced?")
    around, *counted = [sorted(spans[i::every])[COUNTED // 2] for i in range(every)]
    return [n - around for n in counted]


def _nothing(_):
    pass


def _in_turn(function, arguments):
    _ptrace(TRACE_ME, 0, None, None)
    kill, stop, me = os.kill, signal.SIGSTOP, os.getpid()
    for _ in range(COUNTED):
        kill(me, stop)
        _nothing(None)
        kill(me, stop)
        for argument in arguments:
            kill(me, stop)
            function(argument)
            kill(me, stop)


def count(name):
    """Print the numbers of one contender."""
    machine, driver = counted_machine(2, 0)
    without_python(driver)
    contender = CONTENDERS[name](OneRankHere(machine, 2))
    for _ in range(KNOWN_AFTER):
        for phase in contender.phases:
            contender.launch(phase)
    gc.collect()
    gc.disable()
    counted = zip(contender.phases, instructions(contender.launch, contender.phases))
    gc.enable()
    print(f"{name:14}", "  ".join(f"{phase} {n:,}" for phase, n in counted), flush=True)


def main(wanted):
    for name in wanted or CONTENDERS:
        count(name)
        gc.collect()  # the contender ends while its driver is the one in use


if __name__ == "__main__":
    main(sys.argv[1:])
