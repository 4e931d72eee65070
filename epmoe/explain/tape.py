"""The full tape, a second page: every counter of a recorded round over its steps, and each block's timeline."""

from epmoe.explain.arrays import COUNTERS, SIGNALS, word
from epmoe.explain.bundle import put_together, script, source
from epmoe.explain.moments import moments
from epmoe.explain.phases import PHASES, Timeline

# array -> its purpose, in the order of the round
MEANING = {
    "reserved": "slots claimed, by (local expert, dst_rank)",
    "finished": "messages completely written, by (local expert, dst_rank)",
    "dispatch_recv_buf": "messages in their slots: the token of each, by (local expert, src_rank, slot)",
    "rank_completion": "signals written to each peer",
    "dispatch_recv_count": "signals of dispatch, by (local expert, src_rank); – means not arrived",
    "A": "READY + end row, and count, by (local expert, src_rank)",
    "B": "rows of an expert up to a src_rank",
    "row_offsets": "where each expert's rows begin",
    "C": "claimed tiles of an expert's rows",
    "D": "blocks that are done",
    "E": "ready flag: rows have their places",
    "F": "send_buf is ready (shared expert)",
    "G": "shared expert has started",
    "output_tokens": "rows grouped by expert: the token of each",
    "combine_recv_buf": "rows that came back, by (token, k)",
    "combine_recv_count": "signals of combine, by (local expert, src_rank)",
    "combine_ready": "ready flag of each reducing block",
    "combined": "results, by token",
}


def page(history):
    """The HTML text."""
    style = source("stage.css") + source("style.css") + source("tape.css")
    return put_together("tape.html", STYLE=style, DATA=data(history), SCRIPT=script("tape"))


def data(history):
    """moments [[step, words]], regions with the cells that change, lanes and arrows of the timeline."""
    recording = history.recording
    found = regions(history)
    steps = {change[0] for region in found for cells in region["ranks"] for cell in cells for change in cell["changes"]}
    every = [[m.step, m.text] for m in moments(history) if m.step == 0 or m.step in steps]
    timeline = Timeline(history)
    cfg = recording.cfg
    return {
        "about": f"{cfg.n_ranks} ranks, {cfg.n_experts} experts, top-{cfg.top_k}, {cfg.token_format}, seed "
        f"{recording.seed}: {len(recording.events):,} operations were recorded.",
        "verdict": (
            "Every byte of both results equals the reference's."
            if not recording.differences
            else f"The results differ from the reference: {recording.differences[0]}"
        ),
        "moments": every,
        "regions": found,
        "runs": [0, recording.dispatch_end, recording.end + 1],
        "phases": PHASES,
        "lanes": [lane_of(lane, history) for lane in timeline.lanes],
        "arrows": [
            [
                a.source.rank,
                a.source.block,
                a.source.step,
                a.target.rank,
                a.target.block,
                a.target.step,
                f"release at {a.source.line}, acquire at {a.target.line}: {history.arrays.place(a.source)}",
            ]
            for a in timeline.arrows
        ],
    }


def lane_of(lane, history):
    """A lane as JSON."""
    return {
        "rank": lane.rank,
        "block": lane.block,
        "begin": lane.begin,
        "end": lane.end,
        "slices": [[s.phase, s.begin, s.end, s.word] for s in lane.slices],
        "marks": [
            [m.kind, m.event.step, f"{m.kind}: {m.event.word} {history.arrays.place(m.event)} {m.event.line}"]
            for m in lane.marks
        ],
    }


def regions(history):
    """Arrays that changed: [{name, meaning, ranks: [[{name, index, changes: [[step, text]]}]]}]."""
    made = []
    for name, meaning in MEANING.items():
        ranks = [list(cells(history, name, rank)) for rank in range(history.recording.cfg.n_ranks)]
        if any(ranks):
            made.append({"name": name, "meaning": meaning, "ranks": ranks})
    return made


def cells(history, name, rank):
    """The elements of an array that changed: words with their values, slots and rows with their tokens."""
    if name in (*COUNTERS, *SIGNALS, "row_offsets"):
        for index, changes in history.of(name, rank).items():
            if len(changes) > 1 or changes and changes[0].event is not None:
                told = [[c.step, word(name, c.value)] for c in changes if name != "row_offsets" or c.event]
                yield cell(history, name, rank, index, told)
        return
    for index, (event, token) in sorted(history.filled(name, rank).items()):
        yield cell(history, name, rank, index, [[event.step, f"t{token}"]])


def cell(history, name, rank, index, changes):
    """A cell as JSON."""
    return {"name": history.label(name, rank, index), "index": ", ".join(map(str, index)), "changes": changes}
