"""Runs one case of the expert-grouped layout on an implementation: rounds of dispatch, made-up experts, combine.

Every round checks three laws. Results equal the reference's. Inputs are not changed. Nothing of earlier rounds shows;
each round has new data, so leftovers are recognised.
"""

import numpy as np

import epmoe_ref
from epmoe.check import combine_causes, dispatch_causes
from epmoe.check.calls import first_found
from epmoe.check.cases import epilogue, epilogue_args
from epmoe.check.compare import compare_combined, compare_dispatched, field
from epmoe.check.places import PADDING, SHARED, places_of
from epmoe.check.words import WordsOf

COMPARED = ("expert_ids", "recv_count", "scales_offset")
DISPATCHED = "dicts or objects with output_tokens, row_offsets, src_info, ..."
# content of padding rows of expert_outputs; it shows if an implementation reads them
NAN_ROW = float("nan")


def run_case(implementation, case, ranks, not_given):
    """Differences of the first round that has any, over the ranks of this process; empty if all rounds are right.

    not_given: a set; the names of arrays that dispatch left out are added to it, and those of memory that only some of
    buffers() and counters() read.
    """
    previous = memory = None

    def steps(world, call, round_):
        nonlocal previous, memory
        if memory is None:
            memory = WordsOf(world, case.cfg, call)
            yield memory.differences(), list
        previous = this = Round(case, round_, ranks.here, previous)
        yield from this.dispatch(world, call, memory, not_given)
        yield from this.combine(world, call, memory)
        not_given.update(memory.not_read)

    return first_found(implementation, case, ranks, steps, case.cfg)


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

    def dispatch(self, world, call, memory, not_given):
        """Steps, for first_found: dispatch, or its two halves."""
        arguments = dict(input_tokens=self.input_tokens, topk_ids=self.topk_ids)
        memory.step("dispatch_async", *arguments.values(), **self.scale)
        if memory.halves:
            _, changed = call(world.dispatch_async, arguments, **self.scale)
            yield changed + memory.differences(), list
            dispatched, changed = call(world.dispatch_wait, {})
        else:
            dispatched, changed = call(world.dispatch, arguments, **self.scale)
        memory.step("dispatch_wait")
        changed += memory.differences()
        self.dispatched = call.over_ranks("dispatch", dispatched, DISPATCHED)
        not_given |= self._not_given()
        want = self.dispatched_want
        compare = call.each(lambda rank: compare_dispatched(self.cfg, rank, self.dispatched[rank], want[rank]))
        yield changed, lambda: dispatch_causes.with_causes(self, compare())

    def _not_given(self):
        """Names of the reference's arrays that the implementation's results lack."""
        return {
            name
            for rank in self.here
            for name in COMPARED
            if field(self.dispatched_want[rank], name) is not None and field(self.dispatched[rank], name) is None
        }

    def combine(self, world, call, memory):
        """Steps, for first_found: combine of dispatch's result, in its row order, or its two halves."""
        outputs = [
            self.expert_outputs(rank, self.dispatched[rank]) if rank in self.here else None
            for rank in range(self.cfg.n_ranks)
        ]
        _, self.combined_want = self.reference_combine()
        rows = dict(expert_outputs=outputs, dispatched=self.dispatched)
        weights = dict(router_weights=self.router_weights)
        memory.step("combine_async", *memory.rows(self.expert_outputs))
        if memory.halves:
            _, changed = call(world.combine_async, rows)
            yield changed + memory.differences(), list
            combined, changed = call(world.combine_wait, weights, **self.options)
        else:
            combined, changed = call(world.combine, rows | weights, **self.options)
        memory.step("combine_wait")
        changed += memory.differences()
        self.combined = call.over_ranks("combine", combined, "arrays [num_tokens, hidden]")

        def compare(rank):
            got, want, ids = self.combined[rank], self.combined_want[rank], self.topk_ids[rank]
            return compare_combined(self.cfg, rank, got, want, topk_ids=ids, epilogue=self.case.epilogue)

        yield changed, lambda: combine_causes.with_causes(self, call.each(compare)())

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
