"""The kernels of `verify --all` compiled beforehand, in pieces that many processes share.

On a fresh machine the ranks would otherwise wait for one of them to compile, a kernel at a time.
"""

import sys
from dataclasses import replace

from epmoe import compiling, routing
from epmoe.checked_rounds import reduction
from epmoe.expert_parallel import ExpertParallel
from epmoe.worlds.dry import DryWorld

DISPATCH, COMBINE = "dispatch", "combine"


def pieces(cases):
    """[(case, phase)] with all kernels of the cases: dispatch knows nothing of weights, nor combine of formats.

    The longest to compile come first, so that no process is left with one of them at the end.
    """
    found = {}
    for case in cases:
        no_format = replace(case.cfg, token_format="bf16", fuse_a_scale_preshuffle=False)
        found.setdefault((DISPATCH, case.fused, case.cfg), case)
        found.setdefault((COMBINE, case.fused, no_format, case.weights, case.epilogue), case)
    return sorted(((case, phase) for (phase, *_), case in found.items()),
                  key=lambda piece: (piece[1] == COMBINE, not piece[0].fused))


def kernels_of(case, phase, n_sms):
    """The kernels that one phase of a case launches on a rank."""
    world = DryWorld(case.cfg.n_ranks, n_sms)
    routed = routing.make(case.cfg, 0)
    with ExpertParallel(case.cfg, world, fused=case.fused) as ep:
        d = ep.dispatch(routed.x[0], routed.topk_ids[0])
        launched = list(world.machine.kernels)
        if phase == COMBINE:
            y = routed.x[0].repeat(ep.capacity, axis=0)[:ep.capacity]
            ep.combine(y, d, **reduction(case, routed, lambda of_all: of_all[0]))
            launched = [kernel for kernel in world.machine.kernels if kernel not in launched]
    return launched


def compile_part(cases, number, of, n_sms):
    """Compile every of-th piece, from the number-th (from 1) on, for the current GPU, which has n_sms multiprocessors."""
    for case, phase in pieces(cases)[number - 1::of]:
        for kernel in kernels_of(case, phase, n_sms):
            kernel.binary()


def compile_on_any_gpu(cases, number, of):
    """compile_part in a process that is no rank; the processes share the GPUs out."""
    from numba import cuda

    cuda.select_device(number % len(cuda.gpus))
    compile_part(cases, number, of, cuda.current_context().device.MULTIPROCESSOR_COUNT)


def compile_all(args, cases, world):
    """Compile the cases' kernels, on each host from its first rank, while the others wait: how many processes did."""
    n = 0
    if world.host.Get_rank() == 0:
        n = compiling.number_of_processes(world, len(pieces(cases)))
        compiling.run_together([[*_command(args, world), "--compile", f"{i + 1}/{n}"] for i in range(n)])
    return max(world.tell(n, compiling.TIMEOUT_S + 60))


def _command(args, world):
    words = [sys.executable, "-m", "epmoe", "verify", "--all", "--world", "local", "--ranks", world.n_ranks,
             "--hidden", args.hidden, "--seed", args.seed]
    words += ["--p2p-world-size", args.p2p_world_size] if args.p2p_world_size else []
    words += ["--sample", args.sample] if args.sample else []
    words += ["--part", "%d/%d" % args.part] if args.part else []
    return [str(word) for word in words]
