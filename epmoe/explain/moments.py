"""The moments that the page steps through: each change of a counter or signal, each message, row and sum."""

from typing import NamedTuple

from epmoe.explain.arrays import COUNTERS, NOT_ARRIVED, SIGNALS, word

KINDS = {
    "reserved": "claim",
    "A": "places",
    "B": "places",
    "row_offsets": "places",
    "C": "rows",
    "E": "ready",
    "D": "through",
    "combine_ready": "ready",
}
NEAR = 400  # steps: closer changes of one kind by one block may form one moment


class Moment(NamedTuple):
    """A moment: its step, a sentence that describes it, and its run (0: dispatch, 1: combine)."""

    step: int
    text: str
    run: int


class Happening(NamedTuple):
    """One change, before it is joined with neighbouring changes."""

    step: int
    kind: str
    event: object
    what: str


def moments(history):
    """All moments in order, after one for the beginning."""
    recording = history.recording
    found = [Moment(0, "Nothing has happened yet: no kernel runs.", 0)]
    group = []
    for h in sorted(happenings(history), key=lambda h: h.step):
        if group and not (h.kind == group[0].kind and who(h) == who(group[0]) and h.step - group[-1].step < NEAR):
            found.append(_moment(recording, group))
            group = []
        group.append(h)
    if group:
        found.append(_moment(recording, group))
    return sorted(found, key=lambda m: m.step)


def who(h):
    """The launch and block that made a change."""
    return h.event.launch, h.event.block


def happenings(history):
    """Yield every change that belongs to a moment."""
    ranks = range(history.recording.cfg.n_ranks)
    for rank in ranks:
        for name in (*COUNTERS, *SIGNALS, "row_offsets"):
            for index, changes in history.of(name, rank).items():
                for before, change in zip([None, *changes], changes):
                    if change.event is not None:
                        yield Happening(
                            change.step,
                            _kind(history, name, change),
                            change.event,
                            _change(history, name, rank, index, before, change),
                        )
        for index, message in history.messages(rank).items():
            place = history.label("dispatch_recv_buf", rank, index)
            yield Happening(
                message.filled.done,
                "message",
                message.filled.event,
                f"the message of token {message.token} of rank {index[1]} is in {place}",
            )
        for (row,), filled in history.filled("output_tokens", rank, 1).items():
            yield Happening(
                filled.done, "row", filled.event, f"{history.label('output_tokens', rank, (row,))} is complete"
            )
        for (t, k), filled in history.filled("combine_recv_buf", rank, 2).items():
            yield Happening(
                filled.done,
                "way back",
                filled.event,
                f"the row is in {history.label('combine_recv_buf', rank, (t, k))}",
            )
        for (t,), filled in history.filled("combined", rank, 1).items():
            yield Happening(filled.done, "sum", filled.event, f"{history.label('combined', rank, (t,))} is complete")


def _kind(history, name, change):
    combining = change.step > history.recording.dispatch_end
    cleared = change.value == 0 and change.event.kind == "store" and name not in SIGNALS
    if cleared and name != "row_offsets" or change.value == NOT_ARRIVED:
        return "clean"
    if name == "finished" and combining:
        return "returned"
    return KINDS.get(name, name)


def _change(history, name, rank, index, before, change):
    value = "not arrived" if change.value == NOT_ARRIVED else word(name, change.value)
    no_old = before is None or before.value == NOT_ARRIVED or name == "row_offsets"
    return f"{history.label(name, rank, index)}: {'' if no_old else word(name, before.value) + ' → '}{value}"


SAYS = {
    "claim": "claims a slot",
    "finished": "counts messages as written",
    "returned": "counts what it has returned",
    "dispatch_recv_count": "signals: its messages are there",
    "combine_recv_count": "signals: its rows are back",
    "places": "numbers the rows",
    "ready": "raises a ready flag",
    "through": "is done",
    "rows": "claims a tile of rows",
    "message": "completes a message",
    "row": "completes a row",
    "way back": "completes a returned row",
    "sum": "completes a sum",
    "clean": "resets words",
}


def _moment(recording, group):
    event, last = group[0].event, group[-1]
    says = SAYS.get(group[0].kind, "writes")
    shown = "; ".join(h.what for h in group[:2]) + (f"; and {len(group) - 2} more" if len(group) > 2 else "")
    words = f"Rank {event.rank} block {event.block} {says}: {shown}."
    return Moment(last.step, words, int(last.step > recording.dispatch_end))
