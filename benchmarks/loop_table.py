"""The loops of a file of results as a Markdown table: a line for each interface, a column for each number of tokens."""

from benchmarks import loop, pages, results

LABELS = {  # contender: interface, for readers
    "ExpertParallel": "`ExpertParallel`",
    "fused_a2a on device": "`fused_dispatch_on_device`",
    "epmoe.torch on device": "torch `fused_dispatch_on_device`",
    "epmoe.torch exact": "torch `fused_dispatch`, host waits",
    "epmoe.torch HybridEP, budget": "torch `hybrid_ep_dispatch`, no host wait",
    "epmoe.torch HybridEP, exact": "torch `hybrid_ep_dispatch`, host waits",
    "epmoe.torch training step, on device": "torch training step, no host wait",
    "epmoe.torch training step, exact": "torch training step, host waits",
    "DeepEP V1": "DeepEP V1, no host wait",
}


def markdown(record):
    """The lines of the table; none if no loop was measured. A star: fewer than ENOUGH repeats had a fast CPU."""
    of = {(r["kernels"], r["tokens"], r["arrays"]): r for r in record.get("loop", [])}
    if not of:
        return []
    tokens = sorted({n for _, n, _ in of})
    headings = ["interface", *(f"{n} token{'s' * (n > 1)}" for n in tokens)]
    lines = [pages.row(headings), pages.row("---" for _ in headings)]
    for name in dict.fromkeys(name for name, _, _ in of):
        lines.append(pages.row([LABELS.get(name, name), *(_cell(of, name, n) for n in tokens)]))
    return lines


def _cell(of, name, tokens):
    found = [of.get((name, tokens, arrays)) for arrays in loop.ARRAYS]
    words = ["-" if r is None else pages.us(r["us"]) + "*" * bool(r.get("slow")) for r in found]
    while words[1:] and words[-1] == "-":
        words.pop()
    return " / ".join(words)


def below(record, files):
    """A description of the figures, in words. files: their names."""
    row, device, n = record["loop"][0], record["device"].partition(",")[0], record["n_ranks"]
    commits = results.commits(record)
    return (
        f"Wall clock on {n} x {device}, {record['date'][:10]}, commit{'s' * (' ' in commits)} {commits} "
        f"({', '.join(f'`{file}`' for file in files)}): microseconds per pair of dispatch and combine, "
        f"{' / '.join(loop.ARRAYS)}; {n} process{'es' * (n > 1)} on one host, hidden size {row['hidden']}, "
        f"{row['experts']} experts, top {row['top_k']}. A star: measured on a slow CPU."
    )
