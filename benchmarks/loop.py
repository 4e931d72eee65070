"""`python -m benchmarks loop`: what a pair of dispatch and combine costs its caller, back to back, host included.

Device times say how fast kernels are, but a model waits for the slower of host and device. Each contender runs a loop
of pairs with identity experts in between, and the wall clock is read when the device has ended. Arrays are made before
the clock starts. same: every pair gets the same ones. new: every pair gets arrays at other addresses than the 2,000
before. layers: 8 pairs, each with the tokens that the one before returned; results (and autograd's graph) are kept until
all 8 have run. graph: a CUDA graph of 128 chained pairs, replayed. us are per pair everywhere. A loop that ran on a slow
CPU is repeated, see fast_cpu.py; if at least three were fast, they alone count.
"""

import contextlib
import statistics
import sys
import time
from functools import partial

from benchmarks import loop_contenders, measure, results, shapes, table, torch_peer, worlds
from benchmarks.fast_cpu import FastCpu
from benchmarks.measure import Refused, together
from epmoe import device
from epmoe.command_line import at_least_one
from epmoe.provenance import provenance
from epmoe_ref.errors import EPError

LAYERS = 8
CHAIN = 128  # pairs of a graph
GRAPH_TOKENS = 128  # at most, because results of captured calls stay allocated
ARRAYS = ("same", "new", "layers", "graph")
REPEATS = 5  # of a loop on fast CPUs; the median counts
ENOUGH = 3  # of them, if there are not more within PATIENCE
PATIENCE = 2.0  # seconds
SECONDS = 0.15  # of one loop, approximately
MOST_PAIRS = 400
SIZES = "tokens", "hidden", "experts", "top_k"
COLUMNS = (
    ("kernels", "<", "interface"),
    ("arrays", "<", "arrays"),
    ("tokens", ">", "tokens"),
    ("us", ">", "us a pair"),
    ("p20_us", ">", "p20"),
    ("p80_us", ">", "p80"),
    ("piece_us", ">", "piece us"),
    ("slow", ">", "slow loops"),
)


def add_arguments(parser):
    """Add the options of loop."""
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help="TOKENSxHIDDEN/EXPERTS[/TOP_K] (default: 1, 128 and 4096 tokens of 7168/256)",
    )
    parser.add_argument(
        "--only",
        metavar="NAME,...",
        type=lambda text: text.split(","),
        help=f"contenders whose names contain one of these words; there are: {', '.join(loop_contenders.names())}",
    )
    parser.add_argument(
        "--against",
        nargs="+",
        choices=sorted(loop_contenders.PEERS),
        default=[],
        help="other libraries, in the same run",
    )
    parser.add_argument(
        "--pairs",
        type=at_least_one,
        metavar="N",
        help=f"pairs of a loop (default: as many as take {SECONDS} s, at most {MOST_PAIRS})",
    )
    parser.add_argument("--ranks", type=at_least_one, default=4, help="virtual ranks without mpirun (default 4)")
    parser.add_argument(
        "--json", metavar="FILE", help="file of results (default: benchmarks/results/DATE-...; '-' none)"
    )


def run(args):
    """Measure. The exit status is 0, or 2 if nothing can be measured."""
    try:
        if device.SIM and args.shapes is None:
            raise ValueError(
                "there is no GPU, and the simulator's times mean nothing: `--shapes 3x64/4/2 --pairs 2 "
                "--json -` tries this program"
            )
        chosen = [shapes.parse(s) for s in args.shapes or shapes.OF_LOOP]
        world = worlds.make(args.ranks)
    except (ValueError, EPError) as error:
        print(f"benchmarks loop: {error}", file=sys.stderr)
        return 2
    record = provenance(world.machine) | {
        "n_ranks": world.n_ranks,
        "world": type(world).__name__,
        "command": sys.argv[1:],
        "rows": [],
        "not_run": [],
        "loop": [],
    }
    speaks = world.ranks[0] == 0
    file = results.path(record, args.json) if speaks and args.json != "-" else None
    kinds = loop_contenders.chosen(args.only, args.against)
    say = partial(print, flush=True) if speaks else lambda line: None

    def write():  # after each row, so that an interrupted run keeps its measurements
        if file and record["loop"]:
            refused = {(one["kernels"], one["shape"]) for one in record["not_run"]}
            measured = {(row["kernels"], *(row[size] for size in SIZES)) for row in record["loop"]}
            later = [
                _not_run(kind, shape, "the run ended before")
                for shape in chosen
                for kind in kinds
                if (kind.name, str(shape)) not in refused
                and (kind.name, *(getattr(shape, size) for size in SIZES)) not in measured
            ]
            results.write(record | {"not_run": record["not_run"] + later}, file)

    for shape in chosen:
        measure_all(world, [shape], args.against, record, say, write, args.only, args.pairs)
        write()
    torch_peer.leave()
    if not record["loop"]:
        return 2
    if speaks:
        print("", table.text(COLUMNS, record["loop"]), sep="\n")
        if file:
            print(f"written: {file}")
    return 0


def _not_run(kind, shape, why):
    return {"kernels": kind.name, "shape": str(shape), "sms": None, "why": why}


def measure_all(world, chosen, against, record, say, write, words=None, n_pairs=None):
    """Every contender at every shape into record["loop"], or into record["not_run"] if it cannot run; collective.

    write: called after each measured row.
    """
    cpu = FastCpu(world.ranks[0] if not world.lists else 0, 1 if world.lists else world.n_ranks)
    for shape in chosen:
        for kind in loop_contenders.chosen(words, against):
            made = []
            cpu.spread(together=kind.has_backward)
            try:
                together(world, lambda: made.append(kind(world, shape)))
                for arrays in ARRAYS:
                    if _applies(made[0], arrays):
                        row = _row(world, made[0], arrays, n_pairs, cpu)
                        record["loop"].append(row)
                        say(f"{row['kernels']:40} {arrays:7} {shape.tokens:5} tokens {row['us']:9.1f} us a pair")
                        write()
            except Refused as error:
                record["not_run"].append(_not_run(kind, shape, str(error)))
                say(f"not run: {kind.name} at {shape}: {error}")
            with contextlib.suppress(Refused):
                together(world, lambda: [contender.close() for contender in made])
    cpu.release()


def _applies(contender, arrays):
    if arrays == "graph":
        return contender.capturable and not device.SIM and contender.shape.tokens <= GRAPH_TOKENS
    return arrays == "same" or (contender.varies and (arrays == "new" or contender.keeps))


def _row(world, contender, arrays, n_pairs, cpu):
    """A row for one loop: the slowest rank, medians and percentiles over repeats; collective."""
    with contender.on_stream():
        (found, *_) = together(world, lambda: _loops(world, contender, arrays, n_pairs, cpu))
    fast = [one for one in found if not one[2]]
    counted = sorted(fast if len(fast) >= ENOUGH else found)
    s = contender.shape
    return {
        "kernels": contender.name,
        "arrays": arrays,
        **{size: getattr(s, size) for size in SIZES},
        "us": round(statistics.median(us for us, *_ in counted), 2),
        "p20_us": round(counted[len(counted) // 5][0], 2),
        "p80_us": round(counted[-1 - len(counted) // 5][0], 2),
        "piece_us": round(statistics.median(piece for _, piece, _ in counted), 2),
        "slow": sum(is_slow for *_, is_slow in counted),
    }


def _loops(world, contender, arrays, n_pairs, cpu):
    """[(us a pair, us of the piece of Python, whether a CPU was slow) of each repeat], of the slowest rank; collective."""
    given, one, per_call = _calls(contender, arrays)
    for i in range(3):
        one(given(i))
    contender.synchronize()
    begin = time.perf_counter()
    one(given(3))
    contender.synchronize()
    taken = max(world.tell(time.perf_counter() - begin, measure.TIMEOUT_S))
    n = n_pairs or max(4, min(MOST_PAIRS // per_call, int(SECONDS / taken)))
    found, n_fast, spent = [], 0, 0.0
    while n_fast < REPEATS and (spent < PATIENCE or len(found) < REPEATS):
        of_pairs = [given(4 + len(found) * n + i) for i in range(n)]
        before = cpu.settle()
        world.barrier("start", measure.TIMEOUT_S)
        begin = time.perf_counter()
        for arrays_given in of_pairs:
            one(arrays_given)
        contender.synchronize()
        us, piece = 1e6 * (time.perf_counter() - begin) / (n * per_call), max(before, cpu.look())
        of_ranks = world.tell((us, piece, cpu.is_slow(piece)), measure.TIMEOUT_S)
        slowest = [max(values) for values in zip(*of_ranks)]
        found.append(slowest)
        n_fast += not slowest[2]
        spent += 1e-6 * slowest[0] * n * per_call
    contender.check()
    return found


def _calls(contender, arrays):
    """(function of a number: arrays, function of those that runs some pairs, how many)."""
    if arrays == "same":
        of_all = contender.inputs(0)
        return lambda i: of_all, contender.pair, 1
    if arrays == "new":
        return contender.inputs, contender.pair, 1
    if arrays == "layers":
        return (lambda i: [contender.inputs(LAYERS * i + j) for j in range(LAYERS)], contender.layers, LAYERS)
    replay = contender.captured(CHAIN)
    return lambda i: None, lambda _: replay(), CHAIN
