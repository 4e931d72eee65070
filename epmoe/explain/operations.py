"""Recorded runs in the form that the page plays: words of memory, operations in order, and the error."""

import re
from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np

from epmoe import layout
from epmoe.explain import broken
from epmoe.explain.bundle import chapter, source
from epmoe.kernels import plain
from epmoe_ref.errors import EPError

ACCESS = re.compile(r"\d\. (read|write)\s+(\S+:\d+).*?\n\s*by rank (\d+) block (\d+)")


class Word(NamedTuple):
    """A word in the picture: its name, rank and address, and the function that shows its bytes."""

    name: str
    rank: int
    address: int
    nbytes: int
    show: object

    def touched_by(self, e):
        """Whether an event accesses the word."""
        return e.span is not None and e.address < self.address + self.nbytes and e.address + e.nbytes > self.address


def number(raw):
    """Bytes as a number; "–" if it has not arrived."""
    value = int.from_bytes(raw, "little")
    return "–" if value == layout.MAX_FINITE else str(value)


def token(raw):
    """The first of the token's numbers."""
    return f"{float(np.frombuffer(raw[:2], ml_dtypes.bfloat16)[0]):g}"


def words_of(run, names):
    """The words of a run that a picture shows."""
    counters = {r.name: r.offset for r in layout.counter_regions(broken.CFG)}

    def counter(name, rank, index=0):
        return broken.at(run, "ep_counters", rank) + counters[name] + 4 * index

    made = {
        "message": Word("message", 1, broken.at(run, "dispatch_recv_buf", 1), 16, token),
        "recv_count": Word("recv_count", 1, broken.at(run, "dispatch_recv_count", 1), 8, number),
        "reserved": Word("reserved", 0, counter("reserved", 0, 1), 4, number),
        "finished": Word("finished", 0, counter("finished", 0, 1), 4, number),
        "D": Word("D (done)", 0, counter("D", 0), 4, number),
    }
    for name, words in (("row", "row 0"), ("row2", "row 0, next")):
        if (name, 1) in run.buffers:
            made[name] = Word(words, 1, run.buffers[name, 1].address, 16, token)
    return [made[name] for name in names if name in made]


def operations(run, names):
    """The kernels' operations on the words, [{rank, text, word, value, ...}]; polls of one value count as one."""
    words, found = words_of(run, names), []
    for e in run.recorder.events:
        index = next((n for n, w in enumerate(words) if w.touched_by(e)), None)
        if index is None:
            continue
        raw = e.wrote if e.wrote is not None else e.saw
        offset = max(0, words[index].address - e.address)
        value = words[index].show(raw[offset : offset + words[index].nbytes])
        key = (e.rank, e.block, e.kind, index)
        same = next((o for o in reversed(found) if o["key"] == key and o["value"] == value), None)
        if same is not None and (e.kind == "load" or found[-1] is same) and not _changed(found, same, index):
            continue
        found.append(
            dict(
                key=key,
                rank=e.rank,
                block=e.block,
                word=index,
                value=value,
                writes=e.wrote is not None,
                site=("write" if e.wrote is not None else "read", e.line, e.rank, e.block),
                text=f"rank {e.rank} block {e.block}: {_says(names[index], e, value)}  ({e.line})",
            )
        )
    return found


def _changed(found, since, word):
    return any(o["word"] == word and o["writes"] for o in found[found.index(since) + 1 :])


def _says(word, e, value):
    order = f", {e.order}" if e.order in ("release", "acquire", "acq_rel", "relaxed") else ""
    if word == "message":
        return f"{'writes' if e.wrote is not None else 'reads'} the message: {value}"
    if word.startswith("row"):
        return f"{'writes' if e.wrote is not None else 'reads'} row 0: {value}"
    if word == "reserved" and e.kind == "atomic":
        return f"claims slot {int(value) - 1}: reserved is now {value}"
    if word == "finished" and e.kind == "atomic":
        return f"counts a message as written: finished is now {value}{order}"
    if word == "D" and e.kind == "atomic":
        return f"is done: D is now {value}"
    if word == "recv_count" and e.wrote is not None and value != "–":
        return f"signals: recv_count = {value}{order}"
    if e.wrote is not None:
        return f"resets {word} to {value}"
    return f"sees {word} = {value}{order}"


@cache
def pairs():
    """The page's recordings: for each mistake the correct run and the broken one, as JSON."""
    captions = chapter("broken", source("text/13-broken.md")).captions
    return [_pair(mistake, caption) for mistake, caption in zip(broken.MISTAKES, captions, strict=True)]


def _pair(mistake, caption):
    wrong = _showing(mistake)
    right = broken.run(plain, mistake.seed, again="combine" if mistake.rounds else None, slow=mistake.slow)
    if right.reports or right.row() != broken.FIRST:
        raise EPError(f"the plain kernels are not right beside {mistake.name}: {right.reports}, row {right.row()}")
    report = _report(wrong, mistake)
    sides = {"right": _side(right, mistake, ()), "broken": _side(wrong, mistake, report)}
    return {
        "name": mistake.name,
        "title": re.sub("<.*?>", "", re.search("<strong>(.*?)</strong>", caption)[1]).rstrip("."),
        "length": max(len(side["operations"]) for side in sides.values()),
        "report": report,
        **sides,
    }


def _showing(mistake):
    """A broken run in which the picture's words show the mistake."""
    kernels = broken.edited(mistake)
    for seed in (mistake.seed, *broken.SEEDS):
        run = broken.run(kernels, seed, again="" if mistake.rounds else None, slow=mistake.slow)
        wrong = mistake.name == "missing-release" or run.row() != broken.FIRST
        if wrong and _report(run, mistake):
            return run
    raise EPError(f"{mistake.name} shows in none of {len(broken.SEEDS)} schedules")


def _report(run, mistake):
    """The lines of the race report about a word in the picture, and of the report of a hang if there is one."""
    sites = {o["site"] for o in operations(run, mistake.words)}
    for report in run.reports:
        if _sites(report) <= sites and "data race" in report:
            hang = next((r.splitlines()[0].rstrip(":") for r in run.reports if "data race" not in r), None)
            return [line.strip() for line in report.splitlines()] + ([hang] if hang else [])
    return []


def _sites(report):
    """The accesses in the text of a report, as operations name them."""
    return {(kind, line, int(rank), int(block)) for kind, line, rank, block in ACCESS.findall(report)}


def _side(run, mistake, report):
    made = operations(run, mistake.words)
    racing = _sites("\n".join(report))
    words = words_of(run, mistake.words)
    firsts = {"message": f"{broken.OLD:g}", "recv_count": "–"}
    expected, hangs = f"{broken.FIRST:g}", any("every thread waits" in line for line in report)
    for o in made:
        name = mistake.words[o["word"]]
        o["race"] = o["site"] in racing
        o["wrong"] = (
            bool(report) and (name == "row" or name == "message" and not o["writes"]) and o["value"] != expected
        )
        if name == "row" and mistake.rounds:
            expected = f"{broken.SECOND:g}"  # after the first round's row comes the second's
    if report and hangs:
        made[-1]["wrong"], made[-1]["text"] = True, made[-1]["text"] + ", and waits for ever"
    return {
        "words": [{"name": w.name, "rank": w.rank, "first": firsts.get(n, "0")} for n, w in zip(mistake.words, words)],
        "operations": [
            {k: o[k] for k in ("rank", "block", "text", "word", "race", "wrong")}
            | ({"value": o["value"]} if o["writes"] else {})
            for o in made
        ],
    }
