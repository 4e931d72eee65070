"""The counter regions A to G, those of the senders, and the signals: words over the steps of a round."""

from epmoe.explain.arrays import ANNOUNCED, COUNTERS, NOT_ARRIVED, SIGNALS, is_signal, word
from epmoe.explain.svg import Panel, path, rect, shown, tag, text

CELL, ROW, LEFT, WIDE = 34, 20, 112, 330
# region -> what it is for, in a few words
MEANING = {
    "reserved": "places claimed, by (expert, destination)",
    "finished": "pieces of messages written, less those wanted",
    "rank_completion": "signals written to each peer",
    "dispatch_recv_count": "signals of dispatch, by (expert, source)",
    "A": "1024 + end row, and count, by (expert, source)",
    "B": "rows of an expert up to a source rank",
    "C": "claims of an expert's rows",
    "D": "blocks that are through",
    "E": "ready flag: rows have their places",
    "F": "send_buf is ready (shared expert)",
    "G": "shared expert has started",
    "combine_recv_count": "signals of combine, by (expert, source)",
    "combine_ready": "ready flag of each reducing block",
}
ORDER = ("reserved", "finished", "rank_completion", "dispatch_recv_count", "A", "B", "C", "D", "E", "F", "G",
         "combine_recv_count", "combine_ready")
assert set(ORDER) == set(COUNTERS) | set(SIGNALS) == set(MEANING)


def used(history, name, rank):
    """Indices of a region that the figure shows: all, or of a long one those that ever changed, and the first."""
    changes = history.of(name, rank)
    if name in ("combine_ready", "rank_completion"):
        last = max((i[0] for i, c in changes.items() if len(c) > 1), default=0)
        return [i for i in changes if i[0] <= last]
    return list(changes)


def shape_of(indices):
    """(rows, columns) of the words of a region: the first axis down, the others across."""
    if not indices:
        return 0, 0
    if len(indices[0]) == 1:
        return 1, len(indices)
    rows = 1 + max(i[0] for i in indices)
    return rows, len(indices) // rows


def panels(history):
    """A panel for each rank: every word, which the page shows at the chosen step."""
    r = history.recording
    made = []
    for rank in range(r.cfg.n_ranks):
        y, parts, width = 24, [text(0, 12, f"rank {rank}", "t b")], WIDE
        for name in ORDER:
            indices = used(history, name, rank)
            if not indices:
                continue
            rows, across = shape_of(indices)
            beside = len(indices[0]) == 1 and across <= 2
            parts.append(text(0, y + 13, name.replace("_recv_count", " recv_count"), "t b small"))
            changed = any(len(c) > 1 and any(one.value for one in c) for c in history.of(name, rank).values())
            meaning = MEANING[name] + ("" if changed else ": not used here")
            parts.append(text(0, y + 13 + 16, meaning, "m small"))
            y += 8 if beside else 34 + (12 if len(indices[0]) > 1 else 0)
            cell = CELL if name == "A" or across <= 6 else 26
            for j in range(across if len(indices[0]) > 1 else 0):
                what = f"{j // 2} {('end', 'n')[j % 2]}" if name == "A" else j
                parts.append(text(LEFT + j * cell + (cell - 3) / 2, y - 4, what, "m small", "middle"))
            if len(indices[0]) > 1:
                parts.append(text(LEFT - 8, y - 4, "rank", "m small", "end"))
            for n, index in enumerate(indices):
                i, j = divmod(n, across)
                left = WIDE - across * cell if beside else LEFT
                parts.append(_cell(history, name, rank, index, left + j * cell, y + i * ROW, cell))
            for i in range(rows if len(indices[0]) > 1 else 0):
                parts.append(text(LEFT - 8, y + i * ROW + 14, f"local_expert {i}", "m small", "end"))
            width = max(width, LEFT + across * cell + 4)
            y += 40 if beside else rows * ROW + 10
        made.append(Panel(f"counters of rank {rank}", width, y, "".join(parts)))
    return made


def _cell(history, name, rank, index, x, y, width):
    changes = history.of(name, rank)[index]
    steps = [[c.step, word(name, c.value)] for c in changes]
    value = "–" if not changes else word(name, changes[-1].value)
    return tag("g", rect(x, y, width - 3, ROW - 3, "cell", 2),
               text(x + (width - 3) / 2, y + 13, value, "t small", "middle", **shown(history=steps)),
               **shown(history.label(name, rank, index), changes[-1].value if changes else None))


def moments(recording, history, rank):
    """[(what has happened, step)]: when a rank's counters are worth a look."""
    def last(name, ranks, wanted):
        steps = [c.step for r in ranks for changes in history.of(name, r).values() for c in changes if wanted(c)]
        return max(steps, default=None)

    here = [rank]
    found = [("counts announced", last("dispatch_recv_count", here, lambda c: ANNOUNCED <= c.value < NOT_ARRIVED)),
             ("messages have come", last("dispatch_recv_count", here, lambda c: is_signal(c.value))),
             ("rows have places", last("A", here, lambda c: c.value)),
             ("dispatch has ended", recording.dispatch_end),
             ("rows sent back", last("finished", here, lambda c: c.event and c.value
                                     and c.step > recording.dispatch_end)),
             ("rows are back", last("combine_recv_count", here, lambda c: c.event
                                             and is_signal(c.value))),
             ("combine has ended", recording.end)]
    return sorted(((name, step) for name, step in found if step is not None), key=lambda m: m[1])


def _line(name, values):
    """Some words of a region in a line."""
    return " ".join("–" if v is None else word(name, v) for v in values)


def snapshots(history, rank):
    """One rank's regions at some moments, a column each: what the page shows with its slider, on paper."""
    r = history.recording
    chosen = moments(r, history, rank)
    blocks = []
    for name in ORDER:
        indices = used(history, name, rank)
        if indices:
            blocks.append((name, indices, *shape_of(indices)))
    longest = max(len(_line(name, [history.at(name, rank, i, step) for i in indices[n:n + across]]))
                  for name, indices, _, across in blocks for _, step in chosen for n in range(0, len(indices), across))
    column = max(126, 10 + 6.6 * longest)
    parts, y = [text(0, 14, f"counter regions of rank {rank} over the round", "t title")], 50
    for m, (what, step) in enumerate(chosen):
        parts += [text(128 + m * column, 34, what, "t b small"), text(128 + m * column, 47, f"step {step}", "m small")]
    for name, indices, rows, across in blocks:
        parts.append(path(f"M0 {y + 3}H{128 + len(chosen) * column}", "line"))
        parts.append(text(0, y + 19, name, "t b small"))
        before = None
        for m, (_, step) in enumerate(chosen):
            values = [history.at(name, rank, index, step) for index in indices]
            for i in range(rows):
                line = _line(name, values[i * across:(i + 1) * across])
                part = slice(i * across, (i + 1) * across)
                changed = before is not None and values[part] != before[part]
                parts.append(text(128 + m * column, y + 19 + i * 15, line, "t mono b" if changed else "m mono"))
            before = values
        y += 12 + rows * 15
    notes = ("a line for each local_expert, a number for each rank; A: 1024 + end, and count, in turn",
             "– is \"not arrived\", 2… announced; bold: changed since the column before; before the round all is as "
             "at its end, but B is 0")
    parts += [text(0, y + 22 + 15 * n, note, "m small") for n, note in enumerate(notes)]
    return Panel(f"counters of rank {rank} over time", max(128 + len(chosen) * column, 560), y + 45, "".join(parts))

