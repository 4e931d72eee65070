"""Combine on the host: expert outputs and weights checked and placed, kernels launched, results handed out."""

from dataclasses import dataclass

from epmoe_ref.errors import EPValueError

from epmoe import device
from epmoe.host import inputs
from epmoe.host.arrays import view
from epmoe.host.dispatched import Dispatched
from epmoe.host.rank_memory import combine_shape
from epmoe.host.results import Results
from epmoe.host.user_functions import argument, check_signature, of_rank
from epmoe.kernels import TokenArray, lamport


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
    """How one rank reduces what comes back: compile-time options, placed arguments, and where the result goes."""

    options: dict
    weights: int
    weights_args: tuple
    epilogue_args: tuple
    results: Results
    num_tokens: int

    def output(self):
        """The result array of the caller, or the lent one cut to num_tokens."""
        return self.results.array("output_tokens", self.num_tokens)


class CombinePhase:
    """begin and reduction, then launch_async and launch_wait, or launch_fused, then finish."""

    def __init__(self, engine, capacity):
        self.engine, self.cfg, self.capacity = engine, engine.cfg, capacity

    def begin(self, sent, expert_outputs, dispatched):
        """Check and place expert outputs and what combine needs of the open round's Dispatched: a list of Returned."""
        engine, world = self.engine, self.engine.world
        checked = []
        for r, s, y, d in zip(engine.ranks, sent, inputs.ranks_of(world, "expert_outputs", expert_outputs),
                              inputs.ranks_of(world, "dispatched", dispatched)):
            if not isinstance(d, Dispatched) or d.round is not s:
                kind = "of another round or rank" if isinstance(d, Dispatched) else f"a {type(d).__name__}"
                raise EPValueError(f"combine of rank {r.rank} was given a Dispatched {kind}; it needs what the open "
                                   f"dispatch returned for rank {r.rank}, whole, trimmed() or numpy()")
            y = inputs.expert_outputs(self.cfg, engine.machine, r.rank, y, self.capacity, lambda d=d: d.n_rows)
            checked.append((r, s, y, d))
        return [self._placed(*one) for one in checked]

    def _placed(self, r, s, y, d):
        place, src_info = self.engine.placing.place, view(d.src_info, "src_info")
        return Returned(place(r.rank, "expert_outputs", y, lent=s.loan),
                        place(r.rank, "src_info", src_info, lent=s.loan), min(y.shape[0], src_info.shape[0]),
                        place(r.rank, "clean topk_ids", view(d.topk_ids, "topk_ids"), lent=s.loan), s.num_tokens)

    def reduction(self, sent, router_weights, router_weights_args, epilogue, epilogue_args, out):
        """Check and place everything about the reduction: a list of Reduction."""
        engine, world = self.engine, self.engine.world
        function = router_weights if callable(router_weights) else None
        reduced = router_weights is not None
        self._check_functions(reduced, function, router_weights_args, epilogue, epilogue_args)
        weights, outs = [None] * len(sent), [None] * len(sent)
        if reduced and function is None:
            weights = [inputs.router_weights(self.cfg, engine.machine, r.rank, w, s.num_tokens) for r, s, w in
                       zip(engine.ranks, sent, inputs.ranks_of(world, "router_weights", router_weights))]
        if out is not None:
            outs = inputs.ranks_of(world, "out", out)
        options = dict(router_weights=function or ("array" if reduced else None), epilogue=epilogue)
        made = []
        for i, (r, s, w, o) in enumerate(zip(engine.ranks, sent, weights, outs)):
            loan = engine.lent((r.reduced_pool if reduced else r.unreduced_pool).lend())
            shape = combine_shape(self.cfg, s.num_tokens, reduced)
            results = Results(loan, engine.machine, r.rank, {} if o is None else {"output_tokens": o},
                              {"output_tokens": shape})
            made.append(Reduction(
                options, 0 if w is None else engine.placing.place(r.rank, "router_weights", w),
                self._arguments(r, i, "router_weights_args", router_weights_args),
                self._arguments(r, i, "epilogue_args", epilogue_args), results, s.num_tokens))
        return made

    def _check_functions(self, reduced, function, router_weights_args, epilogue, epilogue_args):
        if epilogue is not None and not reduced:
            raise EPValueError("an epilogue needs router weights: without them the rows are returned unreduced")
        if self.cfg.fused_shared_expert and not reduced:
            raise EPValueError("fused_shared_expert=True needs router weights: the shared expert is added to their sum")
        if router_weights_args and function is None:
            raise EPValueError("router_weights_args are given, and router_weights is no function that would take them")
        if epilogue_args and epilogue is None:
            raise EPValueError("epilogue_args are given, and there is no epilogue that would take them")
        if epilogue is not None:
            check_signature(epilogue, "epilogue", ("token", "col", "value"), epilogue_args)
        if function is not None:
            check_signature(function, "router_weights", ("token", "k"), router_weights_args)

    def _arguments(self, r, index, what, args):
        def place(n, array):
            return self.engine.placing.place(r.rank, f"{what}[{n}]", array)

        return tuple(argument(value, f"{what}[{n}] of rank {r.rank}", lambda array, n=n: place(n, array))
                     for n, value in enumerate(of_rank(self.engine.world, index, args)))

    def launch_async(self, returned, streams):
        """combine_async of every rank."""
        for r, b in zip(self.engine.ranks, returned):
            self.engine.call("combine_async_kernel")(
                b.expert_outputs, b.src_info, r.address("combine_send_buf"), r.peers("combine_recv_buf"),
                r.peers("combine_recv_count"), r.address("ep_counters"), r.rank, n_rows=b.n_rows,
                **self.engine.launch_arguments(r, streams[r.rank]))

    def launch_wait(self, returned, reduction, streams):
        """combine_wait of every rank."""
        for r, b, to in zip(self.engine.ranks, returned, reduction):
            self.engine.call("combine_wait_kernel", **to.options)(
                TokenArray(to.results.address("output_tokens"), b.num_tokens), r.address("combine_recv_buf"),
                r.address("combine_recv_count"), r.address("ep_counters"), r.rank, b.topk_ids,
                router_weights=to.weights, router_weights_args=to.weights_args, epilogue_args=to.epilogue_args,
                input_tokens=b.expert_outputs, **self.engine.launch_arguments(r, streams[r.rank]))

    def launch_fused(self, returned, reduction, streams):
        """The fused combine of every rank."""
        buf = lamport.recv_buf_name(self.cfg, self.engine.launch, reduction[0].options["router_weights"])
        for r, b, to in zip(self.engine.ranks, returned, reduction):
            self.engine.call("combine_kernel", **to.options)(
                b.expert_outputs, b.src_info, TokenArray(to.results.address("output_tokens"), b.num_tokens),
                r.address("combine_send_buf"), r.peers(buf), r.peers("combine_recv_count"),
                r.address("ep_counters"), b.topk_ids, r.rank, n_rows=b.n_rows, router_weights=to.weights,
                router_weights_args=to.weights_args, epilogue_args=to.epilogue_args,
                **self.engine.launch_arguments(r, streams[r.rank]))

    def finish(self, reduction):
        """The results of every rank; waits for the kernels only if the caller's host arrays are to be filled."""
        if any(to.results.copies for to in reduction):
            self.engine.check()
        for to in reduction:
            to.results.finish()
        if device.SIM:
            self.engine.placing.let_go()
        return [to.output() for to in reduction]
