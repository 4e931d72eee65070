"""`python -m benchmarks table FILE.json ...`: the figures of docs/measured.md as a Markdown table, from results.

If the files have loops and no rows, it makes the table of loops."""

import sys

from benchmarks import loop_table, pages, peers, results, shapes

# kernels, format, routing, tokens: what docs/measured.md shows of a model of 7168 columns and 256 experts
LINES = (
    ("pairs fused", "bf16", "uniform", (1, 128, 1024, 4096)),
    ("pairs fused", "fp8", "uniform", (128, 4096)),
    ("pairs plain", "bf16", "uniform", (128, 4096)),
    ("rows", "bf16", "uniform", (1, 128, 1024, 4096)),
    ("rows", "bf16", "zipf", (4096,)),
    ("rows", "fp8", "uniform", (128, 4096)),
    ("expert-major", "bf16", "uniform", (128, 4096)),
)
HEADINGS = (
    "kernels",
    "tokens a rank",
    *("dispatch", "floor", "x floor", "best other"),
    *("combine", "floor", "x floor", "best other"),
)


def add_arguments(parser):
    """Add the options of table."""
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="files of results, the newest last")
    parser.add_argument(
        "--into",
        metavar="PAGE.md",
        help="put the table and its text into a page, replacing the table for the same number of GPUs",
    )
    parser.add_argument("--hidden", type=int, default=7168, help="(default %(default)s)")
    parser.add_argument("--experts", type=int, default=256, help="(default %(default)s)")


def run(args):
    """Print or write the table. The exit status is 0, or 2 if no row fits or the page has no such table."""
    record = results.merged([results.read(file) for file in args.files])
    peers.annotate(record)
    lines = markdown(record, args.hidden, args.experts)
    if not lines and record.get("loop"):
        words = loop_table.below(record, args.files)
        return pages.shown(loop_table.markdown(record), words, args.into, "benchmarks table")
    if not lines:
        print(
            f"benchmarks table: no row with {args.hidden} columns and {args.experts} experts in "
            f"{', '.join(args.files)}",
            file=sys.stderr,
        )
        return 2
    return pages.shown(lines, below(record, args.files, args.hidden, args.experts), args.into, "benchmarks table")


def markdown(record, hidden=7168, experts=256):
    """The lines of the table; none if no row fits."""
    rows = {
        (r["kernels"], r["phase"], shapes.of_row(r)): r
        for r in record["rows"]
        # as a graph, since launches of plain kernels keep the host busy for longer than the device
        if r["graph"] == (r["kernels"] == "pairs plain") and r["sms"] is None
    }
    lines = []
    for kernels, format, routing, tokens in LINES:
        for n in tokens:
            shape = shapes.Shape(n, hidden, experts, format=format, routing=routing)
            found = [rows.get((kernels, phase, shape)) for phase in ("dispatch", "combine")]
            if format != "bf16":
                found[1] = None  # combine sends bf16 in any case
            if any(found):
                lines.append(_line(kernels, shape, found))
    if not lines:
        return []
    head = [pages.row(HEADINGS), pages.row("---" for _ in HEADINGS)]
    return [*head, *lines]


def below(record, files, hidden=7168, experts=256):
    """A description of the figures, in words. files: their names."""
    link = sorted({part["link_gbps"] for part in record["parts"]})
    device = record["device"].partition(",")[0]
    return (
        f"Microseconds on {record['n_ranks']} x {device}, {record['date'][:10]}, kernels of commit "
        f"{results.commits(record)} ({', '.join(f'`{file}`' for file in files)}): device time of the slowest rank, "
        f"median, cold L2; {hidden} columns, {experts} experts, top {record['rows'][0]['top_k']}. Floor: the "
        "bytes that the busiest rank sends to or receives from others, divided by the links' speed of "
        f"{' to '.join(f'{gbps:g}' for gbps in (link[:1] + link[1:][-1:]))} GB/s, measured in the same run. "
        "† marks a figure from an earlier run on the same kind of machine."
    )


def _line(kernels, shape, found):
    words = [of_kernels(kernels, shape), str(shape.tokens)]
    for r in found:
        if r is None:
            words += [""] * 4
            continue
        name = f"{pages.us(r['peer_us'])} {short(r['peer'])}{'' if r['peer_here'] else '†'}" if r["peer"] else "-"
        words += [f"**{pages.us(r['us'])}**", pages.us(r["floor_us"]), _ratio(r["to_floor"]), name]
    return pages.row(words)


def of_kernels(kernels, shape):
    """The name of kernels in a table, with a shape's format and routing."""
    return " ".join(
        [kernels.removesuffix(" fused")]
        + [shape.format] * (shape.format != "bf16")
        + ["Zipf"] * (shape.routing == "zipf")
    )


def short(peer):
    """A peer's name in a table."""
    return {"nccl all-to-all": "NCCL", "DeepEP low latency": "DeepEP LL"}.get(peer, peer)


def _ratio(ratio):
    return "-" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
