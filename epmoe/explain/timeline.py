"""When each block did what: one lane a block, with waits, signals, fences, barriers, and release-to-acquire arrows."""

from epmoe.explain.palette import PHASES, rank_class
from epmoe.explain.phases import Timeline
from epmoe.explain.svg import Panel, entry, path, rect, shown, tag, text

LEFT, WIDTH, LANE, BAR, TOP = 96, 1080, 30, 18, 44
GLYPHS = {"signal": "M0-7L6 4H-6Z", "announcement": "M0-6L5 4H-5Z", "release": "M-3.5-3.5H3.5V3.5H-3.5Z",
          "acquire": "M0-4.5A4.5 4.5 0 1 0 .01-4.5Z",
          "fence": "M0-6L4.5 0L0 6L-4.5 0Z", "barrier": "M0-8V8"}
CLASSES = {"acquire": "open", "announcement": "open", "barrier": "tick"}


def panels(history):
    """Two panels: dispatch and combine."""
    timeline = Timeline(history)
    return [panel(history, timeline, run, name) for run, name in enumerate(("dispatch", "combine"))]


def panel(history, timeline, run, name):
    """The lanes of one run."""
    lanes = timeline.run(run)
    first = history.recording.recorder.runs[run].first_step
    last = max(lane.end for lane in lanes) + 1
    scale = (WIDTH - LEFT - 12) / (last - first)

    def x(step):
        return LEFT + (step - first) * scale

    rows, y = {}, TOP
    for rank in range(history.recording.cfg.n_ranks):
        for block in sorted({lane.block for lane in lanes if lane.rank == rank}):
            rows[rank, block] = y
            y += LANE
        y += 10
    parts = _axis(name, first, last, x, y)
    for (rank, block), at in rows.items():
        parts.append(rect(0, at - BAR / 2, 4, BAR, f"s{rank_class(rank)}"))
        parts.append(text(10, at + 4, f"rank {rank} block {block}", "t small"))
        parts.append(path(f"M{LEFT} {at}H{WIDTH - 12}", "line"))
    for lane in lanes:
        parts.append(_lane(history, lane, rows[lane.rank, lane.block], x))
    inside = {lane.launch for lane in lanes}
    for arrow in sorted(timeline.arrows, key=lambda a: a.across):
        if arrow.target.launch in inside and arrow.source.launch in inside:
            parts.append(_arrow(history, arrow, rows, x))
    for lane in lanes:
        parts.append(_marks(history, lane, rows[lane.rank, lane.block], x))
    parts.append(tag("line", cls="cursor", x1=LEFT, x2=LEFT, y1=TOP - 18, y2=y - 8, data_first=str(first),
                     data_scale=f"{scale:.6f}", data_left=str(LEFT), data_last=str(last)))
    return Panel(f"timeline of {name}", WIDTH, y + 22, "".join(parts))


def _axis(name, first, last, x, bottom):
    parts = [text(0, 14, name, "t title")]
    step = next(s * 10**e for e in range(9) for s in (1, 2, 5) if (last - first) / (s * 10**e) <= 10)
    at = -(-first // step) * step
    while at < last:
        parts += [path(f"M{x(at):.1f} {TOP - 18}V{bottom - 8}", "line"),
                  text(round(x(at), 1), bottom + 8, at, "m small", "end" if x(at) > WIDTH - 30 else "middle")]
        at += step
    parts.append(text(LEFT, 14, "steps: memory operations by anybody so far, from left to right", "m small"))
    return parts


def _lane(history, lane, y, x):
    parts = [path(f"M{x(lane.begin):.1f} {y - BAR / 2 - 3}v{BAR + 6}M{x(lane.end + 1):.1f} {y - BAR / 2 - 3}v{BAR + 6}",
                  "tick", **shown(tip=f"{lane.kernel} on rank {lane.rank}, block {lane.block}: steps {lane.begin} to "
                                  f"{lane.end}"))]
    for s in lane.slices:
        width = max(x(s.end) - x(s.begin), 0.8)
        what = f"waits for {s.word}" if s.phase == "wait" else PHASES[s.phase][0]
        cls = "wait" if s.phase == "wait" else f"p-{s.phase}"
        parts.append(rect(round(x(s.begin), 1), y - BAR / 2, round(width, 1), BAR, cls, **shown(
            tip=f"rank {lane.rank} block {lane.block} {what}, in {lane.kernel}, steps {s.begin} to {s.end}")))
    return "".join(parts)


def _marks(history, lane, y, x):
    parts = []
    for mark in lane.marks:
        e = mark.event
        cls = CLASSES.get(mark.kind, "mark")
        where = history.arrays.place(e)
        value = ""
        if e.span is not None:
            raw = e.wrote if e.wrote is not None else e.saw
            value = f" = {int.from_bytes(raw, 'little')}" if raw is not None and len(raw) <= 8 else ""
        words = " ".join(w for w in (e.word, where and where + value) if w)
        parts.append(path(GLYPHS[mark.kind], f"{cls} g-{mark.kind}", transform=f"translate({x(e.step):.1f} {y})",
                          data_event=str(e.number),
                          **shown(now=e.step, tip=f"{mark.kind}: {words}; {e.line}; step {e.step}, rank {e.rank} block "
                                  f"{e.block}" + (f" warp {e.warp}" if e.thread >= 0 else ""))))
    return "".join(parts)


def _arrow(history, arrow, rows, x):
    a, b = arrow.source, arrow.target
    x1, y1, x2, y2 = x(a.step), rows[a.rank, a.block], x(b.step), rows[b.rank, b.block]
    down = 1 if y2 > y1 else -1
    y1, y2 = y1 + 9 * down, y2 - 10 * down
    bend = max(10, abs(y2 - y1) * 0.35)
    cls = f"arrow k{rank_class(a.rank)} far" if arrow.across else "near"
    line = path(f"M{x1:.1f} {y1}C{x1:.1f} {y1 + bend * down:.0f} {x2:.1f} {y2 - bend * down:.0f} {x2:.1f} {y2}", cls,
                data_arrow=f"{a.number}>{b.number}",
                **shown(now=b.step, tip=f"release by rank {a.rank} block {a.block} at step {a.step} ({a.line}), seen "
                        f"by the acquire of rank {b.rank} block {b.block} at step {b.step} ({b.line}): "
                        f"{history.arrays.place(a)}"))
    head = path(f"M{x2:.1f} {y2 + 2 * down}l-3 {-6 * down}h6Z", f"s{rank_class(a.rank)}" if arrow.across else "head",
                **shown(now=b.step))
    return line + head


def legend():
    """What colours and signs mean, an entry each: the phases, then the marks and arrows."""
    entries = [entry(rect(0, 1, 20, 14, f"p-{p}", 2), what, 26) for p, (what, _, _) in PHASES.items()]
    entries.append(entry(rect(0.5, 1.5, 19, 13, "wait", 2), "waits", 26))
    for kind, what in (("signal", "signal to a rank"), ("announcement", "announcement to a rank"),
                       ("release", "release"), ("acquire", "acquire that saw a release"),
                       ("fence", "fence"), ("barrier", "syncthreads")):
        cls = CLASSES.get(kind, "mark")
        entries.append(entry(path(GLYPHS[kind], cls, transform="translate(10 8)"), what, 26))
    entries.append(entry(path("M0 8h20", "arrow k0"), "arrow to another rank, in the sender's colour", 26))
    entries.append(entry(path("M0 8h20", "near"), "arrow inside a rank", 26))
    return entries
