"""Writes a report as one self-contained HTML page."""

from html import escape

from epmoe.routing_report.interfaces import INTERFACES
from epmoe.routing_report.measured import machine
from epmoe.routing_report.text import shown, size, stat, steps

COLOURS = {"pairs_plain": "#9aa5b1", "pairs": "#2f6fb0", "rows": "#2e8b57", "expert_major": "#c2681c"}
MOST_CELLS = 64  # ranks, and columns of experts, of a heat map
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2733; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .5rem 0; } .wide { overflow-x: auto; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #dde3ea; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .best td { background: #eef6f0; font-weight: 600; }
.note { color: #52606d; font-size: .9rem; } svg text { font: 12px system-ui, sans-serif; fill: #1d2733; }
.take { border-left: 4px solid #2e8b57; padding: .2rem 1rem; background: #f4f8f5; }
"""


def page(found):
    """The page of a report, as text."""
    parts = [
        f"<h1>Routing of {escape(found['file'])}</h1>",
        f"<p>{found['tokens']:,} tokens{steps(found)}, top-{found['top_k']} of {found['n_experts']} experts, hidden "
        f"{found['hidden']}, {found['format']}, on {found['n_ranks']} ranks.</p>",
        "".join(f'<p class="note">Note: {escape(line)}.</p>' for line in found["assumed"]),
        _take(found),
        "<h2>Who sends to whom</h2>",
        "<p>Pairs (token, expert) from src_rank (line) to dst_rank (column). The diagonal stays on its rank; an empty "
        "line is a rank without tokens.</p>",
        _heat_map(found["pairs"]),
        "<h2>Load of each expert</h2>",
        _imbalance(found),
        _experts(found),
        "<h2>What it costs</h2>",
        _costs(found),
        "<h2>What if there were more ranks, or fewer?</h2>",
        "<p>The same tokens, spread evenly. With more ranks each has a smaller share, but a token visits more of "
        "them. Floors assume that every rank reaches every other at the same speed. Beyond 8 ranks, some links are "
        "often a slower network, so there are times only with --link-gbps.</p>",
        _sweep(found),
        _sweep_chart(found),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><title>Routing of {escape(found["file"])}</title><style>{STYLE}</style><body>'
        f"{''.join(parts)}</body></html>\n"
    )


def _take(found):
    why = "".join(f"<li>{escape(line)}</li>" for line in found["take"]["why"])
    return f'<div class="take"><p><b>Use {escape(found["take"]["is"])}.</b></p><ul>{why}</ul></div>'


def _shade(share):
    """A blue for a share of 0 to 1."""
    red, green, blue = (round(255 + share * (dark - 255)) for dark in (18, 74, 135))
    return f"rgb({red},{green},{blue})"


def _heat_map(matrix):
    """An SVG of the pairs from src_rank (line) to dst_rank (column). If there are many ranks, neighbours are summed."""
    group = -(-len(matrix) // MOST_CELLS)
    of = list(range(0, len(matrix), group))
    cells = [[sum(sum(line[j : j + group]) for line in matrix[i : i + group]) for j in of] for i in of]
    most, side = max(max(map(max, cells)), 1), max(10, min(36, 640 // len(of)))
    parts = []
    for i, line in enumerate(cells):
        for j, value in enumerate(line):
            at = f'x="{60 + j * side}" y="{30 + i * side}"'
            parts.append(
                f'<rect {at} width="{side - 1}" height="{side - 1}" fill="{_shade(value / most)}">'
                f"<title>src_rank {of[i]} to dst_rank {of[j]}: {value:,}</title></rect>"
            )
        if side >= 14 or i % 4 == 0:
            parts.append(f'<text x="54" y="{30 + i * side + side / 2 + 4}" text-anchor="end">{of[i]}</text>')
            parts.append(f'<text x="{60 + i * side + side / 2}" y="24" text-anchor="middle">{of[i]}</text>')
    extent = len(of) * side
    grouped = f"Each cell stands for {group} x {group} ranks. " if group > 1 else ""
    most = max(map(max, cells))
    note = f'<p class="note">{grouped}White is 0, the darkest cell {most:,} pairs. Point at a cell for its number.</p>'
    return (
        f'<div class="wide"><svg width="{extent + 70}" height="{extent + 40}" role="img" aria-label="heat map of '
        f'pairs by src_rank and dst_rank"><text x="60" y="10">dst_rank</text><text x="0" y="24">src_rank</text>'
        f"{''.join(parts)}</svg>"
        f"</div>{note}"
    )


def _experts(found):
    """Bars for the pairs of each expert; the shade changes with the rank."""
    loads, local = found["pairs_by_expert"], found["n_experts"] // found["n_ranks"]
    width = max(1, min(16, 900 // len(loads)))
    most, mean = max(max(loads), 1), sum(loads) / len(loads)
    bars = "".join(
        f'<rect x="{i * width}" y="{110 - 100 * n / most:.1f}" width="{max(width - 1, 1)}" '
        f'height="{100 * n / most:.1f}" fill="{"#2f6fb0" if i // local % 2 else "#7fb0dd"}"><title>expert '
        f"{i} of rank {i // local}: {n:,} pairs</title></rect>"
        for i, n in enumerate(loads)
    )
    level = 110 - 100 * mean / most
    return (
        f'<div class="wide"><svg width="{len(loads) * width + 60}" height="130" role="img" aria-label="pairs of '
        f'each expert">{bars}<line x1="0" x2="{len(loads) * width}" y1="{level:.1f}" y2="{level:.1f}" '
        f'stroke="#c2331c" stroke-dasharray="4 3"/><text x="{len(loads) * width + 4}" y="{level + 4:.1f}">mean'
        f'</text></svg></div><p class="note">Experts in order; the shade changes with the rank.</p>'
    )


def _table(head, lines, best=None):
    body = "".join(
        f"<tr{' class=best' if name == best else ''}><td>" + "</td><td>".join(cells) + "</td></tr>"
        for name, cells in lines
    )
    return f'<div class="wide"><table><tr><th>{"</th><th>".join(head)}</th></tr>{body}</table></div>'


def _imbalance(found):
    which, keys = shown(found), ("max_over_mean", "gini")
    head = ["", *(f"{name}{'' if len(which) == 1 else ', ' + w}" for name in ("max / mean", "Gini") for w in which)]
    lines = [
        (side, [f"{side}s", *(stat(found["imbalance"][side][key], w, 2) for key in keys for w in which)])
        for side in ("rank", "expert")
    ]
    return _table(head, lines)


def _costs(found):
    times = ("floor us", "expected us")
    head, lines = ["busiest rank", "dispatch", *times, "combine", *times, "result", "memory a rank"], []
    for name in INTERFACES:
        way = found["interfaces"][name]
        if way["not_offered"]:
            lines.append((name, [escape(way["is"]), "not possible", *7 * [""]]))
            continue
        cells = [escape(way["is"])]
        for phase in ("dispatch", "combine"):
            cost = way[phase]
            cells += [size(cost["busiest_bytes"]["median"]), stat(cost["floor_us"]), stat(cost["expected_us"])]
        lines.append((name, [*cells, size(way["result_bytes"]["median"]), size(way["memory_bytes"])]))
    of = found["measured"]
    return _table(head, lines, found["take"]["interface"]) + (
        f'<p class="note">{"Medians over steps. " if found["steps"] > 1 else ""}'
        "Floor: the bytes of the busiest rank at "
        f"{found['link_gbps']:g} GB/s each way. Expected: this floor plus the time that our kernels took on "
        f"{escape(machine(of))} ({of['date']}, commit {of['commit']}) beyond "
        "their floor. Memory: buffers, counters and results of one round.</p>"
    )


def _sweep(found):
    ways = [i for i in INTERFACES if any(line["interfaces"][i]["round_us"] is not None for line in found["sweep"])]
    head = ["ranks", "tokens each", "max / mean", *(f"{INTERFACES[i]}, us" for i in ways), "take"]
    lines = []
    for line in found["sweep"]:
        cells = [
            str(line["n_ranks"]),
            stat(line["tokens_per_rank"], "max", 0),
            stat(line["rank_max_over_mean"], digits=2),
        ]
        cells += [stat(line["interfaces"][i]["round_us"]) for i in ways]
        lines.append((line["n_ranks"], [*cells, escape(INTERFACES[line["take"]])]))
    return _table(head, lines, found["n_ranks"]) + (
        '<p class="note">Microseconds of dispatch and combine, as expected (-: not measured, or not possible).</p>'
    )


def _sweep_chart(found):
    """Lines of the known floors of a round against the number of ranks."""
    sweep = found["sweep"]
    floors = {i: [line["interfaces"][i]["floor_us"] for line in sweep] for i in INTERFACES}
    most = max([us for of_way in floors.values() for us in of_way if us is not None] + [1e-9])
    step = 640 / max(len(sweep) - 1, 1)
    parts = [
        f'<text x="{60 + n * step:.0f}" y="236" text-anchor="middle">{line["n_ranks"]}</text>'
        for n, line in enumerate(sweep)
    ]
    for row, i in enumerate(i for i in INTERFACES if set(floors[i]) != {None}):
        points = [(60 + n * step, 210 - 190 * us / most, n) for n, us in enumerate(floors[i]) if us is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[i]}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[i]}"><title>{INTERFACES[i]}, '
            f"{sweep[n]['n_ranks']} ranks: floor {floors[i][n]:.1f} us</title></circle>"
            for x, y, n in points
        ]
        parts.append(
            f'<rect x="720" y="{20 + 22 * row}" width="12" height="12" fill="{COLOURS[i]}"/>'
            f'<text x="738" y="{30 + 22 * row}">{INTERFACES[i]}</text>'
        )
    return (
        f'<div class="wide"><svg width="920" height="260" role="img" aria-label="floors against ranks"><text x="60" '
        f'y="12">floor of dispatch and combine, us (top: {most:,.1f})</text><line x1="60" x2="700" y1="210" '
        f'y2="210" stroke="#9aa5b1"/>{"".join(parts)}<text x="380" y="256" text-anchor="middle">ranks</text></svg>'
        "</div>"
    )
