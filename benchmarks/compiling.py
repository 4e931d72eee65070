"""`python -m benchmarks compile`: compiles the kernels of a run into the disk cache, with a process for each core.

On a fresh machine compiling would take longer than measuring. A run does this first, by itself.
"""

import sys
import time

from benchmarks import plan
from epmoe import device
from epmoe.command_line import at_least_one, part_of_all
from epmoe.fused_a2a.launches import smaller_blocks
from epmoe.host import compiling
from epmoe.kernels.rows.shape import NO_LIMIT, TUNING
from epmoe.worlds.dry import DryWorld


def add_arguments(parser):
    """Add the options of compile."""
    plan.add_arguments(parser)
    parser.add_argument("--ranks", type=at_least_one, default=4, help="of the run (default 4)")
    parser.add_argument(
        "--part", type=part_of_all, default="1/1", metavar="I/N", help="this process's part of the cases (default all)"
    )
    parser.add_argument(
        "--on",
        default="9.0/132",
        metavar="X.Y/SMS",
        help="the GPU's compute capability and number of multiprocessors (default 9.0/132)",
    )


def run(args):
    """Compile. Needs no GPU. The exit status is 0, or 2 in the simulator."""
    if device.SIM:
        print("benchmarks compile: needs the compiler for GPUs: set EPMOE_DEVICE=gpu", file=sys.stderr)
        return 2
    i, n = args.part
    cc, n_sms = args.on.split("/")
    cc = tuple(int(word) for word in cc.split("."))
    for case in distinct(plan.cases(args), args.ranks)[i - 1 :: n]:
        for kernel in kernels_of(case, args.ranks, int(n_sms)):
            kernel.binary(cc)
    return 0


def kernels_of(case, n_ranks, n_sms):
    """The kernels that a case launches on one of n_ranks ranks."""
    world = DryWorld(n_ranks, n_sms)
    contender = case.make(world)
    for phase in contender.phases:
        contender.launch(phase)
    contender.close()
    return list(world.machine.kernels)


def distinct(cases, n_ranks):
    """Our cases whose kernels differ on n_ranks ranks. Routing makes no difference; SMs only if block sizes differ."""
    found = {}
    for case in cases:
        if case.section not in plan.OURS:
            continue
        s = case.shape
        tokens = s.tokens
        if not case.kernels.startswith("pairs"):
            of_all = tokens if case.sms is None else min(tokens, TUNING.many[0] - 1)
            is_small = tokens <= TUNING.most_small(n_ranks, case.sms or NO_LIMIT)
            by_expert = (tokens <= TUNING.few_to_expand[0], is_small, of_all >= TUNING.many_to_expand[0])
            by_rank = smaller_blocks(TUNING, of_all, is_small), is_small
            tokens = by_rank if case.kernels.startswith("rows") else by_expert
        key = case.kernels, tokens, s.hidden, s.experts, s.top_k, s.format
        found.setdefault(key, case)
    return list(found.values())


def everything(world, args, cases):
    """Compile in advance the kernels that the cases need and the disk cache lacks: (processes, seconds); collective."""
    start, n_ranks, n_sms = time.perf_counter(), world.n_ranks, world.machine.all_sms
    on = "%d.%d/%d" % (*world.machine.compute_capability, n_sms)
    words = ["--ranks", str(n_ranks), "--on", on, *plan.as_words(args)]
    _, _, n = compiling.ahead(
        world,
        words,
        lambda: (kernel for case in distinct(cases, n_ranks) for kernel in kernels_of(case, n_ranks, n_sms)),
        [sys.executable, "-m", "benchmarks", "compile", *words, "--part"],
    )
    return n, time.perf_counter() - start
