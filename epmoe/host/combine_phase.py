"""Combine on the host: expert outputs and weights checked and placed, kernels launched, results handed out."""

from dataclasses import dataclass, field

import numpy as np

from epmoe import device
from epmoe.host import inputs
from epmoe.host.arrays import seen, view
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

TYPES, MOST_KNOWN = ((), ()), 4096
READ = "src_info", "topk_ids"  # what combine reads of a Dispatched


@dataclass(eq=False)
class Returned:
    """One rank's placed expert outputs, the addresses of src_info and the cleaned ids, and how many rows both have."""

    expert_outputs: int
    src_info: int
    n_rows: int
    topk_ids: int
    num_tokens: int


@dataclass(eq=False)
class Reduction:
    """How one rank reduces what comes back: compile-time options, placed arguments, and where the result goes.

    stores: whether an elementwise_lambda_fn stores the result itself; then results are not written. written: {name: the
    caller's array in host memory, into which it may have stored}.
    """

    options: dict
    weights: int
    weights_args: tuple
    epilogue_args: tuple
    results: Results
    num_tokens: int
    stores: bool
    written: dict = field(default_factory=dict)

    def output(self):
        """The result array of the caller, or the lent one cut to num_tokens; None if there is none."""
        return None if self.stores else self.results.array("output_tokens", self.num_tokens)


class CombinePhase:
    """begin and reduction, then launch_async and launch_wait, or launch_fused, then finish."""

    def __init__(self, engine, capacity):
        self.engine, self.cfg, self.capacity = engine, engine.cfg, capacity
        self._read = []  # what this round's combine reads: (rank, expert outputs, Dispatched) of each
        self._known = {}  # what calls are alike in -> _Known

    def again(self, sent, expert_outputs, d, router_weights, epilogue):
        """[result], launched, where there is a plan for such arrays; the round's Dispatched is as it was made."""
        y, s = seen(expert_outputs), sent[0]
        weights = router_weights if callable(router_weights) else seen(router_weights)
        if y is None or type(d) is not Dispatched or d.round is not s or s.results.given:
            return None
        form, at = weights, 0
        if weights is not None and not callable(weights):
            form, at = weights.form, weights.address
        elif weights is not router_weights:
            return None  # an array of a kind that is new
        known = self._known.get((y.form, form, epilogue, s.tokens.n))
        now, made = d.__dict__, s.made
        if (
            known is None
            or (y.address | at) % inputs.VECTOR_BYTES
            or now.get("src_info") is not made.get("src_info")
            or now.get("topk_ids") is not made.get("topk_ids")
        ):
            return None
        return known.start(s, y, at, expert_outputs, router_weights)

    def remember(self, sent, returned, reduction, expert_outputs, router_weights, epilogue):
        """There is a plan for arrays like these, which were combined in the general way."""
        y, weights = seen(expert_outputs), router_weights
        if not self.engine.remembers or y is None or y.shape[0] != self.capacity:
            return
        # functions that are made anew for each call are kept nowhere
        if any([callable(f) and earlier(f) is not f for f in (router_weights, epilogue)]):
            return
        form = weights
        if weights is not None and not callable(weights):
            weights = seen(weights)
            form = weights.form
        if y.host is None and getattr(weights, "host", None) is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            key = y.form, form, epilogue, sent[0].num_tokens
            self._known[key] = _Known(self, sent[0], returned[0], reduction[0])

    def forget(self):
        """No plan is known any more."""
        self._known.clear()

    def begin(self, sent, expert_outputs, dispatched):
        """Check and place expert outputs and what combine needs of the open round's Dispatched: a list of Returned."""
        engine, world = self.engine, self.engine.world
        checked, self._read = [], []
        for r, s, y, d in zip(
            engine.ranks,
            sent,
            inputs.ranks_of(world, "expert_outputs", expert_outputs),
            inputs.ranks_of(world, "dispatched", dispatched),
        ):
            if not isinstance(d, Dispatched) or d.round is not s:
                kind = (
                    "of another round or rank"
                    if isinstance(d, Dispatched)
                    else f"a {type(d).__name__}"
                )
                raise EPValueError(
                    f"combine of rank {r.rank} was given a Dispatched {kind}; it needs what the open "
                    f"dispatch returned for rank {r.rank}, whole, trimmed() or numpy()"
                )
            y = view(y, f"expert_outputs of rank {r.rank}")
            form = "expert_outputs", y.form
            if not engine.accepts(form, y):
                y = inputs.expert_outputs(
                    self.cfg, engine.machine, r.rank, y, self.capacity, lambda d=d: d.n_rows
                )
                if y.shape[0] == self.capacity:  # fewer rows must be as many as the round has
                    engine.accept(form)
            checked.append((r, s, y, d))
            self._read.append((r.rank, y, d))
        return [self._placed(*one) for one in checked]

    def _placed(self, r, s, y, d):
        src_info, topk_ids = (self._written_by_dispatch(r, s, d, name) for name in READ)
        place = self.engine.placing.place
        return Returned(
            place(r.rank, "expert_outputs", y, lent=s.loan),
            src_info,
            min(y.shape[0], self.capacity),
            topk_ids,
            s.num_tokens,
        )

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
        router_weights, epilogue, elementwise_lambda_fn = map(
            earlier, (router_weights, epilogue, elementwise_lambda_fn)
        )
        expect_sequence("router_weights_args", router_weights_args)
        expect_sequence("epilogue_args", epilogue_args)
        function = router_weights if callable(router_weights) else None
        reduced, stores = router_weights is not None, elementwise_lambda_fn is not None
        if stores and (epilogue is not None or out is not None):
            raise EPValueError(
                f"elementwise_lambda_fn and {'out' if epilogue is None else 'epilogue'} are both given: "
                "the function stores the result itself, and nothing else is stored"
            )
        name, last = (
            ("elementwise_lambda_fn", elementwise_lambda_fn) if stores else ("epilogue", epilogue)
        )
        self._check_functions(reduced, function, router_weights_args, name, last, epilogue_args)
        weights, outs = [None] * len(sent), [None] * len(sent)
        if reduced and function is None:
            weights = [
                self._checked_weights(r.rank, w, s.num_tokens)
                for r, s, w in zip(
                    engine.ranks, sent, inputs.ranks_of(world, "router_weights", router_weights)
                )
            ]
        if out is not None:
            outs = inputs.ranks_of(world, "out", out)
        options = {"router_weights": function or ("array" if reduced else None), name: last}
        made, shared, is_captured = [], {}, bool(engine.rounds.capture)
        for i, (r, s, w, o) in enumerate(zip(engine.ranks, sent, weights, outs)):
            result = r.reduced_result if reduced else r.unreduced_result
            loan = engine.lent(r.lend(result), is_captured)
            if o is None:
                results = Results(loan)
            else:
                shape = {"output_tokens": combine_shape(self.cfg, s.num_tokens, reduced)}
                results = Results(loan, engine.machine, r.rank, {"output_tokens": o}, shape)
            made.append(
                Reduction(
                    options,
                    0 if w is None else engine.placing.place(r.rank, "router_weights", w),
                    self._arguments(r, i, "router_weights_args", router_weights_args),
                    self._arguments(
                        r, i, "epilogue_args", epilogue_args, shared if stores else None
                    ),
                    results,
                    s.num_tokens,
                    stores,
                )
            )
        if out is not None:
            self._expect_apart(made, weights)
        self._read = []  # whose memory may be lent again, or is the caller's
        if shared:
            made[0].written = {
                place: array.host
                for _, place, array in shared.values()
                if array.host is not None and array.host.flags.writeable
            }
        if function is not None or last is not None:
            self._check_returned(function, router_weights_args, name, last, epilogue_args, made[0])
        return made

    def _check_returned(self, function, router_weights_args, name, last, epilogue_args, to):
        world, i32, f32 = self.engine.world, np.int32(0), np.float32(1)
        for what, f, numbers, args, kinds in (
            ("router_weights", function, (i32, i32), router_weights_args, to.weights_args),
            (name, last, (i32, i32, f32), epilogue_args, to.epilogue_args),
        ):
            if f is not None:
                types, first = [a.type for a in kinds], of_rank(world, 0, args)
                check_returned(self.engine.machine, f, what, numbers, first, types)

    def _checked_weights(self, rank, weights, num_tokens):
        if hasattr(weights, "shape"):  # a number is refused below
            weights = view(weights, f"router_weights of rank {rank}")
            form = "router_weights", weights.form, num_tokens
            if self.engine.accepts(form, weights):
                return weights
            self.engine.accept(form)
        return inputs.router_weights(self.cfg, self.engine.machine, rank, weights, num_tokens)

    def _expect_apart(self, made, weights):
        """Arrays of the caller that are written share no memory with what is read."""
        read = []
        for (rank, y, d), w in zip(self._read, weights):
            read.append((f"expert_outputs of rank {rank}", y))
            read += [(f"{name} of rank {rank}", view(getattr(d, name), name)) for name in READ]
            if w is not None:
                read.append((f"router_weights of rank {rank}", w))
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
        for r, b in zip(self.engine.ranks, returned):
            plan = self._plan("combine_async_kernel", r, 0, streams)
            plan.start(b.expert_outputs, b.src_info, b.n_rows, 0, 0, 0)

    def launch_wait(self, returned, reduction, streams):
        """combine_wait of every rank."""
        for r, b, to in zip(self.engine.ranks, returned, reduction):
            self._launch("combine_wait_kernel", r, b, to, streams)

    def launch_fused(self, returned, reduction, streams):
        """The fused combine of every rank."""
        for r, b, to in zip(self.engine.ranks, returned, reduction):
            self._launch("combine_kernel", r, b, to, streams)

    def _launch(self, factory, r, b, to, streams):
        plan = self._plan(factory, r, b.num_tokens, streams, to)
        plan.start(
            b.expert_outputs,
            b.src_info,
            b.n_rows,
            to.results.address("output_tokens"),
            b.topk_ids,
            to.weights,
            *argument_words(*to.weights_args, *to.epilogue_args),
        )

    def _plan(self, factory, r, num_tokens, streams, to=None):
        """What launches a kernel of this module for so many tokens of a rank."""
        engine, options, types = self.engine, {}, TYPES
        if to is not None:
            options = to.options
            types = (
                tuple([a.type for a in to.weights_args]),
                tuple([a.type for a in to.epilogue_args]),
            )

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

        return engine.plan((factory, r.rank, num_tokens, *options.items(), types), make)

    def finish(self, reduction):
        """The results of every rank; waits for the kernels only if the caller's host arrays are to be filled."""
        if any([to.written or to.results.given and to.results.copies for to in reduction]):
            self.engine.check()
            for to in reduction:
                for place, array in to.written.items():
                    self.engine.placing.fetch(*place, array)
                to.results.finish()
        if device.SIM:
            self.engine.placing.let_go()
        return [to.output() for to in reduction]


class _Known:
    """The plan of combines that are alike, by the fused kernel: one was accepted and launched."""

    def __init__(self, phase, sent, returned, to):
        self.engine, self.rank, (r,) = phase.engine, sent.rank, phase.engine.ranks
        fields, n = r.dispatch_result.fields, sent.num_tokens
        self.src_info, self.topk_ids = (fields[name].offset for name in READ)
        self.n_rows, self.n = returned.n_rows, n
        self.lend = r.lend
        self.result = r.reduced_result if to.options["router_weights"] else r.unreduced_result
        self.launch = self.engine.plan(
            ("combine_kernel", r.rank, n, *to.options.items(), TYPES), None
        )

    def start(self, s, y, weights_at, expert_outputs, router_weights):
        """[result], launched."""
        placed, sent = self.engine.placing.placed, s.loan
        placed[self.rank, "router_weights"] = None, router_weights
        lent = sent.base <= y.address < sent.base + sent.nbytes
        placed[self.rank, "expert_outputs"] = None, None if lent else expert_outputs
        loan, base = self.lend(self.result), sent.base
        if self.engine.rounds.capture:
            self.engine.lent(loan, True)
        self.launch.start(
            y.address,
            base + self.src_info,
            self.n_rows,
            loan.base,
            base + self.topk_ids,
            weights_at,
        )
        return [loan.array("output_tokens", self.n)]
