"""Combine's way back: each expert's rows return to their tokens' places (token, k), and are summed with the weights."""

import numpy as np

from epmoe.explain import routing
from epmoe.explain.arrays import label
from epmoe.explain.palette import rank_class
from epmoe.explain.svg import Panel, path, rect, shown, tag, text, token_box
from epmoe.host.inputs import COMBINE_DTYPE

ROW, BOX, WIDTH, COLUMNS = 19, 20, 348, 3
WEIGHT_AT, VALUES_AT = 176, 186


def flow(history):
    """Experts on the left, tokens on the right: a line for each returned row, as thick as its weight."""
    r = history.recording
    cfg, num_tokens = r.cfg, r.routed.num_tokens
    tokens, experts, height = routing.columns(cfg, num_tokens)
    left, right, width = 70, 236, routing.WIDTH
    parts = [text(left + 34, 16, "experts' rows", "t b", "end"), text(right, 16, "tokens", "t b")]
    for rank in range(cfg.n_ranks):
        first = rank * cfg.n_local_experts
        middle = (experts[first] + experts[first + cfg.n_local_experts - 1]) / 2
        parts.append(text(0, middle + BOX / 2 + 4, f"rank {rank}", "t"))
        middle = (tokens[rank, 0] + tokens[rank, max(1, num_tokens[rank]) - 1]) / 2
        parts.append(text(right + 34, middle + BOX / 2 + 4, f"rank {rank}", "t"))
    for e, y in experts.items():
        parts.append(tag("g", rect(left, y, 34, BOX, "cell", 3), text(left + 17, y + 14, f"e{e}", "t small", "middle")))
    for (rank, t), y in tokens.items():
        if t >= num_tokens[rank]:
            continue
        back = history.filled("combine_recv_buf", rank, 2)
        for k, e in enumerate(r.dispatched[rank].topk_ids[t]):
            if e < 0:
                continue
            w, y1, y2 = float(r.routed.topk_weights[rank][t, k]), experts[int(e)] + BOX / 2, y + BOX / 2
            filled = back.get((t, k))
            parts.append(path(f"M{left + 34} {y1:.1f}C{left + 100} {y1:.1f} {right - 66} {y2:.1f} {right} {y2:.1f}",
                              f"flow k{rank_class(rank)}", stroke_width=round(0.8 + 5 * abs(w), 1),
                              style=f"stroke-width:{0.8 + 5 * abs(w):.1f}px",
                              **shown(label("router_weights", rank, (t, k), ("token", "k")), f"{w:.7g}",
                                      None if filled is None else filled.done,
                                      tip=f"row of expert e{e} for combine_recv_buf[rank {rank}][token {t}, k {k}]")))
        parts.append(token_box(right, y, BOX, BOX, rank, f"t{t}"))
    return Panel("combine's way back", width, height, "".join(parts))


def panels(history):
    """A panel for each rank: its tokens' places, the weights, and the sums."""
    r = history.recording
    cfg = r.cfg
    columns = min(COLUMNS, cfg.hidden)
    made = []
    for rank in range(cfg.n_ranks):
        array = history.arrays.get("combine_recv_buf", rank)
        kind = np.dtype(COMBINE_DTYPE[cfg.combine_dtype])
        raw = history.bytes_at_end("combine_recv_buf", rank).reshape(array.shape) if array is not None else None
        back, out = history.filled("combine_recv_buf", rank, 2), history.filled("combined", rank, 1)
        parts = [text(0, 12, f"rank {rank} sums up", "t b"), text(WEIGHT_AT, 34, "weight", "m small", "end"),
                 text(VALUES_AT, 34, f"first {columns} values of the row", "m small"),
                 text(34, 34, "k", "m small"), text(50, 34, "row of", "m small")]
        y = 44
        for t in range(r.routed.num_tokens[rank]):
            parts.append(token_box(0, y, 24, BOX - 3, rank, f"t{t}"))
            for k, e in enumerate(r.dispatched[rank].topk_ids[t]):
                parts.append(_slot(history, rank, t, k, int(e), y, back.get((t, k)), columns,
                                   None if raw is None else raw[t, k].view(kind)))
                y += ROW
            parts.append(_sum(rank, t, y, out.get((t,)), r.combined[rank][t], columns))
            y += ROW + 10
        if not r.routed.num_tokens[rank]:
            parts.append(text(0, y + 13, "no tokens", "m small"))
            y += ROW
        made.append(Panel(f"combine on rank {rank}", WIDTH, y, "".join(parts)))
    return made


def _slot(history, rank, t, k, e, y, filled, columns, row):
    cfg, weight = history.recording.cfg, float(history.recording.routed.topk_weights[rank][t, k])
    if e < 0:
        return text(34, y + 13, k, "m small") + text(50, y + 13, "no expert: adds nothing", "m small", **shown(
            label("topk_ids", rank, (t, k), ("token", "k")), -1))
    since = None if filled is None else filled.done
    who = "" if filled is None else f"written by {filled.who}, steps {filled.begun} to {filled.done}"
    parts = [text(34, y + 13, k, "m small"), text(50, y + 13, f"e{e} on rank {cfg.owner(e)}", "t small",
                  **shown(label("topk_ids", rank, (t, k), ("token", "k")), e, tip=who)),
             text(WEIGHT_AT, y + 13, f"{weight:.2f} ×", "t mono", "end",
                  **shown(label("router_weights", rank, (t, k), ("token", "k")), f"{weight:.7g}"))]
    for col in range(columns):
        parts.append(text(VALUES_AT + 50 * (col + 1), y + 13, f"{float(row[col]):.3f}", "t mono", "end", **shown(
            f"combine_recv_buf[rank {rank}][token {t}, k {k}, col {col}]", repr(float(row[col])), since, tip=who)))
    return "".join(parts)


def _sum(rank, t, y, filled, row, columns):
    since = None if filled is None else filled.done
    who = "" if filled is None else f"written by {filled.who}"
    parts = [path(f"M{VALUES_AT} {y + 1}h{50 * columns}", "tick"), text(WEIGHT_AT, y + 14, "sum", "t small b", "end")]
    for col in range(columns):
        parts.append(text(VALUES_AT + 50 * (col + 1), y + 14, f"{float(row[col]):.3f}", "t mono b", "end", **shown(
            label("combined", rank, (t, col), ("token", "col")), repr(float(row[col])), since, tip=who)))
    return "".join(parts)
