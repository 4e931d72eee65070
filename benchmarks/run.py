"""`python -m benchmarks`: measures every contender at every shape. Rank 0 prints a table and writes a file."""

import argparse
import contextlib
import gc
import sys
import time
from pathlib import Path

from benchmarks import (
    compiling,
    host_time,
    link,
    loop,
    measure,
    peers,
    plan,
    results,
    shapes,
    table,
    targets,
    torch_peer,
    worlds,
)
from benchmarks.measure import Refused, together
from benchmarks.startline import StartLine
from epmoe import device
from epmoe.check.ranks import process_number
from epmoe.command_line import at_least_one, positive_seconds
from epmoe.provenance import provenance
from epmoe_ref.errors import EPError


def add_arguments(parser):
    """Add the options of run."""
    plan.add_arguments(parser)
    parser.add_argument(
        "--iterations", type=at_least_one, default=50, metavar="N", help="timed iterations (default 50)"
    )
    parser.add_argument(
        "--graph", action=argparse.BooleanOptionalAction, default=True, help="also as CUDA graphs (default)"
    )
    parser.add_argument("--ranks", type=at_least_one, default=4, help="virtual ranks without mpirun (default 4)")
    parser.add_argument("--seconds", type=positive_seconds, metavar="S", help="start no case after this many seconds")
    parser.add_argument("--resume", action="store_true", help="keep what the --json file has, and measure the rest")
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="file of results, written after each shape (default: benchmarks/results/DATE-...; '-' none)",
    )


def run(args):
    """Measure. The exit status is 0, or 2 if it cannot be run, or nothing can be measured."""
    start = time.perf_counter()
    try:
        cases = plan.cases(args)
        if args.resume and args.json in (None, "-"):
            raise ValueError("--resume needs the file: --json FILE")
        if device.SIM and args.shapes is None:
            raise ValueError(
                "there is no GPU: the simulator would take days, and its times mean nothing. `python -m "
                "benchmarks cpu` measures a CPU; `--shapes 3x64/4/2 --iterations 2 --json -` tries this "
                "program"
            )
        world = worlds.make(args.ranks)
        plan.shared_by(cases, world.n_ranks, plan.has_loop(args))
        record = provenance(world.machine) | {
            "n_ranks": world.n_ranks,
            "world": type(world).__name__,
            "command": sys.argv[1:],
            "rows": [],
            "not_run": [],
        }
        before = results.read(args.json) if args.resume and Path(args.json).exists() else None
    except (ValueError, EPError) as error:
        if process_number() == 0:  # the others would say the same
            print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    measured = _Run(args, world, record, before, start).measure(cases)
    torch_peer.leave()
    return 0 if measured else 2


class _Run:
    """One run: its ranks, its record, and the output of rank 0."""

    def __init__(self, args, world, record, before, start):
        self.args, self.world, self.record, self.start = args, world, record, start
        self.speaks = world.ranks[0] == 0
        self.file = None if args.json == "-" or not self.speaks else results.path(record, args.json)
        self.before = before

    def say(self, *lines):
        """Print lines on rank 0."""
        if self.speaks:
            print(*lines, sep="\n", flush=True)

    def seconds(self):
        """Seconds since the start of the command."""
        return time.perf_counter() - self.start

    def measure(self, cases):
        """Measure the link and the cases, and print tables. Returns whether there are rows now."""
        args, world, record = self.args, self.world, self.record
        self.line = StartLine(world)
        record["cpus_of_ranks"] = list(world.tell(host_time.cpus(), measure.TIMEOUT_S))
        record["link_gbps"] = float(f"{link.peer_write_gbps(world, self.line):.4g}")
        if self.before is not None:
            done = {(r["kernels"], shapes.of_row(r), r["sms"]) for r in self.before["rows"]}
            cases = [case for case in cases if case.key() not in done]
        self.say(
            f"{record['device']}; {world.n_ranks} ranks ({record['world']}); epmoe {record['versions']['epmoe']} "
            f"({(record['commit'] or 'no commit')[:12]}), numba-cuda {record['versions'].get('numba-cuda')}; "
            f"{record['date']}",
            f"peer write, all ranks at once: {record['link_gbps']} GB/s a rank. Times: slowest rank, median, 20th "
            f"and 80th percentile of {args.iterations} iterations, microseconds. {len(cases)} cases",
        )
        if not device.SIM:
            n, spent = compiling.everything(world, args, cases)
            record["compiling_seconds"] = round(spent, 1)
            self.say(f"kernels compiled by {n} processes in {spent:.0f} s; {self.seconds():.0f} s since the start")
        self._cases(cases)
        if plan.has_loop(args) and not self._is_late():
            record["loop"] = []
            loop.measure_all(world, plan.loop_shapes(args), args.against, record, self.say, self._write)
        record["seconds"] = round(self.seconds(), 1)
        whole = self._whole()
        if not whole["rows"] and not whole.get("loop"):
            self.say("nothing was measured: no file is written")
            return False
        self._write()
        self.say(
            "",
            table.table(whole["rows"]),
            "",
            *targets.report(whole),
            "",
            *peers.report(whole),
            *host_time.report(self.record["rows"]),
            f"{self.seconds():.0f} s",
        )
        if self.file:
            self.say(f"written: {self.file}")
        return True

    def _cases(self, cases):
        last, missing = None, set()
        for i, case in enumerate(cases):
            if case.section in missing:
                continue
            if self._is_late():
                self.say(f"{len(cases) - i} cases left out after {self.args.seconds:g} s")
                self.record["left_out"] = len(cases) - i
                return
            if last is not None and case.shape != last:
                self._write()
            last = case.shape
            try:
                self._case(case)
            except Refused as error:
                self._not_run(case, error)
                if "ModuleNotFoundError" in str(error):
                    # it is not installed: once is enough, not for each shape
                    missing.add(case.section)
            gc.collect()  # frees this case's memory that is held in cycles

    def _is_late(self):
        if self.args.seconds is None:
            return False
        return max(self.world.tell(self.seconds(), measure.TIMEOUT_S)) > self.args.seconds

    def _not_run(self, case, error):
        self.record["not_run"].append(
            {"kernels": case.kernels, "shape": str(case.shape), "sms": case.sms, "why": str(error)}
        )
        self.say(f"not run: {case.kernels} at {case.shape}: {error}")

    def _case(self, case):
        """Rows of one contender at one shape, launched and as graphs."""
        made, begin = [], time.perf_counter()

        def close():
            for contender in made:
                contender.close()

        try:
            together(self.world, lambda: made.append(case.make(self.world)))
            contender = made[0]
            found = self._rows(case, contender, graph=False)
            if self.args.graph and not device.SIM and getattr(contender, "capturable", True):
                found += self._of_graphs(case, contender)
        except Refused:
            with contextlib.suppress(Refused):  # the first error is the informative one
                together(self.world, close)
            raise
        together(self.world, close)
        spent = time.perf_counter() - begin
        self.say(
            f"{self.seconds():5.0f} s  {case.kernels:18} {str(case.shape):27} "
            f"{'' if case.sms is None else f'{case.sms} SMs':8} "
            + ", ".join(f"{r.phase} {r.us:.1f}" for r in found)
            + f" us  ({spent:.1f} s)"
        )

    def _rows(self, case, contender, graph):
        rows = measure.rows(
            contender, self.line, self.args.iterations, self.record["link_gbps"], sms=case.sms, graph=graph
        )
        self.record["rows"] += [r.asdict() for r in rows]
        return rows

    def _of_graphs(self, case, contender):
        from benchmarks.graph import Captured

        made = []
        try:
            together(self.world, lambda: made.append(Captured(contender)))
            return self._rows(case, made[0], graph=True)
        except Refused as error:
            self._not_run(case, f"as a graph: {error}")
            return []
        finally:
            for captured in made:
                captured.close()

    def _whole(self):
        """This run's record, with peers beside our rows, after an earlier record that it continues."""
        whole = self.record if self.before is None else results.merged([self.before, self.record])
        peers.annotate(whole)
        return whole

    def _write(self):
        if self.file:
            results.write(self._whole(), self.file)
