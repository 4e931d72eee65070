"""Compiles the kernels of this project that a check needs, before its ranks wait for each other.

`EPMOE_DEVICE=gpu python -m epmoe.check.compiled_first NAMES RANKS ONLY X.Y I/N` compiles every Nth of them, starting
with the Ith, into the disk cache, for compute capability X.Y. NAMES are implementations, separated by commas. ONLY is
as in `check`. It needs no GPU.
"""

import sys

import ml_dtypes
import numpy as np

from epmoe import LocalWorld, MPIWorld, device
from epmoe.check.cases import epilogue, epilogue_args
from epmoe.check.conformance import all_cases, chosen
from epmoe.check.implementation import HybridImplementation, Implementation, load
from epmoe.fused_a2a import init_hybrid_ep_buffer
from epmoe.host import compiling
from epmoe.host.engine import kernels_named
from epmoe.worlds.dry import DryWorld

BF16 = np.dtype(ml_dtypes.bfloat16)


def compile_all(names, only, n_ranks=None):
    """Compile the kernels that these implementations of adapters.over_mpi need and the disk cache lacks.

    n_ranks: for a world in this process; its ranks launch the same kernels. Collective. Does nothing in the simulator or
    for plain kernels, which Numba compiles when they are launched.
    """
    if device.SIM:
        return
    world = MPIWorld() if n_ranks is None else LocalWorld(n_ranks)
    if kernels_named(None, world.machine) == "plain":
        names = [name for name in names if not issubclass(load(name), Implementation)]
    words = ",".join(names), str(world.n_ranks), only
    compiling.ahead(
        world,
        words,
        lambda: kernels_of(*words),
        [sys.executable, "-m", __name__, *words, "%d.%d" % world.machine.compute_capability],
    )


def kernels_of(names, n_ranks, only):
    """All kernels, once each, always in the same order. The arguments are words of the command line."""
    found = {}
    for name in names.split(","):
        implementation = load(name)
        for case, not_served, _ in chosen(all_cases(implementation, int(n_ranks)), only):
            if not not_served:
                world = DryWorld(int(n_ranks))
                world.shmem = False  # as in an MPIWorld
                _run(_over(world, implementation), case)
                found |= world.machine.kernels
    return list(found)


def _over(world, implementation):
    class Dry(implementation):
        kernels = "fast"

        def new_world(self, per_rank):
            return world

    Dry.world = world
    return Dry


def _run(implementation, case):
    """Make every call of a case on rank 0 of a world where nothing runs. Results are zeros, and experts return them."""
    if issubclass(implementation, Implementation):
        called, calls = implementation.make(case.cfg), _call_experts
    else:
        called = implementation.make()
        calls = _call_hybrid if issubclass(implementation, HybridImplementation) else _call_rows
    for round_ in range(case.rounds):
        calls(called, case, round_)
    called.close()


def _call_experts(called, case, round_):
    weights = case.router_weights(round_)
    scale = {} if case.input_scale is None else {"input_scale": case.input_scale[0]}
    options = {}
    if case.epilogue:
        options = dict(epilogue=epilogue, epilogue_args=tuple(of_all[0] for of_all in epilogue_args(case.cfg.n_ranks)))
    d = called.dispatch(case.input_tokens(round_)[0], case.topk_ids(round_)[0], **scale)
    y = case.shared_outputs(round_, 0, len(d.output_tokens))  # of the right shape and type
    called.combine(y, d, None if weights is None else weights[0], **options)


def _call_rows(called, case, round_):
    x = case.x(round_)[0]
    _, _, probs, _, handle = called.dispatch(
        x, case.token_indices(round_)[0], case.token_probs(round_)[0], case.n_experts
    )
    x = np.zeros((len(x[0]), case.hidden), BF16) if case.dtype == "fp8" else x
    _send_back(called, x, np.zeros((len(probs), case.hidden), x.dtype), probs, handle)


def _call_hybrid(called, case, round_):
    x, probs = case.x(round_)[0], case.probs(round_)
    if round_:  # the ranks' tokens are known, but were not exchanged here
        fp8 = case.options.get("fp8_dispatch", False)
        init_hybrid_ep_buffer(called.world, case.hidden, max(1, *case.batch(round_)), case.n_local_experts, 24, 24, fp8)
    rows, probs, _, _, handle = called.dispatch(
        x, case.routing_map(round_)[0], None if probs is None else probs[0], case.n_local_experts, **case.options
    )
    _send_back(called, x, np.zeros(rows.shape, x.dtype), probs, handle)


def _send_back(called, x, rows, probs, handle):
    """Combine, and both gradients."""
    called.combine(rows, handle)
    called.dispatch_backward(rows, probs, handle)
    called.combine_backward(x, handle)


USAGE = """epmoe.check.compiled_first NAMES RANKS ONLY CAPABILITY PART, all five: mpi_rows,mpi_hybrid 4 "" 9.0 1/8
(ONLY: a part of the names of cases, "" for all)"""

if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(f"{len(sys.argv) - 1} arguments: give {USAGE}")
    *which, capability, part = sys.argv[1:]
    sys.modules.setdefault("torch", None)  # importing it takes longer than compiling a kernel
    number, of = map(int, part.split("/"))
    for kernel in kernels_of(*which)[number - 1 :: of]:
        kernel.binary(tuple(map(int, capability.split("."))))
