"""`epmoe soak`: runs rounds for a number or a time, and prints progress, errors and a verdict."""

import json
import sys
import time
from dataclasses import asdict

from epmoe.command_line import (
    DIFFERS,
    EQUAL,
    at_least_one,
    at_least_zero,
    kernels_and_world,
    positive_seconds,
    sizes_of_a_world,
)
from epmoe.device import SIM
from epmoe.provenance import provenance
from epmoe.soak.errors import Found
from epmoe.verify.worlds import Worlds, between
from epmoe_ref.config import TOKEN_FORMATS, EPConfig
from epmoe_ref.errors import EPError, EPValueError, UnavailableError

SIZES = ("n_ranks", "n_experts", "top_k", "hidden", "max_tokens_per_rank", "token_format")  # that --json writes
ENDLESS = 1 << 30  # rounds
ROUNDS, LOOK_EVERY = (5, 1) if SIM else (100, 20)  # a simulated round takes seconds


def add_arguments(parser):
    """Add the options of soak."""
    parser.add_argument(
        "--rounds",
        type=at_least_one,
        metavar="N",
        help="stop after N rounds (default 100, in the simulator 5; none with --seconds)",
    )
    parser.add_argument("--seconds", type=positive_seconds, metavar="S", help="stop after S seconds of rounds")
    sizes_of_a_world(parser)
    options = parser.add_argument_group("what runs")
    options.add_argument("--format", choices=tuple(TOKEN_FORMATS), default="bf16", help="token format (default bf16)")
    kernels = options.add_mutually_exclusive_group()
    kernels.add_argument("--fused", dest="fused", action="store_true", default=True, help="fused kernels (the default)")
    kernels.add_argument("--split", dest="fused", action="store_false", help="split kernels")
    options.add_argument("--poison", action="store_true", help="fill results with NaN before each round")
    options.add_argument("--seed", type=at_least_zero, default=0, help="seed of all data and routing (default 0)")
    options.add_argument(
        "--look-every",
        type=at_least_one,
        metavar="M",
        help="the host reads the error counts every M rounds (default 20, in the simulator 1)",
    )
    kernels_and_world(options)
    parser.add_argument("--json", metavar="FILE", help="write what was done, machine and versions")


def run(args):
    """Run a soak with parsed options. The exit status is 0 without errors, 1 with errors, 2 if it cannot be run."""
    worlds = Worlds(args.world, p2p_world_size=args.p2p_world_size)
    cfg = _config(args, worlds)
    world = worlds.make(cfg.n_ranks, args.seed)
    if args.json and worlds.prints:
        open(args.json, "a").close()  # refuse an unwritable file before the rounds, not after
    try:
        record = soak(args, cfg, world, print if worlds.prints else lambda text: None)
    except (EPValueError, UnavailableError):
        raise
    except EPError as error:  # a wait that expired
        print(f"FAIL  {type(error).__name__}: {error}", file=sys.stderr)
        return DIFFERS
    if args.json and worlds.prints:
        with open(args.json, "w") as f:
            json.dump(record, f, indent=1)
    if not any(of_rank["rows"] or of_rank["tokens"] for of_rank in record["ranks"]):
        raise EPValueError(
            "no rank sent or received a token, so nothing was compared: choose more --tokens or --rounds"
        )
    return EQUAL if record["errors"] == 0 else DIFFERS


def _config(args, worlds):
    ranks = worlds.n_ranks if args.ranks is None else args.ranks
    return EPConfig(
        ranks,
        args.experts or ranks * args.experts_per_rank,
        args.top_k,
        args.hidden,
        args.tokens,
        token_format=args.format,
        **between(args.p2p_world_size, skip_a2a=False),
    )


def soak(args, cfg, world, say):
    """Run rounds until the limit in args or the first error. Returns a dict of the work done."""
    from epmoe.host.engine import kernels_named
    from epmoe.soak.compiled_first import compile_all
    from epmoe.soak.soak import Soak

    options = dict(
        fused=args.fused, seed=args.seed, poison=args.poison, kernels=kernels_named(args.kernels, world.machine)
    )
    say(
        f"epmoe soak: {cfg.n_ranks} ranks x {cfg.n_local_experts} experts, top-{cfg.top_k}, hidden {cfg.hidden}, at "
        f"most {cfg.max_tokens_per_rank} tokens a rank\n{cfg.token_format}, {'fused' if args.fused else 'split'} "
        f"{options['kernels']} kernels; {world.machine.describe()}"
    )
    wanted = args.rounds or (ENDLESS if args.seconds else ROUNDS)
    look_every = args.look_every or LOOK_EVERY
    done, begin = 0, time.perf_counter()
    kernels, compiled, processes = compile_all(cfg, world, **options)
    ready = time.perf_counter() - begin
    if kernels:
        say(_ready(kernels, compiled, processes, ready))
    with Soak(cfg, world, timeout=args.timeout, **options) as rounds:
        start = say_next = time.perf_counter()
        while True:
            for number in range(done, min(done + look_every, wanted)):
                rounds.round(number)
                done += 1
            found = rounds.found()
            now = time.perf_counter()
            timed_out = args.seconds is not None and now - start >= args.seconds
            found, timed_out = _of_all_ranks(world, found, timed_out, args.timeout)
            wrong = sum(f.errors for f in found)
            ended = wrong or done >= wanted or timed_out
            if ended or now >= say_next:
                say_next = now + 10
                say(
                    f"{_rounds(done)}, {sum(f.rows for f in found)} rows, {sum(f.tokens for f in found)} combined "
                    f"tokens, {wrong} errors, {now - start:.1f} s"
                )
            if ended:
                break
    rate = done / (now - start)
    for f in found:
        if f.first:
            say(f"first error: {f.first}")
    say(
        f"{'FAIL' if wrong else 'PASS'}  {_rounds(done)}, {wrong} errors, {now - start:.1f} s, "
        f"{rate:.{2 if rate < 10 else 0}f} rounds/s"
    )
    return {
        "rounds": done,
        "errors": wrong,
        "seconds": round(now - start, 3),
        "rounds_per_second": round(rate, 1),
        "kernels": kernels,
        "kernels_compiled": compiled,
        "kernels_ready_seconds": round(ready, 3),
        "ranks": [asdict(f) for f in found],
        "config": {name: getattr(cfg, name) for name in SIZES},
        "fused": args.fused,
        "kernels_used": options["kernels"],
        "seed": args.seed,
        "poison": args.poison,
        "world": type(world).__name__,
    } | provenance(world.machine)


def _ready(kernels, compiled, n, seconds):
    by = f", {compiled} of them compiled by {'1 process' if n == 1 else f'{n} processes'}" if n else ""
    return f"{kernels} kernels ready in {seconds:.1f} s{by}"


def _rounds(number):
    return "1 round" if number == 1 else f"{number} rounds"


def _of_all_ranks(world, found, timed_out, timeout):
    """The findings of all ranks, and whether time is up on any of them. The same on all ranks, so all end together."""
    told = world.tell(([asdict(f) for f in found], timed_out), 2 * timeout)
    return [Found(**f) for ranks, _ in told for f in ranks], any(over for _, over in told)
