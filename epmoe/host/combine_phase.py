"""Combine on the host: checks all ranks' arguments, places arrays, launches the kernels and returns the results."""

import numpy as np

from epmoe import device
from epmoe.host import inputs
from epmoe.host.arrays import PEEKS, to_numpy, view
from epmoe.host.dispatched import Dispatched, kind_of
from epmoe.host.engine import Plan
from epmoe.host.out_arrays import Out, expect_apart
from epmoe.host.user_functions import ARGUMENTS, NO_ARGUMENTS, NO_SUMS, SUMS, arguments_of, way_of
from epmoe.kernels import ArrayArg
from epmoe_ref.errors import EPValueError

NO_ARGS = ()
ASYNC = "combine_async_kernel"  # reads the first three words
READ = {"src_info": 1, "topk_ids": 4}  # arrays of a Dispatched: index of their word
# a launch's words: expert outputs, src_info, n_rows, output_tokens, clean ids, router weights, arguments of functions
OUT, WEIGHTS = 3, 5


class CombinePhase:
    """Runs combine: begin() and end(). For combine_async and combine_wait: begin(), launch_async(), and later end()."""

    def __init__(self, engine, capacity):
        self.engine, self.cfg, self.capacity = engine, engine.cfg, capacity
        self._read = ()  # (expert outputs, Dispatched) of each rank, until they are reduced
        self._kept = []  # the caller's arrays in device memory that kernels read, kept until the next combine
        self._unplaced = []  # arrays that begin has checked: see Placing.fill_in
        of = engine.ranks[0].dispatch_result.fields
        self._named = [f"expert_outputs of rank {r.rank}" for r in engine.ranks]
        self._src_info, self._topk_ids = (of[name].offset for name in READ)

    def begin(self, expert_outputs, dispatched):
        """Check expert outputs, and the arrays of the open round's Dispatched that combine reads."""
        engine, given = self.engine, ((expert_outputs, dispatched),)
        if engine.lists:
            named = dict(expert_outputs=expert_outputs, dispatched=dispatched)
            given = list(inputs.each_rank(engine.world, **named))
        self._read, kept, unplaced = given, [], []
        for part, what, (y, d) in zip(engine.parts, self._named, given):
            r, loan = part.plan.r, part.loan
            if not isinstance(d, Dispatched) or d.round is not part:
                kind = "Dispatched of another round or rank" if isinstance(d, Dispatched) else kind_of(d)
                raise EPValueError(
                    f"combine of rank {r.rank} was given a {kind}; it needs what the open "
                    f"dispatch returned for rank {r.rank}, whole, trimmed() or numpy()"
                )
            form, at, y = PEEKS[type(y)](y, what)
            n_rows = engine.plans.get((r.rank, form))
            if n_rows is None:
                y = inputs.expert_outputs(self.cfg, engine.machine, r.rank, y, self.capacity, d)
                n_rows = y.shape[0]
                if n_rows == self.capacity:  # fewer must equal the round's number
                    engine.plans[r.rank, form] = n_rows
            base, own = loan.base, d.__dict__
            part.words = words = [at, base + self._src_info, n_rows, 0, base + self._topk_ids, 0]
            if at is None:
                unplaced.append((words, 0, r.rank, "expert_outputs", y))
            elif not 0 <= at - base < loan.nbytes:
                # not needed for lent memory: its next user launches after this round's kernels
                kept.append(y)
            if part.out is not None or "src_info" in own or "topk_ids" in own:
                for name, i in READ.items():  # the caller may have put another array there
                    array = view(getattr(d, name), name)
                    words[i] = self._written_by_dispatch(part, name, array)
                    if words[i] is None:
                        unplaced.append((words, i, r.rank, name, array))
        self._kept, self._unplaced = kept, unplaced

    def _written_by_dispatch(self, part, name, array):
        """Address of the array that dispatch wrote, if `array` is that memory or a copy; None if it must be placed."""
        at = (part.out or part.loan).address(name)
        # the caller's arrays (out=) are read with their present values
        if array.address == at or part.out is not None:
            return array.address if part.loan.holds(array) else None
        what, field = f"{name} of the Dispatched of rank {part.rank}", part.loan.fields[name]
        if array.host is None:
            raise EPValueError(f"{what} is another array than dispatch wrote: leave it as it was")
        n = part.num_tokens if name == "topk_ids" else array.shape[0] if array.shape else 0
        shape = n, *field.shape[1:]
        if array.dtype != field.dtype or array.shape != shape or n > field.shape[0]:
            raise EPValueError(
                f"{what} is {array.dtype} {array.shape}, dispatch wrote {field.dtype} {shape}: leave it as it was"
            )
        own = to_numpy(part.loan.array(name, n))
        for row in np.argwhere(array.host != own)[:1, 0].tolist():
            raise EPValueError(
                f"{what} was changed: row {row} is {array.host[row].tolist()}, dispatch wrote {own[row].tolist()}; "
                "combine sends rows back by it, so leave it as it was"
            )
        return at

    def launch_async(self):
        """Place the arrays that begin has checked, and launch the kernels of combine_async for every rank."""
        unplaced, self._unplaced = self._unplaced, []
        self.engine.placing.fill_in(unplaced)
        self.engine.start("combine_async", [(part.plan[ASYNC], part.words) for part in self.engine.parts])

    def end(self, call, router_weights, functions, out, fused=False):
        """Launch the kernels of combine or combine_wait; returns the result, or a list over ranks.

        functions: router_weights_args, epilogue, epilogue_args, elementwise_lambda_fn.
        """
        weights_args, epilogue, epilogue_args, elementwise_fn = functions
        engine, way, given = self.engine, SUMS, (out,)
        parts, plans = engine.parts, engine.plans
        launches, results, outs, of_functions = [], [], [], []
        unplaced, self._unplaced = self._unplaced, []
        factory = "combine_kernel" if fused else "combine_wait_kernel"
        is_plain = epilogue is None is elementwise_fn and weights_args is epilogue_args is NO_ARGS
        if not is_plain or router_weights is None or callable(router_weights):
            way = way_of(self.cfg, router_weights, *functions, out)
        takes_weights = way.takes_weights
        weights = (router_weights if takes_weights else None,)
        if engine.lists:
            named = dict(router_weights=weights[0], out=out)
            weights, given = zip(*inputs.each_rank(engine.world, **named))
        for part, w, into in zip(parts, weights, given):
            r, n, words = part.plan.r, part.plan.num_tokens, part.words
            form, weights_at, arguments, types = None, 0, NO_ARGUMENTS, NO_ARGUMENTS
            if takes_weights:
                if type(w) not in PEEKS:  # it may be no array: a number is refused
                    inputs.router_weights(self.cfg, engine.machine, r.rank, w, n)
                form, weights_at, w = PEEKS[type(w)](w, "router_weights")
            if weights_args or epilogue_args:
                arguments = arguments_of(engine, len(results), way.stores, weights_args, epilogue_args)
                types = tuple([tuple([a.type for a in of_one]) for of_one in arguments])
                of_functions.append((len(launches), r.rank, arguments))
            key = r.rank, n, form, way.key, types
            plan = plans.get(key)
            if plan is None:
                if takes_weights:
                    w = inputs.router_weights(self.cfg, engine.machine, r.rank, w, n)
                way.check(engine.machine, arguments)
                plan = plans[key] = Plan(engine, r, n, way.options, types)
                plan.result = r.unreduced_result if way is NO_SUMS else r.reduced_result
                plan.field = plan.result.fields["output_tokens"].first(n)
            if weights_at is None:
                unplaced.append((words, WEIGHTS, r.rank, "router_weights", w))
            elif w is not None:
                self._kept.append(w)
            loan = r.arena.lend(plan.result)
            if engine.rounds.capture:
                engine.captured.append(loan)
            at = loan.base
            if into is not None:
                shape = plan.field.shape
                outs.append(Out(loan, engine.machine, r.rank, {"output_tokens": into}, shape))
                at = outs[-1].address("output_tokens")
            elif not way.stores:
                into = loan.part(plan.field)
            words[OUT], words[WEIGHTS] = at, weights_at
            results.append(into)
            launches.append((plan[factory], words))
        stored = ()
        if outs or unplaced or of_functions:
            stored = self._place(launches, outs, weights, unplaced, of_functions)
        if call == "combine" and not fused:
            launches = [(part.plan[ASYNC], part.words) for part in parts] + launches
        engine.start(call, launches, fused)
        self._read = engine.parts = ()  # the round's memory may be lent again
        if outs or stored or device.SIM:
            self._finish(outs, stored)
        return results if engine.lists else results[0]

    def _place(self, launches, outs, weights, unplaced, of_functions):
        """Place the checked arrays; raises EPValueError if an array that is written overlaps one that is read.

        Returns what functions store into: see _words.
        """
        if outs:
            read = []
            for part, (y, d), w in zip(self.engine.parts, self._read, weights):
                of_rank = [("expert_outputs", y), *((name, getattr(d, name)) for name in READ)]
                if w is not None:
                    of_rank.append(("router_weights", w))
                read += [(f"{name} of rank {part.rank}", view(a, name)) for name, a in of_rank]
            expect_apart([one for out in outs for one in out.named.values()], read)
        self.engine.placing.fill_in(unplaced)
        placed, stored = {}, []
        for i, rank, arguments in of_functions:
            launch, words = launches[i]
            launches[i] = launch, words + self._words(rank, arguments, placed, stored)
        return stored

    def _finish(self, outs, stored):
        """Copy results, and values that functions have stored, into the caller's host arrays.

        In the simulator the kernels have ended; release inputs.
        """
        for out in outs:
            out.finish(self.engine)
        if stored:
            self.engine.check()
        for where in stored:
            self.engine.placing.fetch(*where)
        if device.SIM:
            self.engine.placing.let_go()

    def _words(self, rank, arguments, placed, stored):
        """Place the arrays of checked arguments, and return the arguments' words.

        placed: the addresses of all ranks' arrays; one that is given twice is placed once. stored: gets (rank, name,
        host array) of each host array that a function stores into.
        """
        words = []
        for what, args in zip(ARGUMENTS, arguments):
            for i, a in enumerate(args):
                if isinstance(a, ArrayArg):
                    array, where = a.address, (rank, f"{what}[{i}]")
                    known = array.address, array.shape, array.dtype, a.writable
                    if known not in placed:
                        placed[known] = self.engine.placing.place(*where, array)
                        if a.writable and array.host is not None:
                            stored.append((*where, array.host))
                    a = a._replace(address=placed[known])
                words += a.words()
        return words
