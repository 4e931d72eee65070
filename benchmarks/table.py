"""Rows as one table on the terminal, in microseconds and decimal gigabytes."""

from benchmarks import shapes

COLUMNS = (
    ("kernels", "<", "kernels"),
    ("phase", "<", "phase"),
    ("shape", "<", "tokens x hidden / experts"),
    ("graph", "<", "graph"),
    ("sms", ">", "SMs"),
    ("us", ">", "us"),
    ("p20_us", ">", "p20"),
    ("p80_us", ">", "p80"),
    ("MB", ">", "MB to others"),
    ("gbps", ">", "GB/s"),
    ("floor_us", ">", "floor us"),
    ("to_floor", ">", "x floor"),
    ("host_us", ">", "host us"),
    ("best_peer", "<", "best other"),
    ("peer_us", ">", "its us"),
    ("to_peer", ">", "x peer"),
)


def cells(row):
    """The cells of one row. A peer's name has a star if its time is a constant, not of the same run."""
    star = "" if row["peer_here"] else "*"
    made = dict(row) | {
        "MB": f"{row['bytes'] / 1e6:.2f}",
        "graph": "graph" if row["graph"] else "",
        "sms": "all" if row["sms"] is None else row["sms"],
        "shape": str(shapes.of_row(row)),
        "best_peer": row["peer"] + star if row["peer"] else None,
    }
    return ["-" if made[name] is None else str(made[name]) for name, _, _ in COLUMNS]


def table(rows):
    """The table as text: a line of headings, then a line for each row (dicts, as in the file)."""
    return text(COLUMNS, rows, cells)


def text(columns, rows, cells_of=None):
    """Lines of columns (key, alignment, title): headings, then a line for each row. cells_of(row) gives its cells."""
    cells_of = cells_of or (lambda row: [str(row[key]) for key, _, _ in columns])
    lines = [[title for _, _, title in columns], *(cells_of(r) for r in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(f"{word:{align}{width}}" for word, (_, align, _), width in zip(line, columns, widths)).rstrip()
        for line in lines
    )
