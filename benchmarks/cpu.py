"""`python -m benchmarks cpu`: the reference's throughput against a copy of the same rows, and the simulator's speed."""

import json
import time
from statistics import median

import numpy as np

import epmoe_ref
from benchmarks import traffic
from benchmarks.pairs import random_tokens
from benchmarks.shapes import Shape
from epmoe_ref.config import EPConfig

ROUND = Shape(16, 256, 16, top_k=4)  # for the simulator
ROUND_RANKS = 4


def add_arguments(parser):
    """Add the options of cpu."""
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank, for the reference (default 1024)")
    parser.add_argument("--hidden", type=int, default=7168, help="(default 7168)")
    parser.add_argument("--ranks", type=int, default=8, help="(default 8)")
    parser.add_argument("--experts", type=int, default=256, help="(default 256)")
    parser.add_argument("--repeats", type=int, default=3, help="(default 3)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")


def seconds(repeats, call):
    """Median seconds of processor time of a call. Other programs on the machine do not count."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return median(times)


def reference(args):
    """Seconds of the reference's dispatch and combine, of a copy of as many bytes, and of one np.take of the rows."""
    shape = Shape(args.tokens, args.hidden, args.experts)
    cfg = EPConfig(args.ranks, shape.experts, shape.top_k, shape.hidden, shape.tokens, p2p_world_size=args.ranks)
    ids = traffic.topk_ids(shape, args.ranks)
    x = [random_tokens((shape.tokens, shape.hidden), rank) for rank in range(args.ranks)]
    weights = [np.full((shape.tokens, shape.top_k), 1 / shape.top_k, np.float32)] * args.ranks
    d = epmoe_ref.dispatch(cfg, x, ids)
    everything = np.concatenate(x)
    rows = np.random.default_rng(0).integers(0, len(everything), sum(len(i.output_tokens) for i in d))
    y = [i.output_tokens for i in d]
    block = np.empty((len(rows), shape.hidden), x[0].dtype)
    copy = block.copy()
    moved = block.nbytes
    measured = {
        "memcpy": seconds(args.repeats, lambda: np.copyto(copy, block)),
        "np.take of the same rows": seconds(args.repeats, lambda: np.take(everything, rows, axis=0)),
        "reference dispatch": seconds(args.repeats, lambda: epmoe_ref.dispatch(cfg, x, ids)),
        "reference combine": seconds(args.repeats, lambda: epmoe_ref.combine(cfg, y, d, router_weights=weights)),
    }
    return [
        {
            "what": name,
            "seconds": round(s, 4),
            "gbps": round(moved / s / 1e9, 2),
            "times_memcpy": round(s / measured["memcpy"], 2),
        }
        for name, s in measured.items()
    ]


class Simulator:
    """The simulator at fused rounds, with or without the race detector. Keeps the least processor time of one round."""

    def __init__(self, racecheck):
        from benchmarks.pairs import Pairs
        from epmoe.kernels import LaunchConfig
        from epmoe.worlds.local import LocalWorld

        world, launch = LocalWorld(ROUND_RANKS, seed=0, racecheck=racecheck), LaunchConfig()
        self.racecheck, self.machine = racecheck, world.machine
        self.pairs = Pairs(world, ROUND, kind="fused")
        self.threads = len(self.pairs.phases) * world.n_ranks * launch.grid(world.machine) * launch.threads
        self.accesses, self.seconds = 0, float("inf")

    def one_round(self):
        """Run one round, and keep its time if it is the shortest so far."""
        steps, start = self.machine.steps, time.process_time()
        for phase in self.pairs.phases:
            self.pairs.launch(phase)
        self.seconds = min(self.seconds, time.process_time() - start)
        self.accesses = self.machine.steps - steps

    def line(self):
        """Seconds, threads a second, and accesses (device operations) a second."""
        return {
            "what": f"simulator{', race detector' if self.racecheck else ''}: fused dispatch and combine, "
            f"{ROUND_RANKS} ranks",
            "seconds": round(self.seconds, 3),
            "threads": self.threads,
            "threads_per_second": round(self.threads / self.seconds),
            "accesses": self.accesses,
            "accesses_per_second": round(self.accesses / self.seconds),
        }


def simulators(repeats):
    """The lines without and with the detector. Their rounds take turns, so a busy machine slows both down."""
    both = [Simulator(racecheck) for racecheck in (False, True)]
    for _ in range(1 + repeats):  # the first rounds are slower
        for one in both:
            one.one_round()
    plain, checked = both
    for one in both:
        one.pairs.close()
    return [plain.line(), checked.line() | {"times_without_detector": round(checked.seconds / plain.seconds, 2)}]


def run(args):
    """Print a line for each. The exit status is 0."""
    from epmoe import device
    from epmoe.provenance import provenance

    lines = reference(args)
    if device.SIM:
        lines += simulators(args.repeats)
    for line in lines:
        print("  ".join(f"{name}: {value}" if name != "what" else f"{value:64}" for name, value in line.items()))
    if args.json:
        machine = device.machine(1)
        with open(args.json, "w") as f:
            json.dump(
                provenance(machine)
                | {
                    "cpu": cpu_name(),
                    "options": {
                        name: getattr(args, name) for name in ("tokens", "hidden", "ranks", "experts", "repeats")
                    },
                    "simulated": str(ROUND),
                    "lines": lines,
                },
                f,
                indent=1,
            )
    return 0


def cpu_name():
    """The processor's name according to Linux, and the number of cores that this process may use."""
    import os

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        with open("/proc/cpuinfo") as f:
            model = next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), "unknown")
    except OSError:
        model = "unknown"
    return f"{model}, {cores} cores"
