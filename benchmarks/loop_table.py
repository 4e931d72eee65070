"""The loops of a file of results as a Markdown table: a line for each interface, a column for each number of tokens."""

from benchmarks import loop, pages, results


def markdown(record):
    """The lines of the table; none if no loop was measured."""
    us = {(r["kernels"], r["tokens"], r["arrays"]): r["us"] for r in record.get("loop", [])}
    if not us:
        return []
    tokens = sorted({n for _, n, _ in us})
    headings = ["interface", *(f"{n} token{'s' * (n > 1)}" for n in tokens)]
    lines = [pages.row(headings), pages.row("---" for _ in headings)]
    for name in dict.fromkeys(name for name, _, _ in us):
        lines.append(pages.row([name, *(_cell(us, name, n) for n in tokens)]))
    return lines


def _cell(us, name, tokens):
    found = [us.get((name, tokens, arrays)) for arrays in loop.ARRAYS]
    return " / ".join("-" if x is None else f"{x:.1f}" if x < 100 else f"{x:.0f}" for x in found)


def below(record, files):
    """A description of the figures, in words. files: their names."""
    row, pieces = record["loop"][0], [r["piece_us"] for r in record["loop"]]
    device = record["device"].partition(",")[0]
    n, slow = record["n_ranks"], sum(bool(r.get("slow")) for r in record["loop"])
    return (
        f"Wall clock on {n} x {device}, {record['date'][:10]}, commit {results.commits(record)} "
        f"({', '.join(f'`{file}`' for file in files)}): microseconds a pair of dispatch and combine, {' / '.join(loop.ARRAYS)}; "
        f"{n} process{'es' * (n > 1)}, {row['hidden']} columns, {row['experts']} experts, top {row['top_k']}. "
        f"The fixed piece of Python took {min(pieces):.1f} to {max(pieces):.1f} us"
        + (f"; {slow} of {len(pieces)} figures were measured on a slow CPU." if slow else ".")
    )
