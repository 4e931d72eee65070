"""Combine on the host: expert outputs and weights checked and placed, kernels launched, results handed out."""

from typing import NamedTuple

import numpy as np

from epmoe import device
from epmoe.host import inputs
from epmoe.host.arrays import PEEKS, peek, view
from epmoe.host.dispatched import Dispatched
from epmoe.host.overlaps import expect_apart, on_device
from epmoe.host.results import Results
from epmoe.host.same_functions import earlier
from epmoe.host.user_functions import (
    argument,
    check_returned,
    check_signature,
    expect_sequence,
    of_rank,
)
from epmoe.kernels import lamport
from epmoe.kernels.user_functions import argument_words
from epmoe_ref.errors import EPValueError

TYPES, NO_WORDS = ((), ()), ()
READ = "src_info", "topk_ids"  # what combine reads of a Dispatched


class Returned:
    """One rank's part of a round's combine: what it reads, and how it is reduced.

    expert_outputs, src_info, topk_ids, weights: placed arrays. n_rows: that both first ones have. plan: a ReductionPlan,
    once it is known how rows are reduced; words: of the arguments of functions; results: what the sum goes into, at
    output_tokens.
    """

    __slots__ = (
        "r",
        "expert_outputs",
        "src_info",
        "n_rows",
        "topk_ids",
        "num_tokens",
        "plan",
        "weights",
        "words",
        "output_tokens",
        "results",
    )

    def __init__(self, r, expert_outputs, src_info, n_rows, topk_ids, num_tokens):
        self.r, self.expert_outputs, self.src_info = r, expert_outputs, src_info
        self.n_rows, self.topk_ids, self.num_tokens = n_rows, topk_ids, num_tokens


class Way(NamedTuple):
    """How all ranks reduce: compile-time options, which `key` stands for, and functions of the caller among them.

    weights: of the router; last: an epilogue, or an elementwise_lambda_fn, which stores the result itself.
    """

    key: object
    options: dict
    weights: object = None
    last: object = None
    name_of_last: str = "epilogue"

    @property
    def stores(self):
        """Whether a function stores the result."""
        return self.name_of_last == "elementwise_lambda_fn"


SUMS = Way("sums", dict(router_weights="array", epilogue=None))  # without functions
NO_SUMS = Way("no sums", dict(router_weights=None, epilogue=None))


class ReductionPlan:
    """How one rank reduces rows of so many tokens: what launches the kernels, and the form of the result.

    types: of the arguments of functions.
    """

    def __init__(self, engine, r, num_tokens, way, types):
        self.engine, self.r, self.num_tokens = engine, r, num_tokens
        self.way, self.types, self.launches, self.stores = way, types, {}, way.stores
        self.result = r.unreduced_result if way is NO_SUMS else r.reduced_result
        self.field = self.result.fields["output_tokens"].first(num_tokens)

    def launch(self, factory):
        """What launches a kernel; prepared once."""
        r, options, regions = self.r, self.way.options, self.r.combine_regions
        if factory == "combine_kernel" and self.engine.kernels == "fast":
            options = options | {"without_signals": True}
            if lamport.applies(self.engine.cfg, True, options["router_weights"]):
                regions = r.lamport_regions
        launch = self.launches[factory] = self.engine.prepared(
            factory,
            r,
            self.num_tokens,
            regions,
            options,
            weights_types=self.types[0],
            epilogue_types=self.types[1],
        )
        return launch


class CombinePhase:
    """whole; or begin, launch_async, and later end."""

    def __init__(self, engine, capacity):
        self.engine, self.cfg, self.capacity = engine, engine.cfg, capacity
        self._read = []  # what this round's combine reads: (rank, expert outputs, Dispatched) of each
        self._kept = []  # what it reads in device memory that nobody has lent, until the next combine
        self._written = {}  # {name: array of the caller in host memory} that an elementwise_lambda_fn may have written
        of = engine.ranks[0].dispatch_result.fields
        self._src_info, self._topk_ids = (of[name].offset for name in READ)

    def begin(self, sent, expert_outputs, dispatched):
        """Check and place expert outputs and what combine needs of the open round's Dispatched: a list of Returned."""
        engine, world, checked = self.engine, self.engine.world, []
        if world.lists:
            given = inputs.each_rank(world, expert_outputs=expert_outputs, dispatched=dispatched)
        else:
            given = ((expert_outputs, dispatched),)
        for r, s, (y, d) in zip(engine.ranks, sent, given):
            if not isinstance(d, Dispatched) or d.round is not s:
                raise EPValueError(_of_another_round(r.rank, d))
            form, at, y = (PEEKS.get(type(y)) or peek)(y, "expert_outputs")
            if at is None or form not in engine.accepted:
                y = inputs.expert_outputs(
                    self.cfg, engine.machine, r.rank, y, self.capacity, lambda d=d: d.n_rows
                )
                if y.host is None and y.shape[0] == self.capacity:
                    engine.accept(form)  # fewer rows must be as many as the round has
            checked.append((r, s, y, at, form[0][0], d))
        self._read, self._kept, self._written = checked, [], {}
        returned = []
        for r, s, y, at, n_rows, d in checked:
            looked_at, loan = d.__dict__, s.loan
            if "src_info" in looked_at or "topk_ids" in looked_at or s.results is not loan:
                src_info, topk_ids = (self._written_by_dispatch(r, s, d, name) for name in READ)
            else:  # nobody has put another array there
                src_info, topk_ids = loan.base + self._src_info, loan.base + self._topk_ids
            if at is None:
                at = engine.placing.place(r.rank, "expert_outputs", y)
            elif not 0 <= at - loan.base < loan.nbytes:
                # whoever borrows lent memory next launches after this round's kernels
                self._kept.append(y)
            n_rows = min(n_rows, self.capacity)
            returned.append(Returned(r, at, src_info, n_rows, topk_ids, s.num_tokens))
        return returned

    def _written_by_dispatch(self, r, s, d, name):
        """Address of what dispatch wrote, which the Dispatched must still have, as that memory or as a copy."""
        at = s.results.address(name)
        if not s.results.given and d.__dict__.get(name) is s.made.get(name):
            return at  # nobody has put another array there
        array = view(getattr(d, name), name)
        if (
            array.address == at or s.results.given
        ):  # arrays of the caller (out=) are taken as they are now
            return self.engine.placing.place(r.rank, name, array, lent=s.loan)
        what = f"{name} of the Dispatched of rank {r.rank}"
        if array.host is None or not s.loan.holds_address(at):
            raise EPValueError(f"{what} is another array than dispatch wrote: leave it as it was")
        field = s.loan.fields[name]
        n = s.num_tokens if name == "topk_ids" else array.shape[0] if array.shape else 0
        if array.dtype != field.dtype or array.shape != (n, *field.shape[1:]) or n > field.shape[0]:
            raise EPValueError(
                f"{what} is {array.dtype} {array.shape}, dispatch wrote {field.dtype} "
                f"{(n, *field.shape[1:])}: leave it as it was"
            )
        own = s.loan.read(name)[: array.shape[0]]
        changed = np.argwhere(array.host != own)
        if len(changed):
            row = int(changed[0][0])
            raise EPValueError(
                f"{what} was changed: row {row} is {array.host[row].tolist()}, dispatch wrote "
                f"{own[row].tolist()}; combine sends rows back by it, so leave it as it was"
            )
        return at

    def whole(self, sent, expert_outputs, dispatched, *reduction, fused=False):
        """A combine: the results of every rank. reduction: see _reduction."""
        returned = self.begin(sent, expert_outputs, dispatched)
        return self.end("combine", returned, *reduction, fused=fused)

    def end(self, call, returned, *reduction, fused=False):
        """Launch the kernels of a combine or combine_wait: the results of every rank. reduction: see _reduction."""
        self._reduction(returned, *reduction)
        launches = self._launches_async(returned) if call == "combine" and not fused else []
        factory = "combine_kernel" if fused else "combine_wait_kernel"
        for b in returned:
            placed = b.expert_outputs, b.src_info, b.n_rows, b.output_tokens, b.topk_ids, b.weights
            launch = b.plan.launches.get(factory) or b.plan.launch(factory)
            launches.append((launch, (*placed, *b.words)))
        self.engine.start(call, launches, fused)
        return self._finish(returned)

    def _reduction(
        self, returned, router_weights, weights_args, epilogue, epilogue_args, elementwise_fn, out
    ):
        """Check and place everything about the reduction, and enter it into the Returned of every rank."""
        engine, world = self.engine, self.engine.world
        way = SUMS
        if (
            router_weights is None
            or epilogue is not None
            or elementwise_fn is not None
            or callable(router_weights)
            or weights_args is not NO_WORDS
            or epilogue_args is not NO_WORDS
        ):
            way = self._way(router_weights, weights_args, epilogue, epilogue_args, elementwise_fn)
            if way.stores and out is not None:
                raise EPValueError(_stored_by_itself("out"))
        if router_weights is None or way.weights is not None:
            weights = [(0, None)] * len(returned)
        else:
            of_ranks = (router_weights,)
            if world.lists:
                of_ranks = inputs.ranks_of(world, "router_weights", router_weights)
            weights = [self._checked_weights(b, w) for b, w in zip(returned, of_ranks)]
        outs = None if out is None else inputs.ranks_of(world, "out", out)
        shared = {}
        for i, b in enumerate(returned):
            r, (b.weights, w), types, b.words = b.r, weights[i], TYPES, NO_WORDS
            if b.weights is None:
                b.weights = engine.placing.place(r.rank, "router_weights", w)
            elif w is not None:
                self._kept.append(w)
            if weights_args or epilogue_args:
                of_weights = self._arguments(r, i, "router_weights_args", weights_args)
                of_last = self._arguments(
                    r, i, "epilogue_args", epilogue_args, shared if way.stores else None
                )
                types = tuple([a.type for a in of_weights]), tuple([a.type for a in of_last])
                b.words = argument_words(*of_weights, *of_last)
            key = r.rank, b.num_tokens, way.key, types
            plan = engine.plans.get(key)
            if plan is None:
                plan = engine.enter(key, ReductionPlan(engine, r, b.num_tokens, way, types))
            b.plan = plan
            b.results = loan = r.arena.lend(plan.result)
            b.output_tokens = loan.base
            if engine.rounds.capture:
                engine.captured.append(loan)
            if outs is not None and outs[i] is not None:
                shapes = {"output_tokens": plan.field.shape}
                given = {"output_tokens": outs[i]}
                b.results = Results(loan, engine.machine, r.rank, given, shapes)
                b.output_tokens = b.results.address("output_tokens")
        if outs is not None:
            self._expect_apart(returned, weights)
        self._read = []  # whose memory may be lent again, or is the caller's
        for _, place, array in shared.values():
            if array.host is not None and array.host.flags.writeable:
                self._written[place] = array.host
        if way.weights is not None or way.last is not None:
            types = returned[0].plan.types
            self._check_returned(way, weights_args, epilogue_args, types)

    def _way(self, router_weights, weights_args, epilogue, epilogue_args, elementwise_fn):
        """The Way of these arguments, which go together."""
        router_weights, epilogue, elementwise_fn = map(
            earlier, (router_weights, epilogue, elementwise_fn)
        )
        reduced, function = router_weights is not None, None
        if callable(router_weights):
            function = router_weights
        name, last = "epilogue", epilogue
        if elementwise_fn is not None:
            name, last = "elementwise_lambda_fn", elementwise_fn
            if epilogue is not None:
                raise EPValueError(_stored_by_itself("epilogue"))
        expect_sequence("router_weights_args", weights_args)
        expect_sequence("epilogue_args", epilogue_args)
        self._check_functions(reduced, function, weights_args, name, last, epilogue_args)
        if function is None and last is None:
            return SUMS if reduced else NO_SUMS
        options = {"router_weights": function or "array", name: last}
        return Way(tuple(options.items()), options, function, last, name)

    def _check_returned(self, way, router_weights_args, epilogue_args, types):
        world, i32, f32 = self.engine.world, np.int32(0), np.float32(1)
        of_weights, of_last = types
        for what, f, numbers, args, types in (
            ("router_weights", way.weights, (i32, i32), router_weights_args, of_weights),
            (way.name_of_last, way.last, (i32, i32, f32), epilogue_args, of_last),
        ):
            if f is not None:
                first = of_rank(world, 0, args)
                check_returned(self.engine.machine, f, what, numbers, first, types)

    def _checked_weights(self, b, weights):
        """(address, or None of an array in host memory; the array) of router weights, which are accepted."""
        engine, at = self.engine, None
        if hasattr(weights, "shape"):  # a number is refused below
            form, at, weights = (PEEKS.get(type(weights)) or peek)(weights, "router_weights")
            accepted = form, b.num_tokens
            if at is not None and accepted in engine.accepted:
                return at, weights
        weights = inputs.router_weights(self.cfg, engine.machine, b.r.rank, weights, b.num_tokens)
        if at is not None:
            engine.accept(accepted)
        return at, weights

    def _expect_apart(self, returned, weights):
        """Arrays of the caller that are written share no memory with what is read."""
        read = []
        for (r, _, y, _, _, d), (_, w) in zip(self._read, weights):
            rank = r.rank
            read.append((f"expert_outputs of rank {rank}", view(y, "expert_outputs")))
            read += [(f"{name} of rank {rank}", view(getattr(d, name), name)) for name in READ]
            if w is not None:
                read.append((f"router_weights of rank {rank}", view(w, "router_weights")))
        expect_apart([one for b in returned for one in b.results.outs], on_device(*read))

    def _check_functions(self, reduced, function, router_weights_args, name, last, epilogue_args):
        if last is not None and not reduced:
            raise EPValueError(
                f"{name} needs router weights: without them the rows are returned unreduced"
            )
        if self.cfg.fused_shared_expert and not reduced:
            raise EPValueError(
                "fused_shared_expert=True needs router weights: the shared expert is added to their sum"
            )
        if router_weights_args and function is None:
            raise EPValueError(
                "router_weights_args are given, and router_weights is no function that would take them"
            )
        if epilogue_args and last is None:
            raise EPValueError(
                "epilogue_args are given, and there is no epilogue that would take them"
            )
        if last is not None:
            check_signature(last, name, ("token", "col", "value"), epilogue_args)
        if function is not None:
            check_signature(function, "router_weights", ("token", "k"), router_weights_args)

    def _arguments(self, r, index, what, args, shared=None):
        """shared: None, or {what an array is: (address, (rank, name), its Array)} of what may be written, once."""

        def place(n, array):
            name, known = f"{what}[{n}]", (array.address, array.shape, array.dtype)
            if shared is None:
                return self.engine.placing.place(r.rank, name, array)
            if known not in shared:
                shared[known] = (
                    self.engine.placing.place(r.rank, name, array),
                    (r.rank, name),
                    array,
                )
            return shared[known][0]

        return tuple(
            argument(
                value,
                f"{what}[{n}] of rank {r.rank}",
                lambda array, n=n: place(n, array),
                shared is not None,
            )
            for n, value in enumerate(of_rank(self.engine.world, index, args))
        )

    def launch_async(self, returned):
        """Launch the kernels of a combine_async for every rank."""
        self.engine.start("combine_async", self._launches_async(returned))

    def _launches_async(self, returned):
        engine, made, factory = self.engine, [], "combine_async_kernel"
        for b in returned:
            launch = engine.plans.get((factory, b.r.rank))
            if launch is None:
                launch = engine.prepared(factory, b.r, 0, b.r.combine_regions, {})
                engine.enter((factory, b.r.rank), launch)
            made.append((launch, (b.expert_outputs, b.src_info, b.n_rows, 0, 0, 0)))
        return made

    def _finish(self, returned):
        """The results of every rank; waits for the kernels only if the caller's host arrays are to be filled."""
        engine, filled, made = self.engine, self._written, []
        for b in returned:
            filled = filled or b.results.copies
            plan = b.plan
            made.append(None if plan.stores else b.results.part("output_tokens", plan.field))
        if filled:
            engine.check()
            for place, array in self._written.items():
                engine.placing.fetch(*place, array)
            for b in returned:
                b.results.finish()
        if device.SIM:
            engine.placing.let_go()
        return made


def _stored_by_itself(other):
    return (
        f"elementwise_lambda_fn and {other} are both given: the function stores the result itself, and nothing else "
        "is stored"
    )


def _of_another_round(rank, d):
    kind = "of another round or rank" if isinstance(d, Dispatched) else f"a {type(d).__name__}"
    return (
        f"combine of rank {rank} was given a Dispatched {kind}; it needs what the open "
        f"dispatch returned for rank {rank}, whole, trimmed() or numpy()"
    )
