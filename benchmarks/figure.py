"""`python -m benchmarks figure FILE.json ...`: time against tokens, one panel an operation, with floor and peers."""

import sys
from pathlib import Path

from benchmarks import peers, results, shapes
from benchmarks.readme_table import short
from epmoe.provenance import install

# title, kernels, phase
PANELS = (
    ("pairs: dispatch", ("pairs fused",), "dispatch"),
    ("pairs: combine", ("pairs fused",), "combine"),
    ("rows: dispatch", ("rows", "expert-major"), "dispatch"),
    ("rows: combine", ("rows", "expert-major"), "combine"),
)
# Okabe and Ito's colours, which everybody can tell apart, and a marker each. Ours: lines. Peers of the same run:
# dashed. Constants: the marker alone, hollow.
LOOKS = {
    "pairs fused": ("#0072B2", "o"),
    "rows": ("#0072B2", "o"),
    "expert-major": ("#56B4E9", "v"),
    "nccl all-to-all": ("#D55E00", "s"),
    "DeepEP low latency": ("#CC79A7", "^"),
    "DeepEP V1": ("#009E73", "D"),
    "DeepEP V2": ("#E69F00", "P"),
}
WIDTH_INCHES, HEIGHTS_INCHES = 8.0, {1: 3.9, 2: 6.4}  # height by lines of panels
LOWEST_US = 4  # only the floor of a few tokens is lower


def add_arguments(parser):
    """Add the options of figure."""
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="files of results, the newest last")
    parser.add_argument(
        "--out",
        metavar="STEM",
        default="benchmarks/results/time-against-tokens",
        help="STEM.svg is written (default %(default)s)",
    )
    parser.add_argument("--hidden", type=int, default=7168, help="(default %(default)s)")
    parser.add_argument("--experts", type=int, default=256, help="(default %(default)s)")
    parser.add_argument("--format", default="bf16", choices=shapes.FORMATS, help="(default %(default)s)")
    parser.add_argument("--routing", default="uniform", choices=shapes.ROUTINGS, help="(default %(default)s)")


def curves(record, kernels, phase, fits):
    """The curves of a panel: {name: [(tokens, us)]} of ours and of peers in this run, of constants, and the floor.

    fits: shape -> whether it belongs to the picture.
    """
    lines, floor, constants = {}, {}, {}
    for r in record["rows"]:
        shape, here = shapes.of_row(r), r["kernels"]
        if r["phase"] == phase and not r["graph"] and r["sms"] is None and fits(shape):
            if here in kernels or here in peers.of_kernels(kernels[0]):
                lines.setdefault(here, {})[shape.tokens] = r["us"]
            if here == kernels[0]:
                floor[shape.tokens] = r["floor_us"]
    for p, us in peers.constants(record["device"], record["n_ranks"]):
        shape = shapes.parse(p.shape)
        if p.phase == phase and fits(shape) and p.name in peers.of_kernels(kernels[0]):
            constants.setdefault(p.name, {})[shape.tokens] = us
    as_points = [{name: sorted(points.items()) for name, points in found.items()} for found in (lines, constants)]
    return (*as_points, sorted(floor.items()))


def run(args):
    """Draw the figure. The exit status is 0, or 2 if it cannot be drawn."""
    try:
        import matplotlib
    except ImportError:
        print(f"benchmarks figure: matplotlib is not installed: {install('bench')}, or matplotlib", file=sys.stderr)
        return 2
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    record = results.merged([results.read(file) for file in args.files])
    wanted = {"hidden": args.hidden, "experts": args.experts, "format": args.format, "routing": args.routing}

    def fits(shape):
        return all(getattr(shape, name) == value for name, value in wanted.items())

    if not any(fits(shapes.of_row(r)) for r in record["rows"]):
        print(f"benchmarks figure: no row with {wanted} in {', '.join(args.files)}", file=sys.stderr)
        return 2
    plt.rcParams.update(
        {
            "font.size": 10,
            "svg.fonttype": "path",
            "svg.hashsalt": "epmoe",
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    # combine sends bf16 in any case
    shown = [panel for panel in PANELS if args.format == "bf16" or panel[2] == "dispatch"]
    n = len(shown) // 2
    fig, panels = plt.subplots(
        n, 2, figsize=(WIDTH_INCHES, HEIGHTS_INCHES[n]), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (title, kernels, phase) in zip(panels.flat, shown):
        _panel(axes, title, kernels, curves(record, kernels, phase, fits))
    ticks = sorted({r["tokens"] for r in record["rows"] if fits(shapes.of_row(r))})
    for axes in panels[-1]:
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set_xlabel("tokens a rank")
    for axes in panels[:, 0]:
        axes.set_ylabel("microseconds")
        axes.set_ylim(bottom=LOWEST_US)
        axes.set_yticks((10, 100, 1000), ("10", "100", "1000"))
    fig.suptitle(
        f"{record['n_ranks']} x {record['device'].partition(',')[0]}, {args.hidden} columns, top 8 of "
        f"{args.experts} experts, {args.format}, {args.routing} routing; epmoe {results.commits(record)}",
        fontsize=10,
    )
    handles = {label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels())}
    titled = any(label.endswith("*") for label in handles)
    fig.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        columnspacing=1.2,
        handletextpad=0.5,
        title="* measured before, not in this run" if titled else None,
        title_fontsize=9,
    )
    file = Path(f"{args.out}.svg")
    file.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(file, facecolor="white", metadata={"Date": None})
    print(f"written: {file}")
    plt.close(fig)
    return 0


def _panel(axes, title, kernels, found):
    lines, constants, floor = found
    axes.set(xscale="log", yscale="log")
    axes.minorticks_off()
    axes.set_title(title, fontsize=11, loc="left", fontweight="bold")
    axes.grid(alpha=0.25, linewidth=0.6)
    if floor:
        axes.plot(*zip(*floor), color="#333333", linestyle=":", linewidth=1.8, label="floor")
    for name, points in lines.items():
        ours, (colour, marker) = name in kernels, LOOKS[name]
        label = f"epmoe, {name}" if name == "expert-major" else "epmoe" if ours else short(name)
        axes.plot(
            *zip(*points),
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=2.2 if ours else 1.4,
            linestyle="-" if ours else "--",
            label=label,
            zorder=3 if ours else 2,
        )
    for name, points in constants.items():
        colour, marker = LOOKS[name]
        points = [point for point in points if point[0] not in dict(lines.get(name, ()))]
        if points:
            axes.plot(
                *zip(*points),
                color=colour,
                marker=marker,
                markersize=7,
                markerfacecolor="white",
                markeredgewidth=1.6,
                linestyle="none",
                label=f"{short(name)}*",
                zorder=4,
            )
