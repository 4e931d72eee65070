"""`epmoe verify --words`: compares every word of the plain kernels' memory with the model, after each half of a round.

The worlds are random: sizes, formats, options, routing, grid, and the simulator's schedule come from a seed.
Results are compared with the reference too.
"""

import json
import time

import numpy as np

from epmoe import device
from epmoe.check import experts
from epmoe.check.adapters.kernels import PlainKernels
from epmoe.check.cases import Case
from epmoe.check.difference import of_all_ranks
from epmoe.check.ranks import WholeWorld, rank_of_mpi
from epmoe.command_line import DIFFERS, EQUAL
from epmoe.expert_parallel import ExpertParallel
from epmoe.kernels import LaunchConfig
from epmoe.verify.matrix import FORMATS
from epmoe.verify.report import MAX_DIFFERENCES
from epmoe_ref.config import TOKEN_FORMATS, EPConfig
from epmoe_ref.errors import EPError, EPValueError, UnavailableError


def walk(args, console, worlds):
    """Compare args.words random worlds, a line each. The exit status is 0 if every word was right."""
    start, records = time.perf_counter(), []
    if not args.json:
        console.print(
            "[bold]epmoe verify --words[/bold]  recv_buf, recv_count and all counters of the plain kernels, "
            "after each half of a round, against the model of the protocol"
        )
    for seed in range(args.seed, args.seed + args.words):
        records.append(_compared(args, seed, worlds))
        if not args.json:
            record = records[-1]
            says = "[green]equal[/green]" if record["passed"] else "[red]DIFFERS[/red]"
            console.print(f"seed {seed}: {record['case']}  {says}", soft_wrap=True)
        if not records[-1]["passed"]:
            break
    passed, seconds = records[-1]["passed"], time.perf_counter() - start
    if args.json and worlds.prints:
        print(json.dumps({"passed": passed, "seconds": round(seconds, 3), "worlds": records}, indent=1))
    elif not args.json:
        _verdict(console, args, records, seconds)
    return EQUAL if passed else DIFFERS


def random_world(seed, n_ranks=None, shmem=True, p2p_world_size=None):
    """(EPConfig, LaunchConfig, whether the kernels are fused) for a seed. Formats, and split and fused, alternate."""
    rng = np.random.default_rng(seed)
    token_format, preshuffle = FORMATS[seed % len(FORMATS)]
    n_ranks = n_ranks or int(rng.integers(1, 5))
    n_experts = n_ranks * int(rng.integers(1, 4))
    skip_a2a, shared = p2p_world_size is None and bool(rng.integers(4) == 0), bool(rng.integers(2))
    use_shmem = p2p_world_size is not None or skip_a2a and shmem and bool(rng.integers(2))
    if p2p_world_size is None and shmem and not skip_a2a and n_ranks % 2 == 0 and rng.integers(3) == 0:
        p2p_world_size, use_shmem = n_ranks // 2, True
    cfg = EPConfig(
        n_ranks,
        n_experts,
        int(rng.integers(1, min(n_experts, 4) + 1)),
        256 if preshuffle else TOKEN_FORMATS[token_format].hidden_multiple * int(rng.integers(1, 3)),
        int(rng.integers(1, 9)),
        token_format=token_format,
        fuse_a_scale_preshuffle=preshuffle,
        alignment=int(rng.choice([16, 16, 64])),
        combine_dtype=str(rng.choice(["bf16", "fp16", "fp32"])),
        fused_shared_expert=shared,
        skip_a2a=skip_a2a,
        allreduce_world_size=[None, 1, 2 * n_ranks][rng.integers(3)],
        p2p_world_size=p2p_world_size,
        use_shmem=use_shmem,
    )
    return cfg, LaunchConfig(n_sms=int(rng.integers(2, 5)), num_threads=64), seed % 3 == 2


def _implementation(world, launch, fused, timeout):
    """The plain kernels on this world as an implementation for epmoe.check, and in `words` how many were compared."""

    class Plain(PlainKernels):
        per_rank = not world.lists
        words = 0

        def __init__(self, cfg):
            self.cfg = cfg
            self._ep = ExpertParallel(cfg, world, launch=launch, fused=fused, kernels="plain", timeout=timeout)

        def _of_ranks(self, read):
            held = super()._of_ranks(read)
            Plain.words += np.size(held)
            return held

        if fused:
            dispatch_async = dispatch_wait = combine_async = combine_wait = None

    return Plain


def _case(cfg, seed, rounds):
    """Rounds of random routing. Some ids are -1, and ranks have different numbers of tokens."""
    n_tokens = np.random.default_rng([seed, 1]).integers(0, cfg.max_tokens_per_rank + 1, cfg.n_ranks)
    if cfg.skip_a2a:
        n_tokens[:] = n_tokens[0]
    return Case("a random world", cfg, tuple(map(int, n_tokens)), "gaps", rounds=rounds, seed=seed)


def _compared(args, seed, worlds):
    n_ranks = worlds.n_ranks if worlds.mpi else args.ranks
    cfg, launch, fused = random_world(seed, n_ranks, device.SIM and not worlds.mpi, args.p2p_world_size)
    record = {"seed": seed, "case": _described(cfg, fused), "rounds": args.rounds, "passed": True, "differences": []}
    try:
        plain = _implementation(worlds.make(cfg.n_ranks, seed), launch, fused, args.timeout)
        ranks = rank_of_mpi() if worlds.mpi else WholeWorld(cfg.n_ranks)
        found = experts.run_case(plain, _case(cfg, seed, args.rounds), ranks, set())
        found = of_all_ranks(found, ranks.gather)
        record |= {
            "words": plain.words,
            "passed": not found,
            "differences": [d.record() for d in found],
            "text": [str(d) for d in found],
        }
    except (EPValueError, UnavailableError):
        raise
    except EPError as error:  # a kernel that hung, raced, or left its memory
        if worlds.mpi:
            raise
        record |= {"passed": False, "text": [f"{type(error).__name__}: {error}"]}
    return record


def _described(cfg, fused):
    parts = [
        f"{cfg.n_ranks} x {cfg.n_local_experts} experts, top-{cfg.top_k}",
        cfg.token_format + " slots" * cfg.fuse_a_scale_preshuffle,
        "fused" if fused else "split",
    ]
    parts += ["skip_a2a"] * cfg.skip_a2a + [f"p2p worlds of {cfg.p2p_world_size}"] * cfg.use_shmem
    return ", ".join(parts + ["shared expert"] * cfg.fused_shared_expert)


def _verdict(console, args, records, seconds):
    last = records[-1]
    if last["passed"]:
        words = sum(record["words"] for record in records)
        console.print(
            f"\n[bold green]PASS[/bold green]  {len(records)} world{'s' * (len(records) != 1)} of {args.rounds} rounds, {words:,} "
            f"words as the protocol has them, in {seconds:.1f} s"
        )
        return
    console.print(
        f"\n[bold red]FAIL[/bold red]  the first wrong words (--words 1 --seed {last['seed']} runs this world again):"
    )
    for text in last["text"][:MAX_DIFFERENCES]:
        console.print(text, markup=False, soft_wrap=True)
