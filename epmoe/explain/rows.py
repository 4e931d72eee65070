"""What a rank holds after dispatch: rows of output_tokens grouped by expert, with row_offsets and src_info."""

from epmoe.check.dequantised import dequantised
from epmoe.check.places import places
from epmoe.explain.palette import rank_class
from epmoe.explain.svg import Panel, path, rect, shown, tag, text

ROW, LEFT, BOX, VALUE, VALUES = 20, 94, 100, 44, 3


def panels(history, n_values=VALUES):
    """A panel for each rank; n_values: so many of each row's first values."""
    r = history.recording
    made = []
    for rank in range(r.cfg.n_ranks):
        d = r.dispatched[rank]
        where, values = places(r.cfg, d.row_offsets, d.recv_count), dequantised(r.cfg, d)
        copied = history.filled("output_tokens", rank, 1)
        came = {(index[0], index[1], m.token): m.payload_in or index for index, m in history.messages(rank).items()}
        parts = [text(0, 12, f"rank {rank} holds {where.n_rows} rows", "t b"),
                 text(0, 34, "offset", "m small"), text(LEFT, 34, "row", "m small", "end", dx=-8),
                 text(LEFT, 34, "source, token, slot", "m small"),
                 text(LEFT + BOX + 8, 34, f"first {n_values} values", "m small") if n_values else ""]
        y, rows_y = 44.0, {}
        for group in range(r.cfg.n_groups):
            begin, end = int(d.row_offsets[group]), int(d.row_offsets[group + 1])
            top = y
            for row in range(begin, end):
                rows_y[row] = y
                src, token = int(where.src_rank[row]), int(d.src_info[row, 0])
                parts.append(_row(history, rank, row, src, y, copied.get((row,)), values[row, :n_values],
                                  came.get((group - int(r.cfg.fused_shared_expert), src, token))))
                y += ROW
            if begin == end:
                parts.append(text(LEFT, y + 13, "no rows", "m small"))
                y += ROW
            parts.append(_bracket(history, rank, group, top, y))
            y += 12
        last = history.label("row_offsets", rank, (r.cfg.n_groups,))
        parts.append(_offset(history, rank, r.cfg.n_groups, y - 18, last, int(d.row_offsets[-1])))
        width = LEFT + BOX + 14 + n_values * VALUE
        made.append(Panel(f"grouped output of rank {rank}", width, y + 8, "".join(parts)))
    return made


def _row(history, rank, row, src, y, filled, values, payload_at):
    info = history.of("src_info", rank)
    token, k = (_last(info.get((row, i))) for i in (0, 1))
    parts = [text(LEFT, y + 13, row, "m small", "end", dx=-8), rect(LEFT, y, BOX, ROW - 3, "cell", 3)]
    since = None if filled is None else filled.done
    if src < 0:
        parts.append(text(LEFT + 6, y + 13, "padding", "m small"))
        return "".join(parts)
    n = rank_class(src)
    who = "" if filled is None else f"; copied by {filled.who}"
    if payload_at is not None:
        who += f", out of {history.label('dispatch_recv_buf', rank, payload_at)}"
    parts.append(tag("g", rect(LEFT, y, BOX, ROW - 3, f"s{n} edge", 3),
                     text(LEFT + BOX / 2, y + 13, f"rank {src}  t{token}  k{k}", f"x x{n} small", "middle"),
                     **shown(history.label("src_info", rank, (row, 0)), token, since,
                             tip=f"{history.label('src_info', rank, (row, 1))} = {k}{who}")))
    x = LEFT + BOX + 2
    name = "output_tokens" if history.recording.cfg.token_format == "bf16" else "dequantised output_tokens"
    for col in range(len(values)):
        parts.append(text(x + VALUE * (col + 1), y + 13, f"{values[col]:.2f}", "m mono", "end",
                          **shown(f"{name}[rank {rank}][row {row}, col {col}]", repr(float(values[col])), since)))
    return "".join(parts)


def _bracket(history, rank, group, top, bottom):
    cfg = history.recording.cfg
    local = group - int(cfg.fused_shared_expert)
    name = "shared" if local < 0 else f"e{rank * cfg.n_local_experts + local}"
    value = int(history.recording.dispatched[rank].row_offsets[group])
    place = history.label("row_offsets", rank, (group,))
    return (path(f"M72 {top:.1f}h-6v{bottom - top - 3:.1f}h6", "line")
            + text(60, (top + bottom) / 2 + 3, name, "t b", "end")
            + _offset(history, rank, group, top - 6, place, value))


def _offset(history, rank, group, y, place, value):
    changes = history.of("row_offsets", rank).get((group,), [])
    written = [c for c in changes if c.event is not None]
    steps = [[0, "–"]] + [[c.step, str(c.value)] for c in written]
    tip = "where this expert's rows begin" if group < history.recording.cfg.n_groups else "the number of rows"
    return text(22, y + 8, value, "t mono", "end", **shown(place, value, history=steps, tip=tip))


def _last(changes):
    return changes[-1].value if changes else None
