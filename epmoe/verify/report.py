"""The output of `epmoe verify`: a round as pictures, a line for each round, the verdict, or one JSON object."""

import json
import re

from epmoe.verify import one_token, pictures

MAX_DIFFERENCES = 3


def heading(console, args, case, world, batch, notes):
    """The configuration and machine, with notes on a file of routing."""
    for note in notes:
        console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    c = case.cfg
    console.print(
        f"[bold]epmoe verify[/bold]  {c.n_ranks} ranks x {c.n_local_experts} experts, top-{c.top_k}, hidden "
        f"{c.hidden}, at most {c.max_tokens_per_rank} tokens a rank"
    )
    console.print(f"{case}; {world.machine.describe()}{'' if world.lists else ', one rank a process'}\n", style="dim")
    if batch is not None:
        console.print(f"{args.input}: {len(batch.x)} tokens", style="dim")


def routing(console, args, case, routed):
    """The routing of a round as a picture."""
    shows, matrix = pictures.routing(case.cfg, routed, console.width)
    console.print("[bold]1. Routing.[/bold] " + shows)
    console.print(matrix)
    odd = pictures.what_is_odd(routed)
    if odd and not args.input:
        console.print(odd, style="dim")


def first_round(console, args, case, r, rank):
    """Dispatch and one token of a round as pictures. With --counters also one rank's counters."""
    if r.dispatch_differences:
        return
    console.print(
        f"\n[bold]2. Dispatch.[/bold] Rank {rank} now has its rows grouped by expert: one matrix product each."
    )
    console.print(pictures.segments(case.cfg, rank, r.seen[rank]))
    token = one_token.of_round(case, r)
    if token is not None and not r.combine_differences:
        console.print("\n[bold]3. One token.[/bold] " + token.says())
        console.print(pictures.fitting(token.table(), console.width))
        console.print(token.total())
    if args.counters:
        console.print(
            f"\n[bold]Counters[/bold] of rank {rank}. Ranks and blocks wait for each other by polling them. Columns: "
            + _moments(r)
            + pictures.MEANING
            + " After the round all have their first values again, so the next "
            "round needs no reset."
        )
        console.print(pictures.fitting(pictures.counters(r.moments), console.width))
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


def round_line(console, case, r, seed):
    """One line on a round: tokens, messages, time, and what is equal."""
    sent = int(pictures.counts(case.cfg, r.routed.topk_ids).sum())
    where = f"seed {seed}, round {r.number}" if seed is not None else f"round {r.number}"
    console.print(
        f"{where}: {sum(r.routed.num_tokens)} tokens, {sent} messages, {r.kernel_seconds:.2f} s   dispatch "
        f"{_says(r.dispatch_differences)}   combine "
        + ("[dim]not run[/dim]" if r.dispatch_differences else _says(r.combine_differences))
    )


def _says(differences):
    return "[red]DIFFERS[/red]" if differences else "[green]equal[/green]"


def verdict(console, args, record, rounds):
    """PASS with a suggestion for the next command, or FAIL with the first differences."""
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


def as_json(record):
    """Readable JSON: objects over several lines, a list of numbers in one."""
    return re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(record, indent=1))


def round_record(case, r):
    """A round for --json."""
    return {
        "round": r.number,
        "num_tokens": r.routed.num_tokens,
        "routing": pictures.counts(case.cfg, r.routed.topk_ids).tolist(),
        "dispatch": "differs" if r.dispatch_differences else "equal",
        "combine": "not run" if r.dispatch_differences else "differs" if r.combine_differences else "equal",
        "differences": [d.record() for d in r.differences],
        "counters": {m: {n: a.tolist() for n, a in held.items()} for m, held in r.moments.items()},
        "kernel_seconds": round(r.kernel_seconds, 4),
        "reference_seconds": round(r.reference_seconds, 4),
    }
