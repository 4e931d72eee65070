"""`python -m benchmarks cpu`: the reference's throughput against a copy of the same rows, and the simulator's speed."""

import json
import time
from statistics import median

import epmoe_ref
import numpy as np
from epmoe_ref.config import EPConfig

from benchmarks import traffic
from benchmarks.pairs import random_tokens
from benchmarks.shapes import Shape


def add_arguments(parser):
    """The options of cpu."""
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank, for the reference (default 1024)")
    parser.add_argument("--hidden", type=int, default=7168, help="(default 7168)")
    parser.add_argument("--ranks", type=int, default=8, help="(default 8)")
    parser.add_argument("--experts", type=int, default=256, help="(default 256)")
    parser.add_argument("--repeats", type=int, default=3, help="(default 3)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")


def seconds(repeats, call):
    """Median seconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def reference(args):
    """Seconds and GB/s of the reference's dispatch and combine, and of one np.take of the same rows."""
    shape = Shape(args.tokens, args.hidden, args.experts)
    cfg = EPConfig(args.ranks, shape.experts, shape.top_k, shape.hidden, shape.tokens, p2p_world_size=args.ranks)
    ids = traffic.topk_ids(shape, args.ranks)
    x = [random_tokens((shape.tokens, shape.hidden), rank) for rank in range(args.ranks)]
    weights = [np.full((shape.tokens, shape.top_k), 1 / shape.top_k, np.float32)] * args.ranks
    d = epmoe_ref.dispatch(cfg, x, ids)
    everything = np.concatenate(x)
    rows = np.random.default_rng(0).integers(0, len(everything), sum(len(i.output_tokens) for i in d))
    moved = everything[rows].nbytes
    y = [i.output_tokens for i in d]
    measured = {
        "np.take of the same rows": seconds(args.repeats, lambda: np.take(everything, rows, axis=0)),
        "reference dispatch": seconds(args.repeats, lambda: epmoe_ref.dispatch(cfg, x, ids)),
        "reference combine": seconds(args.repeats, lambda: epmoe_ref.combine(cfg, y, d, router_weights=weights))}
    return [{"what": name, "seconds": round(s, 4), "gbps": round(moved / s / 1e9, 2)} for name, s in measured.items()]


def simulator(racecheck):
    """Device operations a second of the fused kernels in the simulator, and its threads."""
    from epmoe import device
    from epmoe.kernels import LaunchConfig
    from epmoe.worlds.local import LocalWorld

    from benchmarks.pairs import Pairs

    if not device.SIM:
        return None
    shape = Shape(16, 256, 16, top_k=4)
    world = LocalWorld(4, seed=0, racecheck=racecheck)
    pairs = Pairs(world, shape, fused=True)
    start, before = time.perf_counter(), world.machine.steps
    for phase in pairs.phases:
        pairs.launch(phase)
    spent, steps = time.perf_counter() - start, world.machine.steps - before
    pairs.close()
    launch = LaunchConfig()
    threads = world.n_ranks * launch.grid(world.machine) * launch.threads
    return {"what": f"simulator{', race detector' if racecheck else ''}: fused round of 4 ranks",
            "seconds": round(spent, 3), "threads": threads, "operations": steps,
            "operations_per_second": round(steps / spent)}


def run(args):
    """Print a line for each; the exit status is 0."""
    from epmoe import device
    from epmoe.provenance import provenance

    lines = reference(args) + [s for racecheck in (False, True) if (s := simulator(racecheck))]
    for line in lines:
        print("  ".join(f"{name}: {value}" if name != "what" else f"{value:48}" for name, value in line.items()))
    if args.json:
        machine = device.machine(1)
        with open(args.json, "w") as f:
            json.dump(provenance(machine) | {"lines": lines}, f, indent=1)
    return 0
