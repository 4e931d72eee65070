"""Rows as one table on the terminal; microseconds, decimal gigabytes."""

COLUMNS = (("kernels", "<", "kernels"), ("phase", "<", "phase"), ("tokens", ">", "tokens"), ("hidden", ">", "hidden"),
           ("experts", ">", "experts"), ("format", "<", "format"), ("routing", "<", "routing"), ("graph", "<", "graph"),
           ("us", ">", "us"), ("p20_us", ">", "p20"), ("p80_us", ">", "p80"), ("MB", ">", "MB to others"),
           ("gbps", ">", "GB/s"), ("floor_us", ">", "floor us"), ("to_floor", ">", "x floor"),
           ("host_us", ">", "host us"))


def cells(row):
    """One row's words."""
    made = dict(row) | {"MB": f"{row['bytes'] / 1e6:.2f}", "graph": "yes" if row["graph"] else "no"}
    return ["-" if made[name] is None else str(made[name]) for name, _, _ in COLUMNS]


def table(rows):
    """The table as text: a line of headings, then a line for each row (dicts, as in the file)."""
    lines = [[title for _, _, title in COLUMNS], *(cells(r) for r in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(f"{word:{align}{width}}" for word, (_, align, _), width in zip(line, COLUMNS, widths))
                     .rstrip() for line in lines)
