"""Memory as it should be and as it is, side by side, with the first difference marked; and who wrote the wrong word."""

import re

import numpy as np

from epmoe.device.sim.recorder import Recorder
from epmoe.lessons.telling import WIDTH
from epmoe.puzzles.world import NOT_YET, POISON, run

LINES, COLUMNS = 10, (8, 6, 4, 2)  # of a picture, at most: the first number of columns that fits
EVENTS = 8  # of a word's history, at most
UNWRITTEN = "--"


def difference(got, world, named_in=None):
    """(rank, name, index) of the first element that is not as expected, or None. named_in: of regions in this text only."""
    for rank, expected in enumerate(world.expected):
        for r in world.regions:
            if r.name in expected and (named_in is None or re.search(rf"\b{r.name}\b", named_in)):
                wrong = unequal(got[rank][r.name], np.asarray(expected[r.name], r.dtype))
                if wrong.any():
                    return rank, r.name, tuple(int(i) for i in np.argwhere(wrong)[0])
    return None


def unequal(a, b):
    """Which elements differ, to the bit."""
    as_bits = f"u{a.dtype.itemsize}"
    return a.view(as_bits) != np.ascontiguousarray(b).view(as_bits)


def picture(got, world, place):
    """The lines of one region around a difference: as it should be, and as it is, beside it or below."""
    for columns in COLUMNS:
        for beside in (True, False):
            made = _picture(got, world, place, columns, beside)
            if max(map(len, made.splitlines())) <= WIDTH:
                return made
    return made


def _picture(got, world, place, n_columns, beside):
    rank, name, index = place
    r = world.region(name)
    should, holds = np.asarray(world.expected[rank][name], r.dtype), got[rank][name]
    if holds.ndim == 1:
        should, holds, index = should[None], holds[None], (0, *index)
    width = holds.shape[-1]
    column = max(0, min(index[-1] - n_columns // 2, width - n_columns))
    columns = range(column, min(column + n_columns, width))
    lines = [
        line
        for line in np.ndindex(holds.shape[:-1])
        if line == index[:-1] or _written(should[line]) or _written(holds[line])
    ]
    first = max(0, min(lines.index(index[:-1]) - LINES // 2, len(lines) - LINES))
    lines = lines[first : first + LINES]
    texts = [[value(a[line][i]) for i in columns] for a in (should, holds) for line in lines]
    cell = max(len(text) for row in texts for text in row)
    behind = columns.index(index[-1]) + 1  # a bracket must not touch the number behind it
    cell += behind < len(columns) and len(value(holds[index[:-1]][columns[behind]])) == cell
    rows = [("", "should be", "is", False)]
    for line in lines:
        label = ", ".join(f"{axis} {n}" for axis, n in zip(r.axes, line if len(r.shape) > 1 else ()))
        marked = line == index[:-1]
        mark = columns.index(index[-1]) if marked else None
        rows.append((label, _row(should[line], columns, cell), _row(holds[line], columns, cell, mark), marked))
    shown = "" if width == 1 else f", {r.axes[len(r.shape) - 1]} {columns[0]} to {columns[-1]}"
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    unwritten = any(UNWRITTEN in row for row in texts)
    out = [f"{name} of rank {rank}{shown}{f'  ({UNWRITTEN}: never written)' if unwritten else ''}"]
    for shown in ((0, 1, 2),) if beside else ((0, 1), (0, 2)):
        for *cells, marked in rows:
            text = "  " + "   ".join(cells[i].ljust(widths[i]) for i in shown)
            arrow = " <- first difference" if marked and 2 in shown else ""
            if len(text + arrow) > WIDTH:
                out += [text.rstrip(), arrow.rjust(len(text))]
            else:
                out.append((text + arrow).rstrip())
    return "\n".join(out)


def _written(line):
    return bool((line.view(np.uint8) != POISON).any())


def _row(array, columns, width, mark=None):
    """Numbers, as wide as `width`, with brackets around the marked one."""
    out = ""
    for i, column in enumerate(columns):
        before = "[" if i == mark else "]" if mark is not None and i == mark + 1 else " "
        out += before + value(array[column]).rjust(width)
    return out + ("]" if mark == len(columns) - 1 else " ")


def value(x):
    """A number as the pictures show it."""
    if x.tobytes() == bytes([POISON]) * x.dtype.itemsize:
        return UNWRITTEN
    if x.dtype == np.uint64 and int(x) == NOT_YET:
        return "NOT_YET"
    return str(int(x)) if x.dtype.kind in "iu" else f"{float(x):g}"


def history(kernels, world, schedule, place):
    """Who touched the word that differs, in order, under the schedule that breaks it; "" if nobody did."""
    rank, name, index = place
    r, recorder = world.region(name), Recorder()
    run(kernels, world, schedule, recorder=recorder, go_on=True)
    element = int(np.ravel_multi_index(index, r.shape)) * np.dtype(r.dtype).itemsize
    of_region = [e for e in recorder.events if e.span is not None and (e.span.name, e.span.rank) == (name, rank)]
    found = [e for e in of_region if e.address <= e.span.low + element < e.address + e.nbytes]
    if not found:
        return ""
    out = [f"what happened to {name}[{', '.join(map(str, index))}] of rank {rank}:"]
    if len(found) > EVENTS:
        out.append(f"  ... {len(found) - EVENTS} accesses before these")
    words = max(len(e.word) for e in found[-EVENTS:])
    for e in found[-EVENTS:]:
        out.append(
            f"  {e.line:16} {e.word:{words}} by rank {e.rank} block {e.block} thread {e.thread}"
            f"{_seen(e, e.span.low + element, r.dtype)}"
        )
    return "\n".join(out)


def _seen(event, address, dtype):
    size = np.dtype(dtype).itemsize

    def number(raw):
        part = raw[address - event.address :][:size]
        return value(np.frombuffer(part, dtype)[0]) if len(part) == size else "?"

    saw = f" saw {number(event.saw)}" if event.saw else ""
    wrote = f" wrote {number(event.wrote)}" if event.wrote else ""
    return saw + wrote
