"""The terminal output of a verification: routing, counters, and rows grouped by expert."""

import numpy as np
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from epmoe import layout

# Counter regions in the order in which a round uses them
REGIONS = "reserved finished rank_completion dispatch_recv_count A D E F G combine_recv_count combine_ready".split()
MEANING = (
    "reserved counts claimed slots, finished complete messages, and rank_completion the signals to each peer. "
    "recv_count holds the signals that have arrived. dispatch_wait resets these, and writes A, which tells "
    "combine which rows to send back. D to G and combine_ready order the blocks of a kernel. The fast kernels use "
    "some of these words differently."
)
LABEL_WIDTH = 19
GROUPS = 9  # shown at most


def fitting(table, width):
    """A Table without lines, with nothing cut off: if it is too wide, several, each of its first column and as many more
    as fit."""
    parts, used = [], width
    for column in table.columns[1:]:
        first, more = (2 + max(map(cell_len, (c.header, *c.cells))) for c in (table.columns[0], column))
        if used + more - 2 > width or not parts:
            parts.append([table.columns[0]])
            used = first
        parts[-1].append(column)
        used += more
    made = []
    for part in parts:
        title = None if made else table.title
        made.append(Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)))
        for c in part:
            made[-1].add_column(c.header, justify=c.justify, style=c.style, no_wrap=True)
        for cells in zip(*(c.cells for c in part)):
            made[-1].add_row(*cells)
    return Group(*made)


def counts(cfg, topk_ids):
    """int64 (n_ranks, n_experts): how many tokens a rank sends to an expert."""
    return np.stack(
        [np.bincount(np.asarray(ids)[np.asarray(ids) >= 0].ravel(), minlength=cfg.n_experts) for ids in topk_ids]
    )


def routing(cfg, routed, width=80):
    """(what it shows, the routing matrix): ranks x experts, with experts under their owners; ranks x ranks if experts do
    not fit."""
    matrix = counts(cfg, routed.topk_ids)
    per_owner = cfg.n_local_experts
    cell = max(2, len(str(matrix.max(initial=0))), len(str(cfg.n_experts - 1))) + 1
    cell = max(cell, -(-len(f"rank {cfg.n_ranks - 1}") // per_owner))
    if LABEL_WIDTH + cfg.n_experts * cell + 2 * cfg.n_ranks > width:
        shows = "Pairs (token, k) that each rank (line) sends to each rank (column)."
        return shows, _by_owner(cfg, routed, matrix, width)
    text = Text()
    text.append(" " * LABEL_WIDTH)
    for owner in range(cfg.n_ranks):
        text.append("│ " + f"rank {owner}".ljust(cell * per_owner), style="bold")
    text.append("\n" + "expert".rjust(LABEL_WIDTH - 1) + " ", style="dim")
    for e in range(cfg.n_experts):
        text.append(("│ " if e % per_owner == 0 else "") + str(e).rjust(cell), style="dim")
    for rank in range(cfg.n_ranks):
        text.append("\n" + f"rank {rank} ({_tokens(routed.num_tokens[rank])})".ljust(LABEL_WIDTH), style="bold")
        for e in range(cfg.n_experts):
            text.append("│ " if e % per_owner == 0 else "")
            text.append_text(_shaded(matrix[rank, e], matrix.max(initial=1), cell))
    text.append("\n" + "rows per expert".ljust(LABEL_WIDTH), style="dim")
    for e in range(cfg.n_experts):
        text.append(("│ " if e % per_owner == 0 else "") + str(matrix[:, e].sum()).rjust(cell), style="dim")
    return "How many tokens each rank (line) sends to each expert (column).", text


def _by_owner(cfg, routed, matrix, width):
    """Ranks x owners: the sum over each owner's experts, and the busiest experts in a line."""
    owners = matrix.reshape(cfg.n_ranks, cfg.n_ranks, cfg.n_local_experts).sum(axis=2)
    cell = max(len(str(owners.max(initial=0))), len(f"rank {cfg.n_ranks - 1}")) + 1
    shown = min(cfg.n_ranks, (width - LABEL_WIDTH - 4) // cell)
    text = Text(" " * LABEL_WIDTH)
    for owner in range(shown):
        text.append(f"rank {owner}".rjust(cell), style="bold")
    text.append(" ..." if shown < cfg.n_ranks else "")
    for rank in range(cfg.n_ranks):
        text.append("\n" + f"rank {rank} ({_tokens(routed.num_tokens[rank])})".ljust(LABEL_WIDTH), style="bold")
        for owner in range(shown):
            text.append_text(_shaded(owners[rank, owner], owners.max(initial=1), cell))
    loads = matrix.sum(axis=0)
    busiest = [f"e{e} {loads[e]}" for e in np.argsort(-loads, kind="stable")[:6]]
    idle = int((loads == 0).sum())
    text.append(f"\nbusiest experts: {', '.join(busiest)}; {idle} of {cfg.n_experts} get nothing", style="dim")
    return text


def what_is_odd(routed):
    """A sentence on ranks without tokens and ids of -1, which are intended; "" if there are none."""
    empty = [rank for rank, n in enumerate(routed.num_tokens) if n == 0]
    slots = sum(int((np.asarray(ids) < 0).sum()) for ids in routed.topk_ids)
    parts = [f"rank {', '.join(map(str, empty))} has no tokens"] if empty else []
    of_all = sum(np.asarray(ids).size for ids in routed.topk_ids)
    parts += [f"{slots} of {of_all} ids are -1, no expert"] if slots else []
    return f"Intended: {', and '.join(parts)}." if parts else ""


def _tokens(n):
    return "1 token" if n == 1 else f"{n} tokens"


def _shaded(n, most, cell):
    if n == 0:
        return Text("·".rjust(cell), style="dim")
    level = n / max(most, 1)
    red, green, blue = (int(a + (b - a) * level) for a, b in ((28, 255), (58, 176), (94, 0)))
    ink = "black" if level > 0.45 else "white"
    return Text(str(n).rjust(cell), style=f"{ink} on rgb({red},{green},{blue})")


def counters(moments):
    """Counter regions of one rank at several moments, {moment: {region: array}}: a line for each region."""
    table = Table()
    table.add_column("region", style="bold")
    for moment in moments:
        table.add_column(moment, justify="right")
    for name in REGIONS:
        table.add_row(name, *(_summary(name, held[name]) for held in moments.values()))
    return table


def _summary(name, words):
    """A region in a few characters: the sum of its counts, its number of signals, or its number of nonzero words."""
    words = np.asarray(words)
    if name.endswith("recv_count"):
        came = int((words != np.uint64(layout.MAX_FINITE)).sum())
        return f"{came} of {words.size}" if came else "none"
    if not words.any():
        return "0"
    if name in ("reserved", "finished"):
        return str(int(words.sum()))
    return str(int(words.flat[0])) if words.size == 1 else f"{int((words != 0).sum())} words"


def segments(cfg, rank, d):
    """The rows of one rank after dispatch: the rows of each expert, and how many came from each src_rank."""
    offsets = np.asarray(d.row_offsets).astype(np.int64)
    received = np.asarray(d.recv_count)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("expert", style="bold", no_wrap=True)
    table.add_column("rows", no_wrap=True)
    table.add_column("src_rank: rows from it")
    shift = int(cfg.fused_shared_expert)
    used = range(cfg.n_groups)
    if cfg.n_groups > GROUPS:
        used = [g for g in used if offsets[g + 1] > offsets[g]]
    for group in used[:GROUPS]:
        local = group - shift
        rows = f"{offsets[group]}:{offsets[group + 1]}"
        if local < 0:
            table.add_row("shared", rows, "this rank's own tokens")
            continue
        sources = [rank] if cfg.skip_a2a else range(cfg.n_ranks)
        parts = [f"{src}: {n}" for src, n in zip(sources, received[local]) if n]
        padding = int(offsets[group + 1] - offsets[group] - received[local].sum())
        parts += [f"{padding} padding"] if padding else []
        table.add_row(f"e{rank * cfg.n_local_experts + local}", rows, ",  ".join(parts) or "nothing")
    if cfg.n_groups > GROUPS:
        table.add_row("...", "", f"{len(used[GROUPS:])} more with rows, {cfg.n_groups - len(used)} without")
    return table
