"""Combine on the host: expert outputs and weights checked and placed, kernels launched, results handed out."""

from functools import partial

import numpy as np

from epmoe import device
from epmoe.host import inputs
from epmoe.host.arrays import PEEKS, peek, view
from epmoe.host.dispatched import Dispatched
from epmoe.host.engine import Plan
from epmoe.host.results import Out, expect_apart
from epmoe.host.user_functions import NO_SUMS, NO_TYPES, SUMS, argument, of_rank, way_of
from epmoe.kernels import lamport
from epmoe.kernels.user_functions import argument_words
from epmoe_ref.errors import EPValueError

NO_ARGS = ()
ASYNC = "combine_async_kernel"
READ = "src_info", "topk_ids"  # what combine reads of a Dispatched


class CombinePhase:
    """whole; or begin, launch_async, and later end."""

    def __init__(self, engine, capacity):
        self.engine, self.cfg, self.capacity = engine, engine.cfg, capacity
        self._read = ()  # (expert outputs, Dispatched) of each rank, until they are reduced
        self._kept = []  # what kernels read in device memory that nobody has lent, until the next combine
        self._stored = {}  # what an elementwise_lambda_fn may store into: see _arguments
        of = engine.ranks[0].dispatch_result.fields
        self._src_info, self._topk_ids = (of[name].offset for name in READ)

    def begin(self, expert_outputs, dispatched):
        """Check and place expert outputs, and what combine needs of the open round's Dispatched."""
        engine, given = self.engine, ((expert_outputs, dispatched),)
        if engine.lists:
            named = dict(expert_outputs=expert_outputs, dispatched=dispatched)
            given = list(inputs.each_rank(engine.world, **named))
        self._read, kept = given, []
        for s, (y, d) in zip(engine.parts, given):
            r, loan = s.r, s.loan
            if not isinstance(d, Dispatched) or d.round is not s:
                raise EPValueError(_of_another_round(r.rank, d))
            form, at, y = (PEEKS.get(type(y)) or peek)(y, "expert_outputs")
            s.n_rows = engine.plans.get((r.rank, form))
            if s.n_rows is None:
                rows = self.capacity, lambda d=d: d.n_rows
                y = inputs.expert_outputs(self.cfg, engine.machine, r.rank, y, *rows)
                s.n_rows = y.shape[0]
                if s.n_rows == self.capacity:  # fewer must be as many as the round has
                    engine.enter((r.rank, form), s.n_rows)
            if at is None:
                at = engine.placing.place(r.rank, "expert_outputs", y)
            elif not 0 <= at - loan.base < loan.nbytes:
                # whoever borrows lent memory next launches after this round's kernels
                kept.append(y)
            s.rows, own = at, d.__dict__
            if s.out is None and "src_info" not in own and "topk_ids" not in own:
                s.src_info, s.clean_ids = loan.base + self._src_info, loan.base + self._topk_ids
            else:  # somebody may have put another array there
                s.src_info, s.clean_ids = (self._written_by_dispatch(s, d, name) for name in READ)
        self._kept = kept

    def _written_by_dispatch(self, s, d, name):
        """Address of what dispatch wrote, which the Dispatched must still have, as that memory or as a copy."""
        at, array = (s.out or s.loan).address(name), view(getattr(d, name), name)
        # arrays of the caller (out=) are taken as they are now
        if array.address == at or s.out is not None:
            place = self.engine.placing.place
            return array.address if s.loan.holds(array) else place(s.rank, name, array)
        what, field = f"{name} of the Dispatched of rank {s.rank}", s.loan.fields[name]
        if array.host is None:
            raise EPValueError(f"{what} is another array than dispatch wrote: leave it as it was")
        n = s.num_tokens if name == "topk_ids" else array.shape[0] if array.shape else 0
        shape = n, *field.shape[1:]
        if array.dtype != field.dtype or array.shape != shape or n > field.shape[0]:
            raise EPValueError(
                f"{what} is {array.dtype} {array.shape}, dispatch wrote {field.dtype} {shape}: leave it as it was"
            )
        own = s.loan.read(name)[:n]
        for row in np.argwhere(array.host != own)[:1, 0].tolist():
            raise EPValueError(
                f"{what} was changed: row {row} is {array.host[row].tolist()}, dispatch wrote {own[row].tolist()}; "
                "combine sends rows back by it, so leave it as it was"
            )
        return at

    def launch_async(self):
        """Launch the kernels of a combine_async for every rank."""
        self.engine.start("combine_async", self._launches())

    def _launches(self):
        engine, made = self.engine, []
        for s in engine.parts:
            launch = engine.plans.get((ASYNC, s.rank))
            if launch is None:
                launch = engine.prepared(ASYNC, s.r, 0, s.r.regions("combine"), {})
                engine.enter((ASYNC, s.rank), launch)
            made.append((launch, (s.rows, s.src_info, s.n_rows, 0, 0, 0)))
        return made

    def whole(self, expert_outputs, dispatched, router_weights, functions, out, fused):
        """A combine: the result, or a list of every rank's. functions: see end."""
        self.begin(expert_outputs, dispatched)
        return self.end("combine", router_weights, functions, out, fused)

    def end(self, call, router_weights, functions, out, fused=False):
        """Launch the kernels of a combine or combine_wait: the result, or a list of every rank's.

        functions: router_weights_args, epilogue, epilogue_args, elementwise_lambda_fn.
        """
        weights_args, epilogue, epilogue_args, elementwise_fn = functions
        engine, way, weights, results, outs = self.engine, SUMS, (router_weights,), [], []
        parts = engine.parts
        launches = self._launches() if call == "combine" and not fused else []
        factory = "combine_kernel" if fused else "combine_wait_kernel"
        is_plain = epilogue is None is elementwise_fn and weights_args is epilogue_args is NO_ARGS
        if not is_plain or router_weights is None or callable(router_weights):
            way = way_of(self.cfg, router_weights, *functions, out)
        takes_weights = way.takes_weights
        if not takes_weights:
            weights = [None] * len(parts)
        elif engine.lists:
            weights = inputs.ranks_of(engine.world, "router_weights", router_weights)
        given = (None,) * len(parts) if out is None else inputs.ranks_of(engine.world, "out", out)
        self._stored = {}
        for s, w, into in zip(parts, weights, given):
            r, form, weights_at, types, words = s.r, None, 0, NO_TYPES, ()
            if takes_weights:
                if type(w) not in PEEKS and not hasattr(w, "shape"):  # a number is refused
                    inputs.router_weights(self.cfg, engine.machine, r.rank, w, s.num_tokens)
                form, weights_at, w = (PEEKS.get(type(w)) or peek)(w, "router_weights")
            if weights_args or epilogue_args:
                types, words = self._arguments(r, len(results), way, weights_args, epilogue_args)
            key = r.rank, s.num_tokens, form, way.key, types
            plan = engine.plans.get(key)
            if plan is None:
                if takes_weights:
                    w = inputs.router_weights(self.cfg, engine.machine, r.rank, w, s.num_tokens)
                way.check(engine, len(results), weights_args, epilogue_args, types)
                plan = engine.enter(key, self._plan(r, s.num_tokens, way, types))
            if weights_at is None:
                weights_at = engine.placing.place(r.rank, "router_weights", w)
            elif w is not None:
                self._kept.append(w)
            loan = r.arena.lend(plan.result)
            if engine.rounds.capture:
                engine.captured.append(loan)
            at = loan.base
            if into is not None:
                outs.append(
                    Out(loan, engine.machine, r.rank, {"output_tokens": into}, plan.field.shape)
                )
                at = outs[-1].address("output_tokens")
            elif not way.stores:
                into = loan.part(plan.field)
            results.append(into)
            words = s.rows, s.src_info, s.n_rows, at, s.clean_ids, weights_at, *words
            launches.append((plan[factory], words))
        if outs:
            self._expect_apart(parts, outs, weights)
        engine.start(call, launches, fused)
        self._read = engine.parts = ()  # whose memory may be lent again, or is the caller's
        for out in outs:
            out.finish(engine)
        if self._stored:
            self._fetch()
        if device.SIM:
            engine.placing.let_go()
        return results if engine.lists else results[0]

    def _plan(self, r, num_tokens, way, types):
        """The Plan of rows of so many tokens that a rank reduces; types: of the arguments of functions."""
        fast = self.engine.kernels == "fast"

        def how(factory):
            options, regions = way.options, r.regions("combine")
            if factory == "combine_kernel" and fast:
                options = options | {"without_signals": True}
                if lamport.applies(self.cfg, True, options["router_weights"]):
                    regions = r.regions("combine", "lamport_buf")
            return regions, options, dict(weights_types=types[0], epilogue_types=types[1])

        plan = Plan(self.engine, r, num_tokens, how)
        plan.result = r.unreduced_result if way is NO_SUMS else r.reduced_result
        plan.field = plan.result.fields["output_tokens"].first(num_tokens)
        return plan

    def _arguments(self, r, index, way, weights_args, epilogue_args):
        """(types, words) of the arguments of functions; the arrays are placed."""
        found, world = [], self.engine.world
        of_weights = "router_weights_args", weights_args, False
        for what, args, stores in of_weights, ("epilogue_args", epilogue_args, way.stores):
            place = partial(self._placed, self._stored if stores else {}, r.rank)
            values = enumerate(of_rank(world, index, args))
            found.append([argument(v, f"{what}[{n}]", r.rank, place, stores) for n, v in values])
        types = tuple([tuple([a.type for a in of_one]) for of_one in found])
        return types, argument_words(*found[0], *found[1])

    def _placed(self, shared, rank, name, array):
        """Address of an argument; the same one for an array that is given twice. shared: those so far."""
        known = array.address, array.shape, array.dtype
        if known not in shared:
            at = self.engine.placing.place(rank, name, array)
            shared[known] = at, (rank, name), array
        return shared[known][0]

    def _fetch(self):
        """Copy what an elementwise_lambda_fn has stored into the caller's arrays in host memory."""
        on_host = [(where, a.host) for _, where, a in self._stored.values() if a.host is not None]
        stored = [(where, host) for where, host in on_host if host.flags.writeable]
        if stored:
            self.engine.check()
        for where, host in stored:
            self.engine.placing.fetch(*where, host)

    def _expect_apart(self, parts, outs, weights):
        """Arrays of the caller that are written share no memory with what is read."""
        read = []
        for s, (y, d), w in zip(parts, self._read, weights):
            of_rank = [("expert_outputs", y), *((name, getattr(d, name)) for name in READ)]
            if w is not None:
                of_rank.append(("router_weights", w))
            read += [(f"{name} of rank {s.rank}", view(a, name)) for name, a in of_rank]
        expect_apart([one for out in outs for one in out.named], read)


def _of_another_round(rank, d):
    kind = "of another round or rank" if isinstance(d, Dispatched) else f"a {type(d).__name__}"
    return (
        f"combine of rank {rank} was given a Dispatched {kind}; it needs what the open "
        f"dispatch returned for rank {rank}, whole, trimmed() or numpy()"
    )
