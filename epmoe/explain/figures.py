"""The figures of the page as files: SVG, and PNG where resvg (extra `explain`) can draw them."""

from pathlib import Path

from epmoe_ref.errors import UnavailableError

from epmoe.explain import buffers, counters, routing, rows, svg, timeline, way_back
from epmoe.explain.page import busiest

REMEDY = "pip install 'epmoe[explain]'"


def drawn(history):
    """{name: SVG text} of every figure, and `dispatch`, which has routing, recv_buf and rows in one picture."""
    cfg = history.recording.cfg
    legend = svg.wrapped(svg.rank_legend(range(cfg.n_ranks)), 620)
    names = {
        "routing": ([routing.panel(history), legend], 700, None),
        "recv_buf": ([*buffers.panels(history), _notes(legend, buffers.legend_text(history))], 1200,
                     "messages in recv_buf"),
        "rows": ([*rows.panels(history), legend], 1200, "rows grouped by expert"),
        "counters": ([counters.snapshots(history, busiest(history))], 1200, None),
        "timeline": ([*timeline.panels(history), svg.wrapped(timeline.legend(), 1000)], 1112, None),
        "combine": ([way_back.flow(history), *way_back.panels(history), legend], 1480, "combine's way back"),
    }
    made = {name: svg.figure(panels, width, heading) for name, (panels, width, heading) in names.items()}
    return made | {"dispatch": overview(history)}


def overview(history):
    """Dispatch in one picture: the routing, and the rows that each rank holds; for a README."""
    legend = svg.wrapped(svg.rank_legend(range(history.recording.cfg.n_ranks)), 900)
    columns = [routing.panel(history), *rows.panels(history, n_values=0)]
    return svg.figure([*columns, legend], 2 * svg.MARGIN + sum(c.width + svg.GAP for c in columns),
                      "dispatch: who sends what to whom, and the rows that each rank holds then")


def _notes(legend, lines):
    body = legend.body + "".join(svg.text(0, legend.height + 18 + 17 * n, line, "m small")
                                 for n, line in enumerate(lines))
    return svg.Panel("", max(legend.width, 620), legend.height + 22 + 17 * len(lines), body)


def write(history, folder, kinds):
    """Write every figure into a folder, as "svg" and "png"; returns the paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in drawn(history).items():
        if "svg" in kinds:
            paths.append(folder / f"{name}.svg")
            paths[-1].write_text(text, encoding="utf-8")
        if "png" in kinds:
            paths.append(folder / f"{name}.png")
            paths[-1].write_bytes(png(text))
    return paths


def needs_resvg():
    """The module that draws PNG files; raises UnavailableError without it."""
    try:
        import resvg_py
    except ImportError:
        what = f"PNG files need resvg, which is not installed: {REMEDY}; SVG files need nothing"
        raise UnavailableError(what) from None
    return resvg_py


def png(text, zoom=2):
    """PNG bytes of an SVG text, in its light colours; raises UnavailableError without resvg."""
    resvg_py = needs_resvg()
    return bytes(resvg_py.svg_to_bytes(svg_string=text, zoom=zoom))
