"""Combine on the host: expert outputs and weights checked and placed, kernels launched, results handed out."""

from typing import NamedTuple

import numpy as np

from epmoe import device
from epmoe.host import inputs
from epmoe.host.arrays import peek, view
from epmoe.host.dispatched import Dispatched
from epmoe.host.overlaps import expect_apart, on_device
from epmoe.host.rank_memory import combine_shape
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
from epmoe.kernels.call import argument_words
from epmoe_ref.errors import EPValueError

TYPES, NO_WORDS = ((), ()), ()
READ = "src_info", "topk_ids"  # what combine reads of a Dispatched


class Returned(NamedTuple):
    """One rank's placed expert outputs, the addresses of src_info and the cleaned ids, and how many rows both have."""

    r: object
    expert_outputs: int
    src_info: int
    n_rows: int
    topk_ids: int
    num_tokens: int


class Way(NamedTuple):
    """How all ranks reduce: compile-time options, and whether an elementwise_lambda_fn stores the result itself."""

    options: dict
    stores: bool
    key: tuple

    @classmethod
    def of(cls, stores=False, **options):
        """The Way of these options."""
        return cls(options, stores, tuple(options.items()))


SUMS = Way.of(router_weights="array", epilogue=None)  # without functions
NO_SUMS = Way.of(router_weights=None, epilogue=None)
NO_WAY = Way.of()  # nothing is reduced


class Reduction(NamedTuple):
    """How one rank reduces what comes back: placed arguments, and where the result goes.

    types, words: of the arguments of functions.
    """

    way: Way
    weights: int
    types: tuple
    words: tuple
    results: object


class CombinePhase:
    """begin and reduction, then launch_async and launch_wait, or launch_fused, then finish."""

    def __init__(self, engine, capacity):
        self.engine, self.cfg, self.capacity = engine, engine.cfg, capacity
        self._read = []  # what this round's combine reads: (rank, expert outputs, Dispatched) of each
        self._kept = []  # what it reads in device memory that nobody has lent, until the next combine
        self._written = {}  # {name: array of the caller in host memory} that an elementwise_lambda_fn may have written

    def begin(self, sent, expert_outputs, dispatched):
        """Check and place expert outputs and what combine needs of the open round's Dispatched: a list of Returned."""
        engine, world, checked = self.engine, self.engine.world, []
        if world.lists:
            given = zip(
                engine.ranks,
                sent,
                inputs.ranks_of(world, "expert_outputs", expert_outputs),
                inputs.ranks_of(world, "dispatched", dispatched),
            )
        else:
            given = ((engine.ranks[0], sent[0], expert_outputs, dispatched),)
        for r, s, y, d in given:
            if not isinstance(d, Dispatched) or d.round is not s:
                raise EPValueError(_of_another_round(r.rank, d))
            form, at = peek(y, "expert_outputs")
            accepted = "expert_outputs", form
            if at is None or at % inputs.VECTOR_BYTES or accepted not in engine.accepted:
                y = inputs.expert_outputs(
                    self.cfg, engine.machine, r.rank, y, self.capacity, lambda d=d: d.n_rows
                )
                if y.host is None and y.shape[0] == self.capacity:
                    engine.accept(accepted)  # fewer rows must be as many as the round has
            checked.append((r, s, y, at, form[0][0], d))
        self._read, self._kept, self._written = checked, [], {}
        return [self._placed(*one) for one in checked]

    def _placed(self, r, s, y, at, n_rows, d):
        now, made, loan = d.__dict__, s.made, s.loan
        if (
            now.get("src_info") is made.get("src_info")
            and now.get("topk_ids") is made.get("topk_ids")
            and not s.results.given
        ):  # nobody has put another array there
            src_info, topk_ids = loan.address("src_info"), loan.address("topk_ids")
        else:
            src_info, topk_ids = (self._written_by_dispatch(r, s, d, name) for name in READ)
        if at is None:
            at = self.engine.placing.place(r.rank, "expert_outputs", y)
        elif not loan.base <= at < loan.base + loan.nbytes:
            self._kept.append(
                y
            )  # whoever borrows lent memory next launches after this round's kernels
        return Returned(r, at, src_info, min(n_rows, self.capacity), topk_ids, s.num_tokens)

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

    def reduction(
        self,
        sent,
        router_weights,
        router_weights_args,
        epilogue,
        epilogue_args,
        elementwise_lambda_fn,
        out,
    ):
        """Check and place everything about the reduction: a list of Reduction."""
        engine, world = self.engine, self.engine.world
        reduced, stores = router_weights is not None, elementwise_lambda_fn is not None
        function = last = None
        name = "elementwise_lambda_fn" if stores else "epilogue"
        if epilogue is not None or stores or callable(router_weights):
            router_weights, epilogue, elementwise_lambda_fn = map(
                earlier, (router_weights, epilogue, elementwise_lambda_fn)
            )
            function = router_weights if callable(router_weights) else None
            last = elementwise_lambda_fn if stores else epilogue
        if stores and (epilogue is not None or out is not None):
            raise EPValueError(
                f"elementwise_lambda_fn and {'out' if epilogue is None else 'epilogue'} are both given: "
                "the function stores the result itself, and nothing else is stored"
            )
        has_arguments = router_weights_args is not NO_WORDS or epilogue_args is not NO_WORDS
        if not reduced or function or last or has_arguments:
            expect_sequence("router_weights_args", router_weights_args)
            expect_sequence("epilogue_args", epilogue_args)
            self._check_functions(reduced, function, router_weights_args, name, last, epilogue_args)
        weights, outs = [(None, None)] * len(sent), [None] * len(sent)
        if reduced and function is None:
            weights = [
                self._checked_weights(r.rank, w, s.num_tokens)
                for r, s, w in zip(
                    engine.ranks, sent, inputs.ranks_of(world, "router_weights", router_weights)
                )
            ]
        if out is not None:
            outs = inputs.ranks_of(world, "out", out)
        way = SUMS if reduced else NO_SUMS
        if function is not None or last is not None:
            way = Way.of(stores, **{"router_weights": function or "array", name: last})
        made, shared = [], {}
        for i, (r, s, (w_at, w), o) in enumerate(zip(engine.ranks, sent, weights, outs)):
            loan = engine.lend(r, r.reduced_result if reduced else r.unreduced_result)
            results = loan
            if o is not None:
                shape = {"output_tokens": combine_shape(self.cfg, s.num_tokens, reduced)}
                results = Results(loan, engine.machine, r.rank, {"output_tokens": o}, shape)
            if w is None:
                w_at = 0
            elif w_at is None:
                w_at = engine.placing.place(r.rank, "router_weights", w)
            else:
                self._kept.append(w)
            types, words = TYPES, ()
            if router_weights_args or epilogue_args:
                of_weights = self._arguments(r, i, "router_weights_args", router_weights_args)
                of_last = self._arguments(
                    r, i, "epilogue_args", epilogue_args, shared if stores else None
                )
                types = tuple([a.type for a in of_weights]), tuple([a.type for a in of_last])
                words = argument_words(*of_weights, *of_last)
            made.append(Reduction(way, w_at, types, words, results))
        if out is not None:
            self._expect_apart(made, weights)
        self._read = []  # whose memory may be lent again, or is the caller's
        for _, place, array in shared.values():
            if array.host is not None and array.host.flags.writeable:
                self._written[place] = array.host
        if function is not None or last is not None:
            self._check_returned(function, router_weights_args, name, last, epilogue_args, made[0])
        return made

    def _check_returned(self, function, router_weights_args, name, last, epilogue_args, to):
        world, i32, f32 = self.engine.world, np.int32(0), np.float32(1)
        of_weights, of_last = to.types
        for what, f, numbers, args, types in (
            ("router_weights", function, (i32, i32), router_weights_args, of_weights),
            (name, last, (i32, i32, f32), epilogue_args, of_last),
        ):
            if f is not None:
                first = of_rank(world, 0, args)
                check_returned(self.engine.machine, f, what, numbers, first, types)

    def _checked_weights(self, rank, weights, num_tokens):
        """(address, or None of an array in host memory; the array) of router weights, which are accepted."""
        if hasattr(weights, "shape"):  # a number is refused below
            form, at = peek(weights, "router_weights")
            accepted = "router_weights", form, num_tokens
            if at is not None and not at % inputs.VECTOR_BYTES and accepted in self.engine.accepted:
                return at, weights
            weights = inputs.router_weights(
                self.cfg, self.engine.machine, rank, weights, num_tokens
            )
            if at is not None:
                self.engine.accept(accepted)
            return at, weights
        return None, inputs.router_weights(self.cfg, self.engine.machine, rank, weights, num_tokens)

    def _expect_apart(self, made, weights):
        """Arrays of the caller that are written share no memory with what is read."""
        read = []
        for (r, _, y, _, _, d), (_, w) in zip(self._read, weights):
            rank = r.rank
            read.append((f"expert_outputs of rank {rank}", view(y, "expert_outputs")))
            read += [(f"{name} of rank {rank}", view(getattr(d, name), name)) for name in READ]
            if w is not None:
                read.append((f"router_weights of rank {rank}", view(w, "router_weights")))
        expect_apart([one for to in made for one in to.results.outs], on_device(*read))

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

    def launch_async(self, returned, streams):
        """combine_async of every rank."""
        for b in returned:
            launch = self._launch("combine_async_kernel", b.r, 0, streams)
            launch.start(b.expert_outputs, b.src_info, b.n_rows, 0, 0, 0)

    def launch_wait(self, returned, reduction, streams, factory="combine_wait_kernel"):
        """combine_wait of every rank."""
        for b, to in zip(returned, reduction):
            self._launch(factory, b.r, b.num_tokens, streams, to.way, to.types).start(
                b.expert_outputs,
                b.src_info,
                b.n_rows,
                to.results.address("output_tokens"),
                b.topk_ids,
                to.weights,
                *to.words,
            )

    def launch_fused(self, returned, reduction, streams):
        """The fused combine of every rank."""
        self.launch_wait(returned, reduction, streams, "combine_kernel")

    def _launch(self, factory, r, num_tokens, streams, way=NO_WAY, types=TYPES):
        """What launches a kernel for so many tokens of a rank."""
        key = factory, r.rank, num_tokens, way.key, types
        launch = self.engine.plans.get(key)
        if launch is not None:
            return launch
        engine, options = self.engine, way.options

        def make():
            ways, regions = {}, r.combine_regions
            if factory == "combine_kernel" and engine.kernels == "fast":
                ways["without_signals"] = True
                if lamport.applies(self.cfg, True, options["router_weights"]):
                    regions = r.lamport_regions
            return engine.call(factory, **options, **ways).plan(
                num_tokens,
                r.rank,
                regions,
                machine=engine.machine,
                stream=streams[r.rank],
                timeout_s=engine.timeout,
                weights_types=types[0],
                epilogue_types=types[1],
            )

        return engine.plan(key, make)

    def finish(self, returned, reduction):
        """The results of every rank; waits for the kernels only if the caller's host arrays are to be filled."""
        filled = [to.results for to in reduction if to.results.copies]
        if filled or self._written:
            self.engine.check()
            for place, array in self._written.items():
                self.engine.placing.fetch(*place, array)
            for results in filled:
                results.finish()
        if device.SIM:
            self.engine.placing.let_go()
        if reduction[0].way.stores:
            return [None] * len(reduction)
        return [
            to.results.array("output_tokens", b.num_tokens) for b, to in zip(returned, reduction)
        ]


def _of_another_round(rank, d):
    kind = "of another round or rank" if isinstance(d, Dispatched) else f"a {type(d).__name__}"
    return (
        f"combine of rank {rank} was given a Dispatched {kind}; it needs what the open "
        f"dispatch returned for rank {rank}, whole, trimmed() or numpy()"
    )
