"""Combine on the host: expert outputs and weights checked and placed, kernels launched, results handed out."""

from dataclasses import dataclass, field

import numpy as np

from epmoe import device
from epmoe.host import inputs
from epmoe.host.arrays import view
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
from epmoe.kernels import TokenArray, lamport
from epmoe_ref.errors import EPValueError

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
        self._read = []  # what this round's combine reads in device memory: pairs (what it is, Array)

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
            y = inputs.expert_outputs(
                self.cfg, engine.machine, r.rank, y, self.capacity, lambda d=d: d.n_rows
            )
            checked.append((r, s, y, d))
            self._read += on_device(
                (f"expert_outputs of rank {r.rank}", y),
                *((f"{name} of rank {r.rank}", view(getattr(d, name), name)) for name in READ),
            )
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
        array, at = view(getattr(d, name), name), s.results.address(name)
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
        own = s.loan.buffer.read(field.dtype, array.shape, field.offset)
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
                inputs.router_weights(self.cfg, engine.machine, r.rank, w, s.num_tokens)
                for r, s, w in zip(
                    engine.ranks, sent, inputs.ranks_of(world, "router_weights", router_weights)
                )
            ]
        if out is not None:
            outs = inputs.ranks_of(world, "out", out)
            self._read += on_device(
                *(
                    (f"router_weights of rank {r.rank}", w)
                    for r, w in zip(engine.ranks, weights)
                    if w is not None
                )
            )
        options = {"router_weights": function or ("array" if reduced else None), name: last}
        made, shared = [], {}
        for i, (r, s, w, o) in enumerate(zip(engine.ranks, sent, weights, outs)):
            loan = engine.lent((r.reduced_pool if reduced else r.unreduced_pool).lend())
            shape = combine_shape(self.cfg, s.num_tokens, reduced)
            results = Results(
                loan,
                engine.machine,
                r.rank,
                {} if o is None else {"output_tokens": o},
                {"output_tokens": shape},
            )
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
        expect_apart([one for to in made for one in to.results.outs], self._read)
        self._read = []  # whose memory may be lent again, or is the caller's
        made[0].written = {
            place: array.host
            for _, place, array in shared.values()
            if array.host is not None and array.host.flags.writeable
        }
        i32, f32 = np.int32(0), np.float32(1)
        for what, f, numbers, args, kinds in (
            ("router_weights", function, (i32, i32), router_weights_args, made[0].weights_args),
            (name, last, (i32, i32, f32), epilogue_args, made[0].epilogue_args),
        ):
            if f is not None:
                check_returned(
                    engine.machine,
                    f,
                    what,
                    numbers,
                    of_rank(world, 0, args),
                    [a.type for a in kinds],
                )
        return made

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
            self.engine.call("combine_async_kernel")(
                b.expert_outputs,
                b.src_info,
                r.address("combine_send_buf"),
                r.peers("combine_recv_buf"),
                r.peers("combine_recv_count"),
                r.address("ep_counters"),
                r.rank,
                n_rows=b.n_rows,
                **self.engine.launch_arguments(r, streams[r.rank]),
            )

    def launch_wait(self, returned, reduction, streams):
        """combine_wait of every rank."""
        for r, b, to in zip(self.engine.ranks, returned, reduction):
            self.engine.call("combine_wait_kernel", **to.options)(
                TokenArray(to.results.address("output_tokens"), b.num_tokens),
                r.address("combine_recv_buf"),
                r.address("combine_recv_count"),
                r.address("ep_counters"),
                r.rank,
                b.topk_ids,
                router_weights=to.weights,
                router_weights_args=to.weights_args,
                epilogue_args=to.epilogue_args,
                input_tokens=b.expert_outputs,
                **self.engine.launch_arguments(r, streams[r.rank]),
            )

    def launch_fused(self, returned, reduction, streams):
        """The fused combine of every rank."""
        fast = self.engine.kernels == "fast"
        buf = lamport.recv_buf_name(self.cfg, fast, reduction[0].options["router_weights"])
        ways = {"without_signals": True} if fast else {}
        for r, b, to in zip(self.engine.ranks, returned, reduction):
            self.engine.call("combine_kernel", **to.options, **ways)(
                b.expert_outputs,
                b.src_info,
                TokenArray(to.results.address("output_tokens"), b.num_tokens),
                r.address("combine_send_buf"),
                r.peers(buf),
                r.peers("combine_recv_count"),
                r.address("ep_counters"),
                b.topk_ids,
                r.rank,
                n_rows=b.n_rows,
                router_weights=to.weights,
                router_weights_args=to.weights_args,
                epilogue_args=to.epilogue_args,
                **self.engine.launch_arguments(r, streams[r.rank]),
            )

    def finish(self, reduction):
        """The results of every rank; waits for the kernels only if the caller's host arrays are to be filled."""
        if any(to.written or to.results.copies for to in reduction):
            self.engine.check()
        for to in reduction:
            for place, array in to.written.items():
                self.engine.placing.fetch(*place, array)
            to.results.finish()
        if device.SIM:
            self.engine.placing.let_go()
        return [to.output() for to in reduction]
