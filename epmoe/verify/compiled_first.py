"""Compiles the kernels of `verify --all` in advance, in parts that many processes share.

Otherwise, on a fresh machine, all ranks would wait while one of them compiles one kernel after another.
"""

import sys
from dataclasses import replace

from epmoe import routing
from epmoe.device import kernel_cache
from epmoe.expert_parallel import ExpertParallel
from epmoe.host import compiling
from epmoe.verify.checked_rounds import reduction
from epmoe.worlds.dry import DryWorld

DISPATCH, COMBINE = "dispatch", "combine"


def pieces(cases):
    """[(case, phase)] with all kernels of the cases. Dispatch does not depend on weights, nor combine on formats.

    The kernels that take longest to compile come first, so that none of them is left for the end.
    """
    found = {}
    for case in cases:
        no_format = replace(case.cfg, token_format="bf16", fuse_a_scale_preshuffle=False)
        found.setdefault((DISPATCH, case.fused, case.cfg), case)
        found.setdefault((COMBINE, case.fused, no_format, case.weights, case.epilogue), case)
    return sorted(
        ((case, phase) for (phase, *_), case in found.items()),
        key=lambda piece: (piece[1] == COMBINE, not piece[0].fused),
    )


def kernels_of(case, phase):
    """The kernels that one phase of a case launches on a rank."""
    world = DryWorld(case.cfg.n_ranks)
    routed = routing.make(case.cfg, 0)
    with ExpertParallel(case.cfg, world, fused=case.fused, kernels=case.kernels or "fast") as ep:
        d = ep.dispatch(routed.x[0], routed.topk_ids[0])
        launched = list(world.machine.kernels)
        if phase == COMBINE:
            y = routed.x[0].repeat(ep.capacity, axis=0)[: ep.capacity]
            ep.combine(y, d, **reduction(case, routed.topk_weights[0]))
            launched = [kernel for kernel in world.machine.kernels if kernel not in launched]
    return launched


def all_kernels(cases):
    """The kernels of all pieces, some of them more than once."""
    return [kernel for piece in pieces(cases) for kernel in kernels_of(*piece)]


def compile_part(cases, number, of, cc):
    """Compile every of-th piece, starting with the number-th (from 1), for a compute capability. Needs no GPU.

    Returns (kernels, how many of them the disk cache did not keep).
    """
    keys = set()
    for case, phase in pieces(cases)[number - 1 :: of]:
        for kernel in kernels_of(case, phase):
            kernel.binary(cc)
            keys.add(kernel.fingerprint(cc))
    return len(keys), sum(not kernel_cache.has(key) for key in keys)


def compile_all(args, cases, world):
    """Compile in advance the kernels that the disk cache lacks; collective. Returns the result of compiling.ahead."""
    return compiling.ahead(world, cases, lambda: all_kernels(cases), _command(args, world))


def _command(args, world):
    cc = "%d.%d" % world.machine.compute_capability
    words = f"--world local --ranks {world.n_ranks} --hidden {args.hidden} --seed {args.seed} --cc {cc}"
    words += f" --kernels {args.kernels}" if args.kernels else ""
    words += f" --p2p-world-size {args.p2p_world_size}" if args.p2p_world_size else ""
    words += f" --sample {args.sample}" if args.sample else ""
    words += " --part %d/%d" % args.part if args.part else ""
    return [sys.executable, "-m", "epmoe", "verify", "--all", *words.split(), "--json", "--compile"]
