"""Compares every word of an implementation's memory with the model, after each half of dispatch and combine.

The model (epmoe_ref.protocol) takes the same steps, and epmoe_ref.words says which words are fixed and which are free.
The implementation's buffers and counters are read and compared when all ranks have done the same half.
"""

from dataclasses import dataclass, replace

import numpy as np

from epmoe.check import word_causes
from epmoe.check.calls import WrongForm, progress
from epmoe.check.difference import Difference, as_array, form
from epmoe.check.implementation import has_halves
from epmoe_ref import EPLocalSyncCounters, format_of, words
from epmoe_ref.protocol import MAX_FINITE, STEPS, World
from epmoe_ref.words import may_be_under_way

BUFFERS = ("dispatch_recv_buf", "dispatch_recv_count", "combine_recv_buf", "combine_recv_count")
FIELDS = ("READY + end row", "count")  # of region A


@dataclass(frozen=True)
class Suspect:
    """One wrong region of one rank: its content, the model's, and its content before this half.

    held: {rank: {region: array}} of all ranks that were read. states: the model's, of all ranks. before: {region:
    array} of this rank after the previous half; empty if it was not read then.
    """

    state: object
    step: str
    name: str
    fixed: words.Words
    held: dict
    states: list
    before: dict

    @property
    def cfg(self):
        """The EPConfig."""
        return self.state.cfg

    @property
    def raw(self):
        """The region as it was read."""
        return self.held[self.state.rank][self.name]

    @property
    def got(self):
        """The region in the form of the model's words: messages of a segment in token order."""
        if self.name != "dispatch_recv_buf":
            return self.raw
        return words.in_token_order(self.cfg, self.raw, self.state.messages_here)[0]

    @property
    def place(self):
        """For dispatch_recv_buf: the slot each message of `got` came from, int [n_local_experts, n_ranks, slots]."""
        return words.in_token_order(self.cfg, self.raw, self.state.messages_here)[1]


def flat_counters(cfg, region):
    """int32 [8 * n_experts + 12] from regions. region(name) gives the words in use, by epmoe.layout's names."""
    flat = np.zeros(EPLocalSyncCounters[cfg.n_experts].total_size(), np.int32)
    for name, (start, _) in EPLocalSyncCounters[cfg.n_experts].regions().items():
        held = region("combine_ready" if name == "combine_wait" else name)
        flat[start : start + held.size] = held.ravel()
    return flat


def _under_way(state, regions):
    """Segments whose signal may arrive later and has not arrived yet, according to the recv_count that was read."""
    name = state.next_step.replace("_wait", "_recv_count")
    may = may_be_under_way(state)
    return may & (regions[name] == MAX_FINITE) if name in regions else may


class WordsOf:
    """Compares an implementation's words with the model's, if it has buffers() or counters(). Otherwise does nothing.

    world: the implementation's object. call: Calls of it. halves: whether it is called by halves.
    """

    def __init__(self, world, cfg, call):
        self.world, self.cfg, self.call, self.halves = world, cfg, call, has_halves(world)
        self.model = World(cfg) if world.buffers is not None or world.counters is not None else None
        self.done, self.dispatched, self._before = "the start", None, {}
        self.not_read = set()  # of the memory that was read last: the names of the rest

    def step(self, half, *of_ranks, **options_of_ranks):
        """Run a half of the model on all ranks. Arguments: lists over ranks of the step's arguments."""
        if self.model is None:
            return
        take = getattr(self.model, half)
        results = [
            take(rank, *(arg[rank] for arg in of_ranks), **{n: of[rank] for n, of in options_of_ranks.items()})
            for rank in range(self.cfg.n_ranks)
        ]
        if half == "dispatch_wait":
            self.dispatched = results
        self.done = half

    def rows(self, expert_outputs):
        """Arguments of the model's combine_async: its own rows of expert output, and their src_info."""
        if self.model is None:
            return ()
        own = self.dispatched
        return [expert_outputs(rank, d) for rank, d in enumerate(own)], [d.src_info for d in own]

    def differences(self):
        """A Difference for each wrong region of this process's ranks, with its likely cause, after a half.

        Collective: all ranks have done the half. Errors: WrongForm.
        """
        if self.model is None:
            return []
        self.call.ranks.gather(None)
        held = self._read()
        found = [d for rank, regions in held.items() for d in misshapen(self.cfg, rank, regions)]
        return found or self._compare({rank: self._opened(rank, regions) for rank, regions in held.items()})

    def _read(self):
        """{rank: {region: array}} of this process's ranks: any of BUFFERS, and "ep_counters". Errors: WrongForm."""
        read = {}
        if self.world.buffers is not None:
            progress.begin("buffers")
            buffers = self.world.buffers()
            if buffers is not None and not isinstance(buffers, dict):
                raise WrongForm("buffers", buffers, "a dict {name of a buffer: array} is needed")
            read = {name: self.call.over_ranks(f"buffers: {name}", of) for name, of in (buffers or {}).items()}
        if self.world.counters is not None:
            progress.begin("counters")
            if (counters := self.world.counters()) is not None:
                read["ep_counters"] = self.call.over_ranks("counters", counters)
        self.not_read = {*BUFFERS, "ep_counters"} - set(read)
        return {rank: {name: as_array(of[rank]) for name, of in read.items()} for rank in self.call.ranks.here}

    def _opened(self, rank, regions):
        """Copies of the regions, with each region of the counters in place of "ep_counters"."""
        opened = dict(regions)
        if "ep_counters" in opened:
            theirs = replace(self.model.ranks[rank], ep_counters=opened.pop("ep_counters"))
            opened |= {name: theirs.region(name) for name in EPLocalSyncCounters[self.cfg.n_experts].regions()}
        return {name: np.array(array) for name, array in opened.items()}

    def _compare(self, by_rank):
        found, before, self._before = [], self._before, by_rank
        for rank, regions in by_rank.items():
            state = self.model.ranks[rank]
            for name, fixed in words.words(state, _under_way(state, regions)).items():
                if name not in regions:
                    continue
                suspect = Suspect(state, self.done, name, fixed, by_rank, self.model.ranks, before.get(rank, {}))
                wrong = fixed.wrong(suspect.got)
                if len(wrong):
                    arrays, says = (suspect.raw, fixed.values), _says(suspect, wrong)
                    cause = word_causes.cause_of(suspect)
                    found.append(Difference(name, says, *arrays, rank, rule=fixed.rule, cause=cause))
        return found


def misshapen(cfg, rank, regions):
    """Differences for regions that do not have the model's shape and word size; [] if all have."""
    model, found = World(cfg).ranks[rank], []
    for name, array in regions.items():
        if name not in (*BUFFERS, "ep_counters"):
            found.append(Difference("buffers", f"gave {name!r}; there are {', '.join(BUFFERS)}", rank=rank))
            continue
        want = getattr(model, name)
        if array.shape != want.shape or array.dtype != want.dtype:
            found.append(Difference(name, f"is {form(array)}, the model has {form(want)}", array, want, rank))
    return found


def _says(suspect, wrong):
    fixed, at = suspect.fixed, tuple(int(i) for i in wrong[0])
    index = list(at)
    if suspect.name == "dispatch_recv_buf":
        index[2] = int(suspect.place[at[:3]])
    named = [f"{name} {i}" for name, i in zip(fixed.index_names, index)]
    what, unit = "", "words"
    if suspect.name == "A":
        named[2] = FIELDS[at[2]]
    elif suspect.name.endswith("_buf"):
        what, unit = f" ({_part(suspect, at)})", "bytes"
    wanted = _shown(fixed.values[at])
    if fixed.or_else is not None and fixed.or_else[at] != fixed.values[at]:
        wanted += f" or {_shown(fixed.or_else[at])}"
    return (
        f"[{', '.join(named)}]{what} {_when(suspect.step)} is {_shown(suspect.got[at])}, wanted {wanted}; first of "
        f"{len(wrong)} wrong {unit}"
    )


def _when(step):
    return f"after {step}" if step in STEPS else f"at {step}"


def _part(suspect, at):
    if suspect.name == "combine_recv_buf":
        return "the row that an expert returned"
    fmt, state, byte = format_of(suspect.cfg), suspect.state, at[3]
    start = fmt.src_info_offset()
    token = int(suspect.fixed.values[at[0], at[1], at[2], start : start + 4].view("<i4")[0])
    part = "payload" if byte < start else "src_info" if byte < fmt.topk_info_offset() else "topk_info"
    src_rank = state.rank if suspect.cfg.skip_a2a else at[1]
    return f"{part} of the message of token {token} of rank {src_rank}"


def _shown(word):
    word = np.asarray(word)
    if word.dtype == np.uint8:
        return f"0x{int(word):02x}"
    return "MAX_FINITE" if word.dtype == np.uint64 and int(word) == 2**64 - 1 else str(int(word))
