"""The page: one HTML file with everything in it, to be opened from disk."""

import json
from html import escape
from importlib.resources import files

import numpy as np

from epmoe import layout
from epmoe.check.dequantised import dequantised
from epmoe.explain import buffers, chapters, counters, palette, routing, rows, svg, timeline, way_back
from epmoe.explain.arrays import COUNTERS, NOT_ARRIVED, SIGNALS, is_signal
from epmoe.explain.moments import moments
from epmoe.host.inputs import COMBINE_DTYPE

COLUMNS = max(rows.VALUES, way_back.COLUMNS)       # of wide arrays: so many are in the page


def page(history):
    """The HTML text."""
    r = history.recording
    cfg = r.cfg
    every = moments(history)
    runs = [[m for m in every if m.run == n] for n in (0, 1)]
    start = max(range(len(every)), key=lambda n: _signals_up(history, every[n].step))
    groups = {"dispatch": dict(moments=_pairs(runs[0]), start=len(runs[0]) - 1),
              "all": dict(moments=_pairs(every), start=start),
              "combine": dict(moments=_pairs(runs[1]), start=len(runs[1]) - 1)}
    body = "".join([_header(history), "<main>", _routing(history), _buffers(history, len(runs[0])),
                    _rows(history, len(runs[0])), _counters(history, len(every)), _timeline(history, len(every)),
                    _way_back(history, len(runs[1])), "</main>", _footer(history)])
    style = palette.css() + files("epmoe.explain").joinpath("page.css").read_text()
    script = files("epmoe.explain").joinpath("page.js").read_text()
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(_title(cfg))}</title>'
            f'<link rel="icon" href="data:,"><style>{style}</style></head><body>{body}'
            '<div id="tip" role="status"></div>'
            f"{_data('arrays', arrays(history))}{_data('moments', groups)}<script>{script}</script></body></html>\n")


def _signals_up(history, step):
    """How many signals of dispatch can be seen at a step: where most can, the counters are worth a first look."""
    words = [history.at("dispatch_recv_count", rank, index, step) for rank in range(history.recording.cfg.n_ranks)
             for index in history.of("dispatch_recv_count", rank)]
    return sum(is_signal(w) for w in words)


def _pairs(some):
    return [[m.step, m.text] for m in some]


def _data(name, value):
    text = json.dumps(value, separators=(",", ":"), allow_nan=True).replace("</", "<\\/")
    return f'<script type="application/json" id="{name}">{text}</script>'


def arrays(history):
    """What the page's values are taken from: {name: [of each rank]}, nested lists; wide rows cut to COLUMNS.

    `messages` has the token of each message by "local_expert,src_rank,slot"; `payload_in` says of those without a
    payload of their own which message has it; `histories` has the counters and signals: {name: [{index: [[step,
    value], ...]} of each rank]}; null: not arrived.
    """
    r = history.recording
    ranks = range(r.cfg.n_ranks)
    kind = np.dtype(COMBINE_DTYPE[r.cfg.combine_dtype])
    held = {
        "num_tokens": r.routed.num_tokens,
        "topk_ids": [d.topk_ids.tolist() for d in r.dispatched],
        "router_weights": [w.tolist() for w in r.routed.topk_weights],
        "input_tokens": [_cut(x) for x in r.routed.x],
        "row_offsets": [d.row_offsets.tolist() for d in r.dispatched],
        "expert_ids": [d.expert_ids.tolist() for d in r.dispatched],
        "src_info": [d.src_info.tolist() for d in r.dispatched],
        "recv_count": [d.recv_count.tolist() for d in r.dispatched],
        "output_tokens": [_cut(dequantised(r.cfg, d)) for d in r.dispatched],
        "expert_outputs": [_cut(y) for y in r.expert_outputs],
        "combine_recv_buf": [_cut(history.bytes_at_end("combine_recv_buf", rank).view(kind).reshape(
            layout.region(r.cfg, "combine_recv_buf").shape[:2] + (-1,))) for rank in ranks],
        "combined": [_cut(out) for out in r.combined],
        "messages": [{_key(index): m.token for index, m in sorted(history.messages(rank).items())} for rank in ranks],
        "payload_in": [{_key(index): _key(m.payload_in) for index, m in sorted(history.messages(rank).items())
                        if m.payload_in is not None} for rank in ranks],
    }
    held["histories"] = {name: [{_key(index): [[c.step, None if c.value == NOT_ARRIVED else c.value]
                                                             for c in changes]
                                 for index, changes in history.of(name, rank).items()} for rank in ranks]
                         for name in (*COUNTERS, *SIGNALS)}
    return held


def _key(index):
    return ",".join(map(str, index))


def _cut(a):
    return np.asarray(a)[..., :COLUMNS].astype(np.float32).tolist()


def _title(cfg):
    return f"Dispatch and combine, step by step: {cfg.n_ranks} ranks, {cfg.n_experts} experts, top-{cfg.top_k}"


def _panels(panels, name, cls="scroll"):
    drawn = "".join(f'<div class="{cls}">{svg.inline(p, name)}</div>' for p in panels)
    return f'<div class="panels">{drawn}</div>'


def _entries(entries):
    return '<div class="entries">' + "".join(svg.inline(e, e.title) for e in entries) + "</div>"


def _ranks(history):
    return _entries(svg.rank_legend(range(history.recording.cfg.n_ranks)))


def _lines(lines):
    return f'<ul class="legend">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def _bar(n):
    signs = (("first", "first moment", "|◀"), ("back", "one moment back", "◀"), ("on", "one moment on", "▶"),
             ("last", "last moment", "▶|"))
    buttons = "".join(f'<button type="button" class="{cls}" aria-label="{label}">{sign}</button>'
                      for cls, label, sign in signs)
    return (f'<div class="bar"><div class="row">{buttons}<button type="button" class="play">Play</button>'
            f'<input type="range" min="0" max="{n - 1}" value="0" aria-label="moment"></div>'
            '<p class="says"><span class="step"></span><span class="text"></span></p></div>')


def _section(name, group, *parts, more=()):
    chapter = chapters.CHAPTERS[name]
    text = "".join(f"<p>{p}</p>" for p in (*chapter.text, *more))
    group = f' data-group="{group}"' if group else ""
    return f'<section id="{name}"{group}><h2>{chapter.title}</h2>{text}{"".join(parts)}</section>'


def _header(history):
    r = history.recording
    cfg = r.cfg
    verdict = ("Every byte of both results equals the reference's." if not r.differences else
               f"The results differ from the reference in {len(r.differences)} places: {r.differences[0]}")
    return (f"<header><h1>{escape(_title(cfg))}</h1><p>{chapters.BEGINNING}</p>"
            f'<p class="quiet">{"Fused" if r.fused else "Split"} kernels, token format {cfg.token_format}, '
            f"{cfg.hidden} numbers a token, at most {cfg.max_tokens_per_rank} tokens a rank, seed {r.seed}. "
            f"{len(r.events):,} recorded events. {escape(verdict)} Point at (or tap) anything to see which array and "
            "index it is.</p></header>")


def _routing(history):
    words = "".join(f"<dt>{a}</dt><dd>{b}</dd>" for a, b in chapters.glossary(history.recording.cfg))
    flow = svg.inline(routing.panel(history), "routing")
    return _section("routing", "", _ranks(history), _lines(chapters.CHAPTERS["routing"].legend),
                    f'<div class="panels"><div class="scroll big">{flow}</div><dl>{words}</dl></div>')


def _buffers(history, n):
    return _section("buffers", "dispatch", _bar(n), _ranks(history), _lines(buffers.legend_text(history)),
                    _panels(buffers.panels(history), "recv_buf"), more=[escape(buffers.sizes_text(history))])


def _rows(history, n):
    return _section("rows", "dispatch", _bar(n), _ranks(history), _lines(chapters.CHAPTERS["rows"].legend),
                    _panels(rows.panels(history), "grouped output"))


def _counters(history, n):
    paper = svg.inline(counters.snapshots(history, busiest(history)), "counters over time")
    return _section("counters", "all", _bar(n), _lines(chapters.CHAPTERS["counters"].legend),
                    _panels(counters.panels(history), "counters"),
                    f'<h3>The same on paper</h3><div class="scroll">{paper}</div>')


def _timeline(history, n):
    choices = (("far", "arrows between ranks"), ("near", "arrows inside a rank"), ("barrier", "barriers"))
    boxes = "".join(f'<label><input type="checkbox" checked data-of="lanes" value="{v}">{t}</label>'
                    for v, t in choices)
    return _section("timeline", "all", _bar(n), f'<div class="choose">{boxes}</div>', _entries(timeline.legend()),
                    f'<div class="lanes">{_panels(timeline.panels(history), "timeline")}</div>')


def _way_back(history, n):
    flow = svg.inline(way_back.flow(history), "way back")
    return _section("combine", "combine", _bar(n), _ranks(history), _lines(chapters.CHAPTERS["combine"].legend),
                    f'<div class="panels"><div class="scroll big">{flow}</div></div>',
                    _panels(way_back.panels(history), "combine"))


def _footer(history):
    cfg = history.recording.cfg
    return ("<footer><p>Made by <code>python -m epmoe explain</code>"
            f" ({cfg.n_ranks} ranks, {cfg.n_local_experts} experts a rank, top-{cfg.top_k}). Steps count memory "
            "operations of the simulator; they are not times of a GPU. The arrays behind the pictures are in this page "
            'as JSON, under the id "arrays".</p></footer>')


def busiest(history):
    """The rank that received most messages."""
    return max(range(history.recording.cfg.n_ranks), key=lambda rank: len(history.messages(rank)))
