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
# array -> kind of a message, row or result that is completely written, and words
COMPLETED = {
    "dispatch_recv_buf": ("message", "the message of token {token} of rank {index[1]} is in {place}"),
    "output_tokens": ("row", "{place} is complete"),
    "combine_recv_buf": ("way back", "the row is in {place}"),
    "combined": ("sum", "{place} is complete"),
}
NEAR = 400  # steps: closer changes of one kind by one block may form one moment


class Moment(NamedTuple):
    """A moment: its step, and a sentence that describes it."""

    step: int
    text: str


class Happening(NamedTuple):
    """One change, before it is joined with neighbouring changes."""

    kind: str
    event: object
    what: str


def moments(history):
    """All moments in order, after one for the beginning."""
    groups = []
    for h in sorted(happenings(history), key=lambda h: h.event.step):
        if groups and _belongs(h, groups[-1]):
            groups[-1].append(h)
        else:
            groups.append([h])
    return [Moment(0, "Nothing has happened yet: no kernel runs."), *map(_moment, groups)]


def _belongs(h, group):
    kind, event, _ = group[-1]
    same = (h.kind, h.event.launch, h.event.block) == (kind, event.launch, event.block)
    return same and h.event.step - event.step < NEAR


def happenings(history):
    """Yield every change that belongs to a moment."""
    for rank in range(history.recording.cfg.n_ranks):
        for name in (*COUNTERS, *SIGNALS, "row_offsets"):
            for index, changes in history.of(name, rank).items():
                for before, change in zip([None, *changes], changes):
                    if change.event is not None:
                        what = _change(history, name, rank, index, before, change)
                        yield Happening(_kind(history, name, change), change.event, what)
        for name, (kind, what) in COMPLETED.items():
            for index, (event, token) in history.filled(name, rank).items():
                place = history.label(name, rank, index)
                yield Happening(kind, event, what.format(place=place, index=index, token=token))


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


def _moment(group):
    event = group[0].event
    says = SAYS.get(group[0].kind, "writes")
    shown = "; ".join(h.what for h in group[:2]) + (f"; and {len(group) - 2} more" if len(group) > 2 else "")
    return Moment(group[-1].event.step, f"Rank {event.rank} block {event.block} {says}: {shown}.")
