"""`epmoe` (= verify): rounds of dispatch, experts and combine, kernels against the reference, shown."""

import argparse
import json
import os
import re
import sys
import time

import numpy as np

from epmoe import device, routing
from epmoe.command_line import (
    DIFFERS,
    EQUAL,
    at_least_one,
    at_least_zero,
    part_of_all,
    positive_seconds,
    sizes_of_a_world,
)
from epmoe.progress import progress
from epmoe.verify import one_token, pictures
from epmoe.verify.checked_rounds import WEIGHTS, Case, rounds_of
from epmoe.verify.worlds import Worlds, between
from epmoe_ref.config import TOKEN_FORMATS, EPConfig
from epmoe_ref.errors import EPError, EPValueError, UnavailableError

FORMATS = tuple(TOKEN_FORMATS)
MAX_DIFFERENCES = 3
OF_THE_MATRIX = ("part", "compile", "cc", "sample")  # options that mean something with --all only
WITH_THE_MATRIX = (
    "all",
    "kernels",
    "ranks",
    "hidden",
    "seed",
    "racecheck",
    "world",
    "p2p_world_size",
    "timeout",
    "json",
    *OF_THE_MATRIX,
)
WITH_WORDS = (
    "words",
    "ranks",
    "rounds",
    "seed",
    "racecheck",
    "world",
    "p2p_world_size",
    "timeout",
    "json",
)
WORLDS = 14  # of --words: each format twice
OF_A_FILE = ("experts_per_rank", "top_k", "hidden", "tokens", "rounds")  # what --input's file says


def _cc(text):
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} must be a compute capability, for instance 9.0")
    return int(major), int(minor)


def add_arguments(parser):
    """The options of verify."""
    sizes = sizes_of_a_world(parser)
    sizes.add_argument(
        "--rounds",
        type=at_least_one,
        default=3,
        help="rounds on the same buffers, without a reset (default 3)",
    )
    options = parser.add_argument_group("what runs")
    options.add_argument(
        "--format", choices=FORMATS, default="bf16", help="token format (default bf16)"
    )
    options.add_argument(
        "--preshuffle", action="store_true", help="with mxfp4_rows: scales in the slot layout"
    )
    options.add_argument("--combine-dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    options.add_argument("--fused", action="store_true", help="fused kernels (default: split)")
    options.add_argument(
        "--kernels",
        choices=("plain", "fast"),
        help="plain: as in the specification; fast: tuned "
        "(default: fast on GPUs of compute capability 9.0 and newer, plain elsewhere)",
    )
    options.add_argument(
        "--shared-expert", action="store_true", help="add an expert that every token uses"
    )
    options.add_argument(
        "--skip-a2a", action="store_true", help="every rank holds all tokens, nothing is exchanged"
    )
    options.add_argument(
        "--weights", choices=WEIGHTS, default="array", help="router weights (default array)"
    )
    options.add_argument(
        "--epilogue", action="store_true", help="apply a function to each element of the result"
    )
    options.add_argument(
        "--seed",
        type=at_least_zero,
        default=0,
        help="seed of tokens, routing, experts and schedule (default 0)",
    )
    options.add_argument(
        "--seeds",
        type=at_least_one,
        default=1,
        metavar="N",
        help="run N seeds, starting with --seed",
    )
    options.add_argument(
        "--racecheck", action="store_true", help="look for data races (simulator only)"
    )
    options.add_argument(
        "--world",
        choices=("auto", "local", "mpi"),
        default="auto",
        help="all ranks in this process, or one rank a process (default: what mpirun suggests)",
    )
    options.add_argument(
        "--p2p-world-size",
        type=at_least_one,
        metavar="N",
        help="make p2p worlds of N ranks, with SHMEM between them (default: one p2p world)",
    )
    options.add_argument(
        "--timeout",
        type=positive_seconds,
        default=30.0,
        metavar="S",
        help="seconds until a wait gives up",
    )
    files = parser.add_argument_group("files and output")
    files.add_argument(
        "--counters",
        action="store_true",
        help="also show the counters of one rank after each kernel of the first round",
    )
    files.add_argument(
        "--input",
        metavar="FILE.npz",
        help="your own routing: topk_ids (N, K) and, if you have them, x (N, hidden), "
        "topk_weights (N, K), n_experts (or --experts), rank_offsets (ranks + 1)",
    )
    files.add_argument(
        "--dump",
        metavar="FILE.npz",
        help="write the first round's tokens and routing as a file for --input",
    )
    files.add_argument(
        "--json", action="store_true", help="print one JSON object instead of pictures"
    )
    files.add_argument(
        "--all",
        action="store_true",
        help="run every combination of options, at small sizes and --hidden",
    )
    files.add_argument(
        "--words",
        type=at_least_one,
        nargs="?",
        const=WORLDS,
        metavar="N",
        help="compare every word of the "
        "plain kernels' memory with the model of the protocol, after each half, on N random "
        f"worlds (default {WORLDS})",
    )
    files.add_argument(
        "--part",
        type=part_of_all,
        metavar="I/N",
        help="with --all: run part I of N of the cases, to share them among N processes",
    )
    files.add_argument(
        "--compile",
        type=part_of_all,
        metavar="I/N",
        help="with --all: only compile part I of N of the cases' kernels into the disk cache. On GPUs --all "
        "does this first. With EPMOE_DEVICE=gpu you can run it on a machine without a GPU",
    )
    files.add_argument(
        "--cc",
        type=_cc,
        metavar="X.Y",
        default=(9, 0),
        help="with --compile: compute capability of the GPU (default 9.0)",
    )
    files.add_argument(
        "--sample",
        type=at_least_one,
        metavar="N",
        help="with --all: run only N cases, drawn with --seed",
    )


def run(args, console=None):
    """Run verify with parsed options; the exit status is 0 if every byte agreed, 1 if not, 2 if it cannot be run."""
    _refuse_what_would_be_ignored(args)
    args.kernels = args.kernels or ("plain" if device.SIM else None)
    if args.all and args.compile:
        from epmoe.verify import matrix

        return matrix.compile_part(args)
    worlds = Worlds(args.world, args.racecheck, args.p2p_world_size)
    try:
        if console is None:
            from rich.console import Console

            console = Console(highlight=False, soft_wrap=False, quiet=not worlds.prints)
        if args.all:
            from epmoe.verify import matrix

            return matrix.walk(args, console, worlds)
        if args.words:
            from epmoe.verify import words

            return words.walk(args, console, worlds)
        args.ranks = args.ranks or worlds.n_ranks
        return _verify(args, console, worlds)
    except (EPValueError, UnavailableError):
        raise
    except EPError as error:  # in a rank of its own process
        where = f"rank {worlds.rank}: " if worlds.mpi else ""
        sys.stderr.write(f"FAIL  {where}{type(error).__name__}: {error}\n")
        return DIFFERS


def _refuse_what_would_be_ignored(args):
    """With --all the matrix has its own sizes and all options; without it, it has no parts; a file has its sizes."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = [
        name
        for name, default in vars(parser.parse_args([])).items()
        if getattr(args, name) != default
    ]
    with_words = args.words and not args.all
    wrong = [
        name
        for name in given
        if (name not in WITH_THE_MATRIX if args.all else name in OF_THE_MATRIX)
        or with_words
        and name not in WITH_WORDS
    ]
    if args.input and not args.all:
        wrong += [name for name in given if name in OF_A_FILE]
    if wrong:
        rule = (
            "no meaning with --all, which walks all options, at small sizes: leave it out, or --all"
            if args.all
            else "no meaning with --words, which draws random worlds: leave it out, or --words"
            if with_words
            else "no meaning without --all: give that too, or leave it out"
            if wrong[0] in OF_THE_MATRIX
            else "no meaning with --input, whose file has its sizes, and one round of them: leave it out"
        )
        raise EPValueError(f"{', '.join('--' + name.replace('_', '-') for name in wrong)}: {rule}")


def case_of(args, batch=None):
    """The Case that the options describe; sizes that a file determines come from it."""
    n_experts = args.experts or args.ranks * args.experts_per_rank
    top_k, hidden, tokens = args.top_k, args.hidden, args.tokens
    if batch is not None:
        n_experts = args.experts or batch.experts_for(args.ranks)
        batch.check_ids(n_experts)
        top_k, hidden = batch.topk_ids.shape[1], batch.x.shape[1]
        tokens = max(batch.split(args.ranks).num_tokens)
    cfg = EPConfig(
        args.ranks,
        n_experts,
        top_k,
        hidden,
        max(tokens, 1),
        token_format=args.format,
        fuse_a_scale_preshuffle=args.preshuffle,
        combine_dtype=args.combine_dtype,
        fused_shared_expert=args.shared_expert,
        skip_a2a=args.skip_a2a,
        allreduce_world_size=args.ranks if args.skip_a2a else 1,
        **between(args.p2p_world_size, args.skip_a2a),
    )
    return Case(cfg, args.weights, args.epilogue, args.fused, args.rounds, kernels=args.kernels)


def batches(case, args, seed, batch):
    """The inputs of each round: the file's in the first (and only) one, else made from the seed."""
    if batch is None:
        return [routing.make(case.cfg, [seed, number]) for number in range(case.rounds)]
    if case.cfg.skip_a2a:
        whole = batch.split(1)
        return [
            routing.Routed(
                *(a * case.cfg.n_ranks for a in (whole.x, whole.topk_ids, whole.topk_weights))
            )
        ]
    return [batch.split(case.cfg.n_ranks)]


def _verify(args, console, worlds):
    start = time.perf_counter()
    _refuse_to_overwrite(args)
    batch = routing.load(args.input) if args.input else None
    case = case_of(args, batch)
    notes = [] if batch is None else [*_which_experts(args, batch, case.cfg), *batch.notes]
    record = {
        "case": str(case),
        "config": _config(case.cfg),
        "notes": notes,
        "seeds": [],
        "passed": True,
    }
    shown = not args.json
    for seed in _seeds(args, console, worlds):
        routed = batches(case, args, seed, batch)
        if args.dump and seed == args.seed and worlds.prints:
            routing.dump(args.dump, routed[0], case.cfg.n_experts)
        world = worlds.make(case.cfg.n_ranks, seed)
        record["machine"] = world.machine.describe()
        shown_rank = _busiest_rank(case.cfg, routed[0]) if world.lists else world.rank
        if shown and seed == args.seed:
            _heading(console, args, case, world, batch, notes)
            if args.dump:
                console.print(
                    f"{args.dump} has the first round's tokens and routing; --input reads it\n",
                    style="dim",
                )
        rounds, reported = [], {}
        try:
            for r in rounds_of(
                case,
                world,
                routed,
                seed=seed,
                shown_rank=shown_rank,
                regions=tuple(pictures.REGIONS),
                timeout=args.timeout,
            ):
                rounds.append(r)
                if shown and r.number == 1 and seed == args.seed:
                    _first_round(console, args, case, r, shown_rank)
                if shown:
                    _round_line(console, case, r, seed if args.seeds > 1 else None)
        except (EPValueError, UnavailableError):
            raise
        except EPError as error:  # a kernel that hung, raced, or left its memory
            if worlds.mpi:
                raise
            reported = {"reported": f"{type(error).__name__} in round {len(rounds) + 1}: {error}"}
        record["seeds"].append(
            {"seed": seed, "rounds": [_round_record(case, r) for r in rounds]} | reported
        )
        if reported or any(r.differences for r in rounds):
            record["passed"] = False
            break
    record["seconds"] = round(time.perf_counter() - start, 3)
    if not args.json:
        _verdict(console, args, record, rounds)
    elif worlds.prints:
        print(_as_json(record))
    return EQUAL if record["passed"] else DIFFERS


def _seeds(args, console, worlds):
    """The seeds one after another; where there are several, with what progress they make."""
    with progress(
        console, "seeds", args.seeds, hidden=args.json or args.seeds == 1 or not worlds.prints
    ) as shown:
        for seed in range(args.seed, args.seed + args.seeds):
            yield seed
            shown.advance()


def _busiest_rank(cfg, routed):
    """The rank that receives most rows."""
    return int(
        np.argmax(
            pictures.counts(cfg, routed.topk_ids)
            .reshape(cfg.n_ranks, cfg.n_ranks, -1)
            .sum(axis=(0, 2))
        )
    )


def _refuse_to_overwrite(args):
    """--dump writes bf16 bits, which would be less than an --input in float32."""
    if (
        args.input
        and args.dump
        and os.path.exists(args.dump)
        and os.path.samefile(args.input, args.dump)
    ):
        raise EPValueError(
            f"--dump {args.dump} is the file of --input, which would be overwritten: name another one"
        )


def _which_experts(args, batch, cfg):
    """A note where neither --experts nor the file alone says how many experts there are."""
    if args.experts and batch.n_experts not in (None, args.experts):
        return [f"n_experts={args.experts} by --experts; the file says {batch.n_experts}"]
    if args.experts or batch.n_experts is not None:
        return []
    return [
        f"n_experts={cfg.n_experts} is a guess from the largest id: give --experts N, or n_experts in the file"
    ]


def _heading(console, args, case, world, batch, notes):
    for note in notes:
        console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    c = case.cfg
    console.print(
        f"[bold]epmoe verify[/bold]  {c.n_ranks} ranks x {c.n_local_experts} experts, top-{c.top_k}, hidden "
        f"{c.hidden}, at most {c.max_tokens_per_rank} tokens a rank"
    )
    console.print(
        f"{case}; {world.machine.describe()}{'' if world.lists else ', one rank a process'}\n",
        style="dim",
    )
    if batch is not None:
        console.print(f"{args.input}: {len(batch.x)} tokens", style="dim")


def _first_round(console, args, case, r, rank):
    section = (
        f"[bold]{n}. {name}.[/bold] "
        for n, name in enumerate(("Routing", "Dispatch", "One token", ""), 1)
    )
    console.print(next(section) + "How many tokens each rank (line) sends to each expert (column).")
    console.print(pictures.routing(case.cfg, r.routed, console.width))
    odd = pictures.what_is_odd(case.cfg, r.routed)
    if odd and not args.input:
        console.print(odd, style="dim")
    if r.dispatch_differences:
        return
    console.print(
        "\n"
        + next(section)
        + f"Rank {rank} now has its rows grouped by expert: one matrix product each."
    )
    console.print(pictures.segments(case.cfg, rank, r.seen[rank]))
    token = one_token.of_round(case, r)
    if token is not None and not r.combine_differences:
        console.print("\n" + next(section) + token.says())
        console.print(token.table())
        console.print(token.total())
    if args.counters:
        console.print(
            f"\n[bold]Counters[/bold] of rank {rank}. Ranks and blocks wait for each other by polling them. Columns: "
            + _moments(r)
            + pictures.MEANING
            + " After the round all have their first values again, so the next "
            "round needs no reset."
        )
        console.print(pictures.counters(r.moments))
    console.print(
        "\n[bold]Kernels compared with the reference[/bold], every byte. Only the order of rows within an (expert, "
        "src_rank) segment is free."
    )


def _moments(r):
    if "sent" in r.moments:
        return (
            "before the round, and after each of its kernels: dispatch_async (sent), dispatch_wait (dispatched), "
            "combine_async (returned), combine_wait (combined). "
        )
    return "before the round, after dispatch and after combine. "


def _round_line(console, case, r, seed):
    sent = int(pictures.counts(case.cfg, r.routed.topk_ids).sum())
    where = f"seed {seed}, round {r.number}" if seed is not None else f"round {r.number}"
    console.print(
        f"{where}: {sum(r.routed.num_tokens)} tokens, {sent} messages, {r.kernel_seconds:.2f} s   dispatch "
        f"{_says(r.dispatch_differences)}   combine "
        + ("[dim]not run[/dim]" if r.dispatch_differences else _says(r.combine_differences))
    )


def _says(differences):
    return "[red]DIFFERS[/red]" if differences else "[green]equal[/green]"


def _verdict(console, args, record, rounds):
    if record["passed"]:
        n = sum(len(s["rounds"]) for s in record["seeds"])
        console.print(
            f"\n[bold green]PASS[/bold green]  {n} round{'s' if n > 1 else ''} equal to the reference, bit "
            f"for bit, in {record['seconds']:.1f} s"
        )
        console.print("Next: epmoe lesson 1, epmoe explain, epmoe routing FILE", style="dim")
        return
    of_seed = record["seeds"][-1]
    replay = (
        f" (seed {of_seed['seed']}: --seed {of_seed['seed']} instead of --seeds runs it again)"
        if args.seeds > 1
        else ""
    )
    if "reported" in of_seed:
        console.print(f"\n[bold red]FAIL[/bold red]{replay}")
        console.print(of_seed["reported"], markup=False, soft_wrap=True)
        return
    console.print(f"\n[bold red]FAIL[/bold red]  the first difference{replay}:")
    for difference in rounds[-1].differences[:MAX_DIFFERENCES]:
        console.print(str(difference), markup=False, soft_wrap=True)


def _as_json(record):
    """JSON as people read it: what has members over lines, a list of numbers in one."""
    return re.sub(
        r"\[\s+([-\d.,\s]+?)\s+\]",
        lambda m: f"[{' '.join(m[1].split())}]",
        json.dumps(record, indent=1),
    )


def _round_record(case, r):
    return {
        "round": r.number,
        "num_tokens": r.routed.num_tokens,
        "routing": pictures.counts(case.cfg, r.routed.topk_ids).tolist(),
        "dispatch": "differs" if r.dispatch_differences else "equal",
        "combine": "not run"
        if r.dispatch_differences
        else "differs"
        if r.combine_differences
        else "equal",
        "differences": [d.record() for d in r.differences],
        "counters": {m: {n: a.tolist() for n, a in held.items()} for m, held in r.moments.items()},
        "kernel_seconds": round(r.kernel_seconds, 4),
        "reference_seconds": round(r.reference_seconds, 4),
    }


def _config(cfg):
    from dataclasses import fields

    return {f.name: getattr(cfg, f.name) for f in fields(cfg)}
