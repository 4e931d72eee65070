"""Runs one case of the expert-grouped layout on an implementation: rounds of dispatch, made-up experts, combine.

Every round checks three laws. Results equal the reference's. Inputs are not changed. Nothing of earlier rounds shows;
each round has new data, so leftovers are recognised.
"""

import numpy as np

import epmoe_ref
from epmoe.check import combine_causes, dispatch_causes
from epmoe.check.calls import LATER, WrongForm, listed, made, progress
from epmoe.check.cases import epilogue, epilogue_args
from epmoe.check.compare import compare_combined, compare_dispatched, field
from epmoe.check.difference import Difference
from epmoe.check.places import PADDING, SHARED, places_of
from epmoe.check.words import WordsOf

COMPARED = ("expert_ids", "recv_count", "output_scales", "scales_offset")
DISPATCHED = "dicts or objects with output_tokens, row_offsets, src_info, ..."
# content of padding rows of expert_outputs; it shows if an implementation reads them
NAN_ROW = float("nan")


def run_case(implementation, case, ranks, not_given):
    """Differences of the first round that has any, over the ranks of this process; empty if all rounds are right.

    not_given: a set; the names of arrays that dispatch left out are added to it.
    """
    with made(implementation, case.cfg) as world:
        previous, memory = None, WordsOf(world, case.cfg, ranks, implementation.per_rank)
        found = memory.differences()
        if memory.wrong:
            return [d.in_round(0) for d in found]
        rounds = []
        for round_ in range(case.rounds):
            this = Round(case, round_, ranks.here, previous)
            found = this.dispatch(world, implementation.per_rank, memory)
            not_given |= this.not_given()
            if not any(ranks.gather(bool(found))):
                found = this.combine(world, implementation.per_rank, memory)
            if any(ranks.gather(bool(found))):
                return [d.in_round(round_) for d in found]
            previous = this
            rounds.append(this)
        return [d.in_round(this.number).because(LATER) for this in rounds for d in this.compared()]


class Round:
    """One round's inputs, the reference's results, and the implementation's; lists over all ranks of the world. For
    ranks of other processes the implementation's are None."""

    def __init__(self, case, round_, here, previous):
        self.case, self.cfg, self.number = case, case.cfg, round_
        self.here, self.previous = here, previous
        self.input_tokens, self.topk_ids = case.input_tokens(round_), case.topk_ids(round_)
        self.router_weights = case.router_weights(round_)
        self.scale = {} if case.input_scale is None else {"input_scale": list(case.input_scale)}
        self.dispatched_want = epmoe_ref.dispatch(self.cfg, self.input_tokens, self.topk_ids, **self.scale)
        self.dispatched = self.combined = self.combined_want = None
        self.options = {}
        if case.epilogue:
            self.options = dict(epilogue=epilogue, epilogue_args=epilogue_args(self.cfg.n_ranks))

    def reference_combine(self):
        """(expert_outputs, combined) of the reference, lists over ranks, rows in the reference's order."""
        outputs = [self.expert_outputs(rank, want) for rank, want in enumerate(self.dispatched_want)]
        return outputs, epmoe_ref.combine(
            self.cfg, outputs, self.dispatched_want, router_weights=self.router_weights, **self.options
        )

    def dispatch(self, world, per_rank, memory):
        """Call dispatch, or its two halves. Returns the differences of results and of words."""
        arguments = [self.input_tokens, self.topk_ids]
        memory.step("dispatch_async", *arguments, **self.scale)
        if memory.halves:
            changed, _ = self._call(world.dispatch_async, arguments, self.scale, per_rank)
            changed += memory.differences()
            if memory.wrong:
                self.dispatched = ()
                return changed
            _, self.dispatched = self._call(world.dispatch_wait, [], {}, per_rank)
        else:
            changed, self.dispatched = self._call(world.dispatch, arguments, self.scale, per_rank)
        memory.step("dispatch_wait")
        changed += memory.differences()
        try:
            self.dispatched = listed("dispatch", self.dispatched, self.cfg.n_ranks, DISPATCHED)
        except WrongForm as wrong:
            self.dispatched = ()
            return [wrong.difference]
        return changed + dispatch_causes.with_causes(self, self._compared_dispatch())

    def compared(self):
        """The differences of both calls' results, as they are now."""
        return self._compared_dispatch() + self._compared_combine()

    def _compared_dispatch(self):
        return [
            d
            for rank in self.here
            for d in compare_dispatched(self.cfg, rank, self.dispatched[rank], self.dispatched_want[rank])
        ]

    def _compared_combine(self):
        return [
            d
            for rank in self.here
            for d in compare_combined(
                self.cfg, rank, self.combined[rank], self.combined_want[rank], topk_ids=self.topk_ids[rank]
            )
        ]

    def not_given(self):
        """Names of the reference's arrays that the implementation's results lack."""
        ranks = self.here if len(self.dispatched) == self.cfg.n_ranks else ()
        return {
            name
            for rank in ranks
            for name in COMPARED
            if field(self.dispatched_want[rank], name) is not None and field(self.dispatched[rank], name) is None
        }

    def combine(self, world, per_rank, memory):
        """Call combine, or its two halves, on dispatch's result, in its row order. Returns the differences."""
        outputs = [
            self.expert_outputs(rank, self.dispatched[rank]) if rank in self.here else None
            for rank in range(self.cfg.n_ranks)
        ]
        _, self.combined_want = self.reference_combine()
        arguments = [outputs, self.dispatched, self.router_weights]
        memory.step("combine_async", *memory.rows(self.expert_outputs))
        if memory.halves:
            changed, _ = self._call(world.combine_async, arguments[:2], {}, per_rank)
            changed += memory.differences()
            if memory.wrong:
                return changed
            _, self.combined = self._call(world.combine_wait, arguments[2:], self.options, per_rank)
        else:
            changed, self.combined = self._call(world.combine, arguments, self.options, per_rank)
        memory.step("combine_wait")
        changed += memory.differences()
        try:
            self.combined = listed("combine", self.combined, self.cfg.n_ranks, "arrays [num_tokens, hidden]")
        except WrongForm as wrong:
            return [wrong.difference]
        return changed + combine_causes.with_causes(self, self._compared_combine())

    @np.errstate(all="ignore")  # some cases have NaN and overflow on purpose
    def _call(self, function, arguments, options, per_rank):
        """(differences of inputs that were written to, results over ranks). The inputs are copies of ours."""
        given = [[_copy(x) for x in argument] if argument is not None else None for argument in arguments]
        progress.begin(function.__name__, self.number)
        if not per_rank:
            results = function(*given, **options)
        else:
            (rank,) = self.here
            own = {name: _own(value, rank) for name, value in options.items()}
            result = function(*(None if argument is None else argument[rank] for argument in given), **own)
            results = [result if r == rank else None for r in range(self.cfg.n_ranks)]
        progress.begin(f"the comparison after {function.__name__}", self.number)
        changed = []
        names = {
            id(self.input_tokens): "input_tokens",
            id(self.topk_ids): "topk_ids",
            id(self.router_weights): "router_weights",
            id(self.dispatched): None,
        }
        for ours, theirs in zip(arguments, given):
            name = names.get(id(ours), "expert_outputs")
            for rank in self.here if name and ours is not None else ():
                if ours[rank].tobytes() != theirs[rank].tobytes():
                    arrays, rule = (theirs[rank], ours[rank]), "inputs are read only"
                    changed.append(Difference(name, "was written to", *arrays, rank, rule=rule))
        return changed, results

    def expert_outputs(self, rank, result):
        """Rows that depend on each row's identity, not on its place. Padding rows are NaN."""
        want = self.dispatched_want[rank]
        where = places_of(self.cfg, rank, want)
        src_info = np.asarray(field(result, "src_info"))[: where.n_rows]
        source = np.full(where.n_rows, rank) if self.cfg.skip_a2a else where.src_rank
        outputs = self.case.pair_outputs(self.number, rank, source, src_info[:, 0], src_info[:, 1])
        shared = where.src_rank == SHARED
        outputs[shared] = self.case.shared_outputs(self.number, rank, int(shared.sum()))
        outputs[where.src_rank == PADDING] = NAN_ROW
        return outputs


def _copy(value):
    return value.copy() if isinstance(value, np.ndarray) else value


def _own(value, rank):
    """An option for this rank: lists over ranks are replaced by its entry, even inside a tuple."""
    if isinstance(value, tuple):
        return tuple(_own(entry, rank) for entry in value)
    return value[rank] if isinstance(value, list) else value
