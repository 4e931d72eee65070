"""Shows a report in the terminal."""

import numpy as np
from rich.console import Console
from rich.table import Table

from epmoe.lessons.telling import wrapped
from epmoe.routing_report import counts, measured
from epmoe.routing_report.interfaces import INTERFACES
from epmoe.verify.pictures import fitting

MOST_RANKS_SHOWN = 16
SHADES = " ░▒▓█"
PERCENTILES = ("median", "p90", "p99", "max")


def show(found, page=None):
    """Print a report."""
    console = Console(highlight=False, width=Console().width)
    console.print(_head(found))
    for line in found["assumed"]:
        console.print(wrapped(f"  note: {line}", console.width))
    console.print()
    console.print(fitting(_imbalance(found), console.width))
    heat = heat_map(found["pairs"]) if found["n_ranks"] <= MOST_RANKS_SHOWN else ""
    console.print(heat if max(map(len, heat.splitlines()[2:]), default=0) <= console.width else "")
    console.print(fitting(_costs(found), console.width))
    of = found["measured"]
    console.print(
        "busiest rank: the most that one rank sends to others, or receives. memory: of each rank. expected: this floor "
        f"plus the time by which our kernels exceeded their floor on {measured.machine(of)} ({of['date']}).",
        style="dim",
    )
    console.print(f"\nUse [bold]{found['take']['is']}[/bold]:")
    for why in found["take"]["why"]:
        console.print(wrapped(f"  - {why}", console.width))
    console.print(
        f"\nWritten: {page}" if page else "\nNext: --html PAGE.html draws it, and compares other numbers of ranks"
    )


def number(value, digits=1):
    """A number for a table; - for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def stat(of_steps, which="median", digits=1):
    """One of {median, p90, p99, max} for a table; - for None."""
    return number(of_steps and of_steps[which], digits)


def size(nbytes):
    """Bytes in a unit of 1000."""
    if nbytes is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000


def steps(found):
    """The number of steps, if there are several."""
    return "" if found["steps"] == 1 else f" in {found['steps']} steps"


def shown(found):
    """Which of {median, p90, p99, max} to show; for one step all are equal."""
    return ("median",) if found["steps"] == 1 else PERCENTILES


def _tokens(n):
    return "1 token" if n == 1 else f"{n:,} tokens"


def _head(found):
    n_empty = found["empty_slots"]
    empty = f", {n_empty:,} id{'s' * (n_empty != 1)} of -1 (no expert)" if n_empty else ""
    return (
        f"{found['file']}: {_tokens(found['tokens'])}{steps(found)}, top-{found['top_k']} of {found['n_experts']} experts"
        f"{empty}; {found['n_ranks']} ranks with at most {_tokens(int(found['tokens_per_rank']['max']))} each"
    )


def _imbalance(found):
    table = Table(title="imbalance of pairs (token, expert)")
    table.add_column("")
    for name in ("max / mean", "Gini"):
        for which in shown(found):
            table.add_column(name if which == "median" else which, justify="right")
    table.add_column("busiest, pairs", justify="left")
    for side, loads in (("rank", found["pairs_by_rank"]), ("expert", found["pairs_by_expert"])):
        both = found["imbalance"][side]
        cells = [stat(both[key], which, 2) for key in ("max_over_mean", "gini") for which in shown(found)]
        most = max(range(len(loads)), key=loads.__getitem__)
        table.add_row(f"{side}s", *cells, f"{side} {most}: {loads[most]:,}")
    return table


def heat_map(pairs):
    """Lines of a map from src_rank (line) to dst_rank (column), darker where more pairs go."""
    matrix = np.array(pairs)
    most = max(int(matrix.max()), 1)
    lines = ["", "pairs from src_rank (line) to dst_rank (column); darkest " + f"{most:,}"]
    lines.append("     " + "".join(f"{rank:>3}" for rank in range(len(matrix))))
    for rank, line in enumerate(matrix):
        cells = "".join(" " + 2 * SHADES[-(-4 * int(n) // most)] for n in line)
        lines.append(f"{rank:>4} {cells}  {int(counts.off_rank(matrix)[rank].sum()):,} leave")
    return "\n".join(lines) + "\n"


def _costs(found):
    known = found["interfaces"]["pairs"]["dispatch"]["floor_us"] is not None
    table = Table(
        title=f"busiest rank, {found['format']}"
        + (f" at {found['link_gbps']:g} GB/s each way, times in us" if known else "")
        + ("" if found["steps"] == 1 else ", median step (p99)")
    )
    for name in ("", "bytes", "floor", "expected", "memory"):
        table.add_column(name, justify="right" if name else "left")
    for name in INTERFACES:
        way = found["interfaces"][name]
        if way["dispatch"] is None:
            table.add_row(way["is"], "not possible", "", "", "")
            continue
        table.add_row(way["is"], "", "", "", size(way["memory_bytes"]))
        for phase in ("dispatch", "combine"):
            cells = [_with_tail(found, way[phase][key]) for key in ("floor_us", "expected_us")]
            table.add_row(f"  {phase}", size(way[phase]["busiest_bytes"]["median"]), *cells)
    return table


def _with_tail(found, us):
    return stat(us) if us is None or found["steps"] == 1 else f"{stat(us)} ({stat(us, 'p99')})"
