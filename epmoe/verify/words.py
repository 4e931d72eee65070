"""`epmoe verify --words`: compares every word of the plain kernels' memory with the model, after each half of a round.

The worlds are random: sizes, formats, options, routing, grid, and the simulator's schedule come from a seed.
"""

import json
import time

import numpy as np

from epmoe import device, routing
from epmoe.check.words import BUFFERS, Memory, flat_counters
from epmoe.command_line import DIFFERS, EQUAL
from epmoe.expert_parallel import ExpertParallel
from epmoe.host.inputs import COMBINE_DTYPE
from epmoe.kernels import LaunchConfig
from epmoe.verify.checked_rounds import Own
from epmoe_ref import segments, shared_expert_share
from epmoe_ref.config import TOKEN_FORMATS, EPConfig
from epmoe_ref.errors import EPError, EPValueError, UnavailableError

MAX_DIFFERENCES = 3
FORMS = [*((name, False) for name in TOKEN_FORMATS), ("mxfp4_rows", True)]


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
    token_format, preshuffle = FORMS[seed % len(FORMS)]
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


class Compared:
    """The plain kernels and the model over one world. Rounds stop at the first wrong word."""

    def __init__(self, ep):
        self.ep, self.cfg, self.own = ep, ep.cfg, Own(ep.world)
        self.memory, self.words = Memory(self.cfg), 0

    def rounds(self, routed_rounds, seed):
        """The differences of the first half that has any, each with its round's number; [] if every word was right."""
        if found := self._wrong():
            return found
        for number, routed in enumerate(routed_rounds, 1):
            for found in self._round(routed, np.random.default_rng([seed, number])):
                if found:
                    return [d.in_round(number - 1) for d in found]
        return []

    def _round(self, routed, rng):
        """Yield the differences after each half, or for fused kernels after dispatch and after combine."""
        ep, memory, own = self.ep, self.memory, self.own
        x, ids, weights = routed.x, routed.topk_ids, routed.topk_weights
        memory.step("dispatch_async", x, ids)
        if ep.fused:
            dispatched = ep.dispatch(own(x), own(ids))
        else:
            ep.dispatch_async(own(x), own(ids))
            yield self._wrong()
            dispatched = ep.dispatch_wait()
        memory.step("dispatch_wait")
        yield self._wrong()
        rows = _Rows(self.cfg, ids, rng)
        theirs = {rank: rows(rank, d.trimmed().numpy()) for rank, d in own.by_rank(dispatched).items()}
        memory.step(
            "combine_async",
            [rows(rank, d) for rank, d in enumerate(memory.dispatched)],
            [d.src_info for d in memory.dispatched],
        )
        if ep.fused:
            ep.combine(own(theirs), dispatched, own(weights))
        else:
            ep.combine_async(own(theirs), dispatched)
            yield self._wrong()
            ep.combine_wait(own(weights))
        memory.step("combine_wait")
        yield self._wrong()

    def _wrong(self):
        ep = self.ep
        ep.check()
        self.own.of_all([], ep.timeout)  # until all ranks have finished the half
        held = {
            rank: {name: ep.region(name, rank) for name in BUFFERS}
            | {"ep_counters": flat_counters(self.cfg, lambda name, rank=rank: ep.region(name, rank))}
            for rank in ep.world.ranks
        }
        self.words += sum(array.size for regions in held.values() for array in regions.values())
        return self.own.of_all(self.memory.compare(held), ep.timeout)


class _Rows:
    """The experts' outputs: a row for each (token, k) of each rank, so the order of rows does not matter."""

    def __init__(self, cfg, topk_ids, rng):
        dtype = COMBINE_DTYPE[cfg.combine_dtype]
        self.cfg = cfg
        self.returned = [rng.standard_normal((*ids.shape, cfg.hidden)).astype(dtype) for ids in topk_ids]
        self.shared = [rng.standard_normal((len(ids), cfg.hidden)).astype(dtype) for ids in topk_ids]

    def __call__(self, rank, d):
        """Expert outputs of a rank in the order of d's rows; NaN in padding rows."""
        rows = np.full((int(d.row_offsets[-1]), self.cfg.hidden), np.nan, self.shared[0].dtype)
        if self.cfg.fused_shared_expert:
            share = shared_expert_share(self.cfg, rank, d.num_tokens)[1]
            rows[:share] = self.shared[rank][:share]
        for segment in segments(d):
            token, k = np.asarray(d.src_info)[segment.start : segment.end].T
            source = rank if self.cfg.skip_a2a else segment.src_rank
            rows[segment.start : segment.end] = self.returned[source][token, k]
        return rows


def _compared(args, seed, worlds):
    n_ranks = worlds.n_ranks if worlds.mpi else args.ranks
    cfg, launch, fused = random_world(seed, n_ranks, device.SIM and not worlds.mpi, args.p2p_world_size)
    record = {"seed": seed, "case": _described(cfg, fused), "rounds": args.rounds, "passed": True, "differences": []}
    try:
        with ExpertParallel(
            cfg, worlds.make(cfg.n_ranks, seed), launch=launch, fused=fused, kernels="plain", timeout=args.timeout
        ) as ep:
            compared = Compared(ep)
            found = compared.rounds([routing.make(cfg, [seed, n]) for n in range(args.rounds)], seed)
            record |= {
                "words": compared.words,
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
