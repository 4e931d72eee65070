"""`python -m benchmarks figure FILE.json ...`: time against tokens, a panel a phase, with the floor and the peers."""

import sys
from collections import defaultdict

from benchmarks import results


def add_arguments(parser):
    """The options of figure."""
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="files of results")
    parser.add_argument("--out", default="benchmarks/results/time-against-tokens.svg", metavar="FILE",
                        help="the picture (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--format", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--routing", default="uniform", choices=("uniform", "zipf"))


def curves(rows, phase):
    """{(kernels, graph): [(tokens, us)]} and {(tokens, floor us)} by kernels, of one phase, ascending."""
    times, floors = defaultdict(dict), defaultdict(dict)
    for r in rows:
        if r["phase"] == phase:
            times[r["kernels"] + (" (graph)" if r["graph"] else "")][r["tokens"]] = r["us"]
            floors["pairs" if r["kernels"].startswith("pairs") else "rows"][r["tokens"]] = r["floor_us"]
    return ({name: sorted(points.items()) for name, points in times.items()},
            {name: sorted(points.items()) for name, points in floors.items() if any(points.values())})


def run(args):
    """Draw; the exit status is 0, or 2 if no row fits."""
    try:
        import matplotlib
    except ImportError:
        print("benchmarks figure: matplotlib is not installed: pip install matplotlib", file=sys.stderr)
        return 2
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [results.read(file) for file in args.files]
    wanted = {"hidden": args.hidden, "format": args.format, "routing": args.routing}
    rows = [r for record in records for r in record["rows"] if all(r[k] == v for k, v in wanted.items())]
    if not rows:
        print(f"benchmarks figure: no row with {wanted} in {', '.join(args.files)}", file=sys.stderr)
        return 2
    fig, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axes, phase in zip(panels, ("dispatch", "combine")):
        times, floors = curves(rows, phase)
        for name, points in times.items():
            axes.plot(*zip(*points), marker="o", label=name)
        for name, points in floors.items():
            axes.plot(*zip(*points), color="grey", linestyle="--" if name == "pairs" else ":", label=f"floor, {name}")
        axes.set(xscale="log", yscale="log", xlabel="tokens a rank", title=phase)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("microseconds, slowest rank, median")
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    panels[1].legend(handles.values(), handles.keys(), fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    first = records[0]
    fig.suptitle(f"{first['device']}, {first['n_ranks']} ranks; hidden {args.hidden}, {args.format}, {args.routing}; "
                 f"{first['date'][:10]}", fontsize=10)
    fig.savefig(args.out, bbox_inches="tight")
    print(f"written: {args.out}")
    return 0
