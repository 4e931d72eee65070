"""`python -m benchmarks`: every contender at every shape; a table from rank 0, and a file."""

import argparse
import sys

from epmoe import device
from epmoe.provenance import provenance
from epmoe_ref.errors import EPError

from benchmarks import link, measure, results, shapes, table, worlds
from benchmarks.startline import StartLine

REFUSALS = (EPError, ImportError, ValueError, RuntimeError)
AGAINST = ("nccl", "deepep")
KERNELS = ("fused", "split", "rows", "expert-major")


def add_arguments(parser):
    """The options of run."""
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE",
                        help="TOKENSxHIDDEN/EXPERTS[/TOP_K][:FORMAT][:ROUTING], formats bf16 and fp8, routings uniform "
                             "and zipf (default: all that peers publish)")
    parser.add_argument("--quick", action="store_true", help="four shapes")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS),
                        help="which of ours: the page kernels fused or split, fused_a2a's rows or expert-major "
                        "(default all)")
    parser.add_argument("--against", nargs="+", choices=AGAINST, default=[], help="other libraries, in the same run")
    parser.add_argument("--iterations", type=int, default=50, metavar="N", help="timed iterations (default 50)")
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True,
                        help="also as CUDA graphs (default)")
    parser.add_argument("--sms", type=int, nargs="+", metavar="N", help="our kernels with at most so many SMs")
    parser.add_argument("--ranks", type=int, default=4, help="virtual ranks without mpirun (default 4)")
    parser.add_argument("--json", metavar="FILE",
                        help="file of results (default: benchmarks/results/DATE-...; '-' none)")


def run(args):
    """Measure; the exit status is 0, or 2 if it cannot be run."""
    try:
        chosen = [shapes.parse(s) for s in args.shapes] if args.shapes else (
            shapes.quick() if args.quick else shapes.anchors())
        if args.iterations < 1:
            raise ValueError(f"--iterations {args.iterations} must be at least 1")
        world = worlds.make(args.ranks)
    except (ValueError, EPError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    speaks = world.ranks[0] == 0
    say = print if speaks else (lambda *words, **_: None)
    record = measured(args, world, chosen, say)
    if speaks:
        if args.json != "-":
            print(f"written: {results.write(record, args.json)}")
    return 0


def measured(args, world, chosen, say):
    """The record of a run: provenance, link and rows."""
    record = provenance(world.machine) | {"n_ranks": world.n_ranks, "world": type(world).__name__, "rows": [],
                                          "not_run": []}
    line = StartLine(world)
    record["link_gbps"] = gbps = float(f"{link.peer_write_gbps(world, line):.4g}")
    say(f"{record['device']}; {world.n_ranks} ranks ({record['world']}); epmoe {record['versions']['epmoe']}, "
        f"numba-cuda {record['versions'].get('numba-cuda')}; {record['date']}")
    say(f"peer write, all ranks at once: {gbps} GB/s a rank. Times: slowest rank, median, 20th and 80th percentile of "
        f"{args.iterations} iterations, microseconds")
    for shape in chosen:
        for name, make in contenders(args, world):
            for found in of_contender(args, line, make, shape, gbps):
                if isinstance(found, Exception):
                    why = f"{type(found).__name__}: {found}"
                    record["not_run"].append({"kernels": name, "shape": str(shape), "why": why})
                    say(f"not run: {name} at {shape}: {why}", flush=True)
                    continue
                record["rows"].append(found.asdict())
                say(f"  {found.kernels:14} {found.phase:9} {str(shape):26} {'graph' if found.graph else '':5} "
                    f"{found.us:10.1f} us  floor {found.floor_us:8.1f}", flush=True)
    say()
    say(table.table(record["rows"]))
    return record


def of_contender(args, line, make, shape, gbps):
    """Rows of one contender at one shape, launched and as graphs; in place of what could not be run, why: an error."""
    try:
        contender = make(shape)
    except REFUSALS as error:
        yield error
        return
    try:
        yield from measure.rows(contender, line, args.iterations, gbps)
        if args.graph and not device.SIM and getattr(contender, "capturable", True):
            from benchmarks.graph import Captured

            captured = Captured(contender)
            yield from measure.rows(captured, line, args.iterations, gbps)
            captured.close()
    except REFUSALS as error:
        yield error
    finally:
        contender.close()


def contenders(args, world):
    """(name, function shape -> contender) of everything that the options ask for."""
    from benchmarks.pairs import Pairs
    from benchmarks.rows import Hybrid, Rows

    for kernels in [k for k in args.kernels if k in ("fused", "split")]:
        for n_sms in args.sms or [None]:
            yield f"pairs {kernels}", lambda shape, f=kernels == "fused", n=n_sms: Pairs(world, shape, fused=f, n_sms=n)
    for kind in (Rows, Hybrid):
        if kind.name in args.kernels:
            for n_sms in args.sms or [None]:
                yield kind.name, lambda shape, kind=kind, n=n_sms: kind(world, shape, n_sms=n)
    if "nccl" in args.against:
        from benchmarks.nccl import Nccl

        yield "nccl", lambda shape: Nccl(world, shape)
    if "deepep" in args.against:
        from benchmarks import deepep

        yield from ((kind.__name__, lambda shape, kind=kind: kind(world, shape)) for kind in deepep.KINDS)
