"""`epmoe` (= verify): runs rounds of dispatch, experts and combine, compares with the reference, and shows them."""

import sys
import time
from dataclasses import asdict

import numpy as np

from epmoe import device, routing
from epmoe.command_line import DIFFERS, EQUAL, refuse_to_overwrite
from epmoe.progress import progress
from epmoe.verify import pictures, report
from epmoe.verify.checked_rounds import Case, rounds_of
from epmoe.verify.options import add_arguments, refuse_what_would_be_ignored
from epmoe.verify.worlds import Worlds, between
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPError, EPValueError, UnavailableError

__all__ = ["add_arguments", "batches", "case_of", "run"]


def run(args, console=None):
    """Run verify with parsed options. The exit status is 0 if every byte agreed, 1 if not, 2 if it cannot be run."""
    refuse_what_would_be_ignored(args)
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
        return _verify(args, console, worlds)
    except (EPValueError, UnavailableError):
        raise
    except EPError as error:  # in a rank that is a process of its own
        where = f"rank {worlds.rank}: " if worlds.mpi else ""
        sys.stderr.write(f"FAIL  {where}{type(error).__name__}: {error}\n")
        return DIFFERS


def case_of(args, batch=None):
    """The Case that the options describe. Sizes that a file determines come from the file."""
    n_experts = args.experts or args.ranks * args.experts_per_rank
    top_k, hidden, tokens = args.top_k, args.hidden, args.tokens
    if batch is not None:
        n_experts = args.experts or batch.experts_for(args.ranks)[0]
        routing.check_ids("topk_ids in the file: ", batch.topk_ids, n_experts)
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


def batches(case, seed, batch):
    """The inputs of each round: the file's for the only round, else made from the seed."""
    if batch is None:
        return [routing.make(case.cfg, [seed, number]) for number in range(case.rounds)]
    if case.cfg.skip_a2a:
        whole = batch.split(1)
        return [routing.Routed(*(a * case.cfg.n_ranks for a in (whole.x, whole.topk_ids, whole.topk_weights)))]
    return [batch.split(case.cfg.n_ranks)]


def _verify(args, console, worlds):
    start = time.perf_counter()
    refuse_to_overwrite(args.input, dump=(args.dump, ".npz"))  # --dump writes bf16 bits: float32 would lose precision
    batch = routing.load(args.input) if args.input else None
    if batch and batch.rank_offsets is not None and not worlds.mpi:
        args.ranks = args.ranks or len(batch.rank_offsets) - 1
    args.ranks = args.ranks or worlds.n_ranks
    case = case_of(args, batch)
    notes = [] if batch is None else [*_which_experts(args, batch, case.cfg), *batch.notes]
    record = {"case": str(case), "config": asdict(case.cfg), "notes": notes, "seeds": [], "passed": True}
    shown = not args.json
    for seed, shown_progress in _seeds(args, case, console, worlds):
        routed = batches(case, seed, batch)
        if args.dump and seed == args.seed and worlds.prints:
            routing.dump(args.dump, routed[0], case.cfg.n_experts)
        world = worlds.make(case.cfg.n_ranks, seed)
        record["machine"] = world.machine.describe()
        shown_rank = _busiest_rank(case.cfg, routed[0]) if world.lists else world.rank
        if shown and seed == args.seed:
            report.heading(console, args, case, world, batch, notes)
            if args.dump:
                console.print(f"{args.dump} has the first round's tokens and routing; --input reads it\n", style="dim")
            report.routing(console, args, case, routed[0])
        rounds, reported = [], {}
        try:
            looks = dict(shown_rank=shown_rank, regions=pictures.REGIONS)
            for r in rounds_of(case, world, routed, seed=seed, timeout=args.timeout, **looks):
                rounds.append(r)
                shown_progress.advance()
                if shown and r.number == 1 and seed == args.seed:
                    report.first_round(console, args, case, r, shown_rank)
                if shown:
                    report.round_line(console, case, r, seed if args.seeds > 1 else None)
        except (EPValueError, UnavailableError):
            raise
        except EPError as error:  # a kernel that hung, raced, or left its memory
            if worlds.mpi:
                raise
            reported = {"reported": f"{type(error).__name__} in round {len(rounds) + 1}: {error}"}
        record["seeds"].append({"seed": seed, "rounds": [report.round_record(case, r) for r in rounds]} | reported)
        if reported or any(r.differences for r in rounds):
            record["passed"] = False
            break
    record["seconds"] = round(time.perf_counter() - start, 3)
    if not args.json:
        report.verdict(console, args, record, rounds)
    elif worlds.prints:
        print(report.as_json(record))
    return EQUAL if record["passed"] else DIFFERS


def _seeds(args, case, console, worlds):
    """Yield each seed, with the progress through all rounds of all seeds, to advance after each round."""
    with progress(console, "rounds", args.seeds * case.rounds, hidden=args.json or not worlds.prints) as shown:
        for seed in range(args.seed, args.seed + args.seeds):
            yield seed, shown


def _busiest_rank(cfg, routed):
    """The rank that receives the most rows."""
    return int(np.argmax(pictures.counts(cfg, routed.topk_ids).reshape(cfg.n_ranks, cfg.n_ranks, -1).sum(axis=(0, 2))))


def _which_experts(args, batch, cfg):
    """A note if neither --experts nor the file alone says how many experts there are."""
    if args.experts and batch.n_experts not in (None, args.experts):
        return [f"n_experts={args.experts} by --experts; the file says {batch.n_experts}"]
    return [] if args.experts else batch.experts_for(cfg.n_ranks)[1]
