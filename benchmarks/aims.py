"""`python -m benchmarks aims FILE.json ...`: targets and results as a Markdown table.

It takes a file for each number of GPUs. Results that a file lacks are left empty, and missed targets are marked.
"""

import sys

from benchmarks import host_time, pages, results, targets
from benchmarks.readme_table import of_kernels

MODEL = 7168, 256  # the hidden size and the experts that targets are about


def add_arguments(parser):
    """Add the options of aims."""
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="files of results, one for each number of GPUs")
    parser.add_argument(
        "--into", metavar="PAGE.md", help="put the table and its text into a page, replacing the existing table"
    )


def run(args):
    """Print or write the table. The exit status is 0, or 2 if no row has a target or the page has no such table."""
    records = [results.merged([results.read(file)]) for file in args.files]
    sizes = [record["n_ranks"] for record in records]
    if len(set(sizes)) < len(sizes):
        print(
            f"benchmarks aims: files of {', '.join(map(str, sizes))} GPUs; one for each number: merge the files of one "
            "(`python -m benchmarks merge`)",
            file=sys.stderr,
        )
        return 2
    lines = markdown(records)
    if not lines:
        print(f"benchmarks aims: no row that a target is about in {', '.join(args.files)}", file=sys.stderr)
        return 2
    return pages.shown(lines, below(records, args.files), args.into, "benchmarks aims")


def markdown(records):
    """The lines of the table; none if there is nothing to show."""
    columns = [_column(record) for record in records]
    names = sorted({name for column in columns for name in column}, key=_order)
    if not names:
        return []
    head = ["kernels", "tokens a rank", "what"]
    for record in records:
        head += [f"{record['n_ranks']} GPUs: target", "reached"]
    lines = [pages.row(head), pages.row("---" for _ in head)]
    for name in names:
        words = list(name)
        for column in columns:
            words += column.get(name, ("", ""))
        lines.append(pages.row(words))
    return lines


def _order(name):
    kernels, tokens, what = name
    first = ("pairs", "rows", "expert-major").index(kernels.split()[0])
    return first, tokens == "", int(tokens or 0), kernels, what != "dispatch", what


def _column(record):
    """{(kernels, tokens, what): (target, reached)} of one file. Verdicts on many shapes share one line."""
    found, together = {}, {}
    for v in targets.verdicts(record["rows"], record["n_ranks"]) if "H200" in record["device"] else ():
        if (v.shape.hidden, v.shape.experts) != MODEL:
            continue
        if v.unit == "us" and v.what != targets.HOST:
            name = of_kernels(v.kernels, v.shape), str(v.shape.tokens), v.what
            found[name] = f"{v.wanted:g}", f"{v.value:g}" + ("" if v.reached else " **missed**")
        else:
            tokens = str(v.shape.tokens) if v.kernels == "pairs plain" else ""  # PLAIN_SHAPE only
            name = v.kernels.removesuffix(" fused"), tokens, v.what.rpartition(", ")[2]
            together.setdefault(name, []).append(v)
    for name, of in together.items():
        values, missed = sorted(v.value for v in of), sum(not v.reached for v in of)
        slow = sum(v.slow and not v.reached for v in of)
        text = f"{values[0]:g} to {values[-1]:g}"
        text += f" **missed by {missed} of {len(of)} shapes**" if missed else ""
        text += f", {slow} of them on a slow CPU" if slow else ""
        found[name] = f"{'at least ' if of[0].unit == targets.OF_ALL else ''}{of[0].wanted:g}", text
    return found


def below(records, files):
    """A description of the table, in words."""
    of = "; ".join(
        f"{record['n_ranks']} GPUs: kernels of commit {results.commits(record)}, `{file}`"
        for record, file in zip(records, files)
    )
    return (
        "Targets, set from the best published libraries and from bare scatters of the same rows on the same machines "
        "(`benchmarks/targets.py`): microseconds of the slowest rank, median, launched without a CUDA graph; "
        f"{MODEL[0]} columns, {MODEL[1]} experts, top 8. A line without a number of tokens covers all measured shapes "
        "of that model. host: microseconds of host time for a dispatch call. against uniform: time with Zipf(1) routing "
        "over time with uniform routing. against fast: time of the plain kernels over time of the fast ones. speed with "
        "24 SMs: relative to all multiprocessors. "
        f"{_slow_cpus(records)}{of}."
    )


def _slow_cpus(records):
    """The meaning of "slow CPU", if the table has one."""
    if not any(
        v.slow and not v.reached for record in records for v in targets.verdicts(record["rows"], record["n_ranks"])
    ):
        return ""
    return (
        "Slow CPU: a fixed piece of Python, timed with the calls, took more than "
        f"{host_time.SLOW} times as long as elsewhere in the run. "
    )
