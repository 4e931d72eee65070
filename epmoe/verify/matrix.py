"""`verify --all`: compares kernels and reference for every combination of options, at small sizes. Prints a table."""

import itertools
import json
import random
import sys
import time

from epmoe import device, routing
from epmoe.command_line import DIFFERS, EQUAL
from epmoe.device import kernel_cache
from epmoe.host.engine import kernels_named
from epmoe.progress import progress
from epmoe.verify import compiled_first
from epmoe.verify.checked_rounds import WEIGHTS, Case, rounds_of
from epmoe.verify.worlds import between
from epmoe_ref.config import TOKEN_FORMATS, EPConfig
from epmoe_ref.errors import EPError, EPValueError, UnavailableError

CAPABILITY = (9, 0)  # of the GPU for which --compile compiles, unless --cc names another
FORMATS = (*((name, False) for name in TOKEN_FORMATS), ("mxfp4_rows", True))  # True: scales in the slot layout
# N_RANKS: without --ranks and without mpirun
N_RANKS, EXPERTS_PER_RANK, TOP_K, TOKENS, ROUNDS = 2, 2, 2, 5, 2


def cases(n_ranks, hidden, p2p_world_size=None, kernels=None):
    """Every valid combination. Unreduced output has neither shared expert nor epilogue.

    p2p_world_size: for configurations with SHMEM between p2p worlds; None: one p2p world. kernels: as in a Case.
    """
    for (name, preshuffle), fused, shared, skip, weights, epilogue in itertools.product(
        FORMATS, (False, True), (False, True), (False, True), WEIGHTS, (False, True)
    ):
        if weights == "none" and (shared or epilogue):
            continue
        cfg = EPConfig(
            n_ranks,
            n_ranks * EXPERTS_PER_RANK,
            TOP_K,
            hidden,
            TOKENS,
            token_format=name,
            fuse_a_scale_preshuffle=preshuffle,
            fused_shared_expert=shared,
            skip_a2a=skip,
            allreduce_world_size=n_ranks if skip else 1,
            **between(p2p_world_size, skip),
        )
        yield Case(cfg, weights, epilogue, fused, ROUNDS, kernels=kernels)


def check(case, seed, world, timeout=30.0):
    """Verify one case. Returns None if every byte agrees, else the error as text."""
    try:
        batches = [routing.make(case.cfg, [seed, n]) for n in range(case.rounds)]
        for r in rounds_of(case, world, batches, seed=seed, timeout=timeout):
            if r.differences:
                return f"round {r.number}: {r.differences[0]}"
    except EPError as error:
        if not world.lists:
            raise  # the other ranks do not know about it, and cannot continue with the next case
        return f"{type(error).__name__}: {error}"
    return None


def compile_part(args):
    """Compile a part of the kernels of the matrix. The exit status is 0."""
    if device.SIM:
        raise UnavailableError("--compile needs the compiler for GPUs: set EPMOE_DEVICE=gpu")
    # nvshmem4py imports torch if there is one, which takes longer than compiling a kernel
    sys.modules.setdefault("torch", None)
    folder = kernel_cache.folder()
    if folder is None:
        raise UnavailableError(
            "--compile needs the disk cache, and there is none: unset EPMOE_CACHE, or "
            "name a folder of yours that can be written in EPMOE_CACHE_DIR"
        )
    kernels, lost = compiled_first.compile_part(
        _chosen(args, args.ranks or N_RANKS), *args.compile, args.cc or CAPABILITY
    )
    if lost:
        raise UnavailableError(f"{lost} of {kernels} kernels could not be stored in {folder}: is the disk full?")
    if not args.json:
        print(f"{kernels} kernels in {folder}")
    return EQUAL


def _chosen(args, n_ranks):
    chosen = list(cases(n_ranks, args.hidden, args.p2p_world_size, args.kernels))
    if args.sample:
        chosen = random.Random(args.seed).sample(chosen, min(args.sample, len(chosen)))
    if args.part:
        number, of = args.part
        chosen = chosen[number - 1 :: of]
    if not chosen:
        raise EPValueError(f"--part {number}/{of}: no case is in this part, so nothing would be compared")
    return chosen


def walk(args, console, worlds):
    """Run the matrix with a progress bar, and print a table or JSON. The exit status is 0 if all cases passed."""
    start = time.perf_counter()
    n_ranks = args.ranks or (worlds.n_ranks if worlds.mpi else N_RANKS)
    if not device.SIM:  # compile in advance exactly the kernels that this GPU will run
        args.kernels = kernels_named(args.kernels, worlds.make(n_ranks, args.seed).machine)
    chosen = _chosen(args, n_ranks)
    if not device.SIM:
        kernels, compiled, n = compiled_first.compile_all(args, chosen, worlds.make(n_ranks, args.seed))
        if not args.json:
            spent = time.perf_counter() - start
            console.print(f"{kernels} kernels: {compiled} compiled by {n} processes, in {spent:.0f} s", style="dim")
    results = []
    with progress(console, "cases", len(chosen), hidden=args.json or not worlds.prints) as shown:
        for case in chosen:
            results.append((case, check(case, args.seed, worlds.make(n_ranks, args.seed), args.timeout)))
            shown.advance()
    failed = [(case, what) for case, what in results if what]
    seconds = time.perf_counter() - start
    if not args.json:
        _show(console, n_ranks, args.hidden, results, failed, seconds)
    elif worlds.prints:
        records = [{"case": str(case), "difference": what} for case, what in results]
        record = {"passed": not failed, "seconds": round(seconds, 3), "cases": records}
        print(json.dumps(record, indent=1))
    return DIFFERS if failed else EQUAL


def _show(console, n_ranks, hidden, results, failed, seconds):
    from rich.table import Table
    from rich.text import Text

    kernels = f"{results[0][0].kernels} kernels, " if results[0][0].kernels else ""
    console.print(
        f"[bold]epmoe verify --all[/bold]  {kernels}{n_ranks} ranks x {EXPERTS_PER_RANK} experts, top-{TOP_K}, hidden "
        f"{hidden}, {ROUNDS} rounds a case"
    )
    console.print(
        "Cases that equal the reference bit for bit, of all with these options. The others (router weights "
        "as array, function or none; epilogue or not; shared expert or not) are inside each number.",
        style="dim",
    )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    kinds = [(fused, skip) for skip in (False, True) for fused in (False, True)]
    table.add_column("format", style="bold")
    for fused, skip in kinds:
        table.add_column(("fused" if fused else "split") + (", skip_a2a" if skip else ", a2a"), justify="right")
    for name, preshuffle in FORMATS:
        cells = []
        for fused, skip in kinds:
            of = [
                what
                for case, what in results
                if (case.fused, case.cfg.skip_a2a) == (fused, skip)
                and (case.cfg.token_format, case.cfg.fuse_a_scale_preshuffle) == (name, preshuffle)
            ]
            good = sum(what is None for what in of)
            style = "dim" if not of else "green" if good == len(of) else "red"
            cells.append(Text(f"{good} of {len(of)}" if of else "-", style=style))
        table.add_row(name + (" slots" if preshuffle else ""), *cells)
    console.print(table)
    for case, what in failed[:5]:
        console.print(f"\n{case}\n  {what}", style="red", markup=False, soft_wrap=True)
    of = "1 case" if len(results) == 1 else f"{len(results)} cases"
    if failed:
        console.print(f"\n[bold red]FAIL[/bold red]  {len(failed)} of {of} differ, {seconds:.0f} s")
    else:
        console.print(f"\n[bold green]PASS[/bold green]  {of} in {seconds:.0f} s")
