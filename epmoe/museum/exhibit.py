"""An exhibit: its broken kernel and the repaired one, run under many schedules, with and without the race detector."""

import ast
import difflib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from epmoe import device
from epmoe.device.intrinsics import INTRINSICS
from epmoe.device.sim.recorder import Recorder
from epmoe.lessons import FILES as LESSONS
from epmoe_ref.errors import DeadlockError, EPError, RaceError

SCHEDULES = 20
RANKS = 2
BYTES = 256  # of a rank's memory
PUZZLES = Path(__file__).parents[1] / "puzzles"


@dataclass(frozen=True)
class Outcome:
    """What became of a run. how: "right", "wrong", "race", "hang" or "error"; says: the report; events: what happened."""

    how: str
    says: str
    seed: int
    events: tuple


class Exhibit:
    """The exhibit of a file."""

    def __init__(self, file):
        self.file = Path(file)
        self.source = self.file.read_text(encoding="utf-8")
        text = ast.get_docstring(ast.parse(self.source))
        self.title, _, story = text.partition("\n\n")
        self.title, self.story = self.title.rstrip("."), " ".join(story.split())
        self._broken = self._names(self.source)
        self.links = getattr(self._broken, "LINKS", ())

    def _names(self, source):
        names = {word: getattr(device, word) for word in INTRINSICS}  # a repair may need one more
        exec(compile(source, str(self.file), "exec"), names)
        return SimpleNamespace(**names)

    @cached_property
    def repaired_source(self):
        """The file with its repair."""
        source = self.source
        for text, new in self._broken.REPAIR:
            at = self._at(source, text)
            source = source[:at] + new + source[at + len(text) :]
        return source

    @staticmethod
    def _at(source, text):
        """Where a repair's text stands, outside the list of repairs."""
        head = source.index("REPAIR = (")
        tail = source.index("\n\n\n", head)
        places = [at for at in (source.find(text, 0, head), source.find(text, tail)) if at >= 0]
        if len(places) != 1:
            raise ValueError(f"{text!r} stands {len(places)} times in the exhibit, not once")
        return places[0]

    # ------------------------------------------------------------------ running
    def run(self, seed, *, repaired=False, racecheck=True):
        """The Outcome under one schedule."""
        names = self._names(self.repaired_source) if repaired else self._broken
        kernel = next(v for v in vars(names).values() if type(v) is type(device.kernel(lambda: 0)))
        recorder = Recorder() if racecheck else None
        machine = device.machine(RANKS, seed=seed, racecheck=racecheck, recorder=recorder)
        regions = [(name, at, (n,), np.int32, ("word",)) for name, at, n in names.REGIONS]
        table = machine.alloc(8 * RANKS, "addresses", regions=[("addresses", 0, (RANKS,), np.uint64, ("rank",))])
        nbytes, shared = getattr(names, "BYTES", BYTES), getattr(names, "SHARED", 0)
        memories = [machine.alloc(nbytes, "memory", rank, regions=regions) for rank in range(RANKS)]
        try:
            for memory in memories:
                memory.fill(0)
                if hasattr(names, "before"):
                    names.before(memory, np)
            table.write(np.array([memory.address for memory in memories], np.uint64))
            streams = [machine.stream(rank) for rank in range(RANKS)]
            for call in range(getattr(names, "CALLS", 1)):
                for rank, stream in enumerate(streams):
                    given = table.address, call, rank
                    machine.launch(kernel, names.BLOCKS, 32 * names.WARPS, given, stream=stream, shared_bytes=shared)
            machine.synchronize()
            how, says = self._result(names, memories)
        except EPError as error:
            how, says = {RaceError: "race", DeadlockError: "hang"}.get(type(error), "error"), str(error)
        finally:
            for buffer in (*memories, table):
                buffer.free()
        return Outcome(how, says, seed, told(recorder) if recorder else ())

    @staticmethod
    def _result(names, memories):
        at = next(place for name, place, _ in names.REGIONS if name == "result")
        for rank, want in names.EXPECTED.items():
            got = memories[rank].read(np.int32, len(want), at).tolist()
            if got != want:
                return "wrong", f"rank {rank} got {got}, and must get {want}"
        return "right", ""

    @cached_property
    def first_failure(self):
        """The Outcome of the first schedule that breaks it, if possible after some accesses; LookupError if none does."""
        first = None
        for seed in range(SCHEDULES):
            outcome = self.run(seed)
            if outcome.how != "right":
                first = first or outcome
                if outcome.events:
                    return outcome
        if first is None:
            raise LookupError(f"{self.file.name}: nothing is reported under {SCHEDULES} schedules")
        return first

    def counts(self, *, repaired=False, racecheck=True):
        """{how: under how many of SCHEDULES schedules}."""
        hows = [self.run(s, repaired=repaired, racecheck=racecheck).how for s in range(SCHEDULES)]
        return {how: hows.count(how) for how in dict.fromkeys(hows)}

    # ------------------------------------------------------------------ showing
    @cached_property
    def code(self):
        """[(line number, line)] of the sizes and the kernel, without docstring, imports, links and repair."""
        lines, out = self.source.splitlines(), []
        for node in ast.parse(self.source).body:
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr)):
                continue
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("LINKS", "WHY", "REPAIR", "ALSO"):
                continue
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            out.append([(n, lines[n - 1]) for n in range(first, node.end_lineno + 1)])
        return out

    @property
    def new_words(self):
        """[(intrinsic, what it does)] of those that no lesson and no puzzle uses."""
        code = "\n".join(line for part in self.code for _, line in part)
        known = "".join(path.read_text(encoding="utf-8") for path in (*LESSONS.values(), *PUZZLES.glob("p[0-9]*.py")))
        words = [w for w in INTRINSICS if re.search(rf"\b{w}\(", code) and not re.search(rf"\b{w}\b", known)]
        return [(word, getattr(device, word).__doc__.partition("\n\n")[0]) for word in words]

    @property
    def first_region(self):
        """The name of its first region of memory."""
        return self._broken.REGIONS[0][0]

    @property
    def diff(self):
        """The repair as lines of a unified diff, with little around it."""
        made = difflib.unified_diff(
            self.source.splitlines(), self.repaired_source.splitlines(), "broken", "repaired", n=1, lineterm=""
        )
        return list(made)[2:]

    @property
    def guilty(self):
        """{line number that answers "spot it": why}: of the first repair's text, and of the texts in ALSO."""
        found = {}
        for text, why in {**getattr(self._broken, "ALSO", {}), self._broken.REPAIR[0][0]: self._broken.WHY}.items():
            first = self.source.count("\n", 0, self._at(self.source, text)) + 1
            found |= dict.fromkeys(range(first, first + max(1, text.count("\n"))), why)
        return found

    def spot(self, line):
        """(whether this is the line, what to say)."""
        at = {n: text for part in self.code for n, text in part}
        if line in self.guilty:
            return True, f"it is line {line}: {at[line].strip()}\n{self.guilty[line]}"
        if line not in at:
            return False, f"there is no line {line} in the code: it has lines {min(at)} to {max(at)}."
        if f"{self.file.name}:{line} " in self.first_failure.says:
            return (
                False,
                f"the report names line {line}, so the harm shows there. But the line does what it should; something "
                "else does not.",
            )
        return False, f"line {line} is right: {at[line].strip()}"


def told(recorder):
    """The operations on memory in order, one a line; repeated polls are shown once."""
    out, last = [], {}
    for event in recorder.events:
        if event.kind in ("begin", "end", "warp barrier") or event.span is not None and event.span.name == "addresses":
            continue
        who = event.rank, event.block, event.thread
        what = event.line, event.address, event.saw
        if event.kind == "load" and last.get(who) == what:
            continue
        last[who] = what
        out.append(_line(event))
    return tuple(out)


def _line(event):
    who = f"rank {event.rank} block {event.block}" + (f" thread {event.thread}" if event.thread > 0 else "")
    text = f"{who:24} line {event.line.rpartition(':')[2]:>2} {event.word or event.kind}"
    if event.span is None:
        return text
    value = event.saw if event.wrote is None else event.wrote
    numbers = [] if value is None else np.frombuffer(value, np.int32).tolist()
    shown = " ".join(map(str, numbers[:4])) + (" ..." if len(numbers) > 4 else "")
    place = re.sub(r"\[word (\d+)\] of rank (\d+)", r"[\1] of \2", event.span.describe(event.address))
    return f"{text} {place} {'=' if event.wrote is not None else '->'} {shown}".rstrip("-> ")
