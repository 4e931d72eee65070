"""Dispatch on the host: inputs checked and placed, kernels launched, Dispatched made."""

from dataclasses import dataclass, field

import numpy as np

from epmoe.host import inputs
from epmoe.host.dispatched import ARRAYS, Dispatched
from epmoe.host.overlaps import expect_apart, on_device
from epmoe.host.rank_memory import dispatch_arrays
from epmoe.host.results import Results
from epmoe.host.same_functions import earlier
from epmoe.host.user_functions import check_returned, check_signature
from epmoe.kernels import FormatHandler, TokenArray, formats
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

READONLY = "src_info", "topk_ids", "row_offsets"  # in the simulator: what combine relies on


def _writable(d, name, array):
    """An array of a Dispatched given as out=, which an earlier dispatch may have made for reading."""
    of_round = d.round
    if (
        isinstance(array, np.ndarray)
        and not array.flags.writeable
        and of_round
        and array is of_round.made.get(name)
    ):
        return of_round.results.array(name)
    return array


@dataclass(eq=False)
class Sent:
    """One rank's part of the open round: its placed inputs, and the loan that its results go into.

    cfg, rank, check: as in a Dispatched. place: what known combines are told it by, None if it is not known.
    """

    cfg: EPConfig
    rank: int
    check: object
    tokens: TokenArray
    topk_ids: int
    scale: float
    scale_function: object
    loan: object
    results: Results | None = None
    place: tuple | None = None
    read: tuple = ()  # (what it is, Array) of inputs that the kernels read where they lie
    made: dict = field(default_factory=dict)  # arrays by name, when they were first looked at

    @property
    def num_tokens(self):
        """Tokens that the rank put in."""
        return self.tokens.n

    def array(self, name):
        """An array of the Dispatched, None if the token format has none of that name."""
        array = self.made.get(name)
        if array is None:
            array = self.results.array(name, self.num_tokens if name == "topk_ids" else None)
            if array is not None:
                if name in READONLY and isinstance(array, np.ndarray) and not self.results.given:
                    array.flags.writeable = False
                self.made[name] = array
        return array


class DispatchPhase:
    """begin, then launch_async and launch_wait, or launch_fused, then finish."""

    def __init__(self, engine):
        self.engine, self.cfg = engine, engine.cfg
        self._format = formats.of(engine.cfg)
        self.capacity = dispatch_arrays(engine.cfg)[1]

    def begin(self, input_tokens, topk_ids, input_scale):
        """Check all ranks' inputs, then place them: a list of Sent. Nothing is launched."""
        engine, cfg, world = self.engine, self.cfg, self.engine.world
        function = earlier(input_scale) if callable(input_scale) else None
        if function is not None:
            check_signature(function, "input_scale", ("i",), ())
            check_returned(engine.machine, function, "input_scale", (np.int32(0),), (), ())
        scales = [input_scale] * len(engine.ranks)
        if world.lists and isinstance(input_scale, (list, tuple)):
            scales = inputs.ranks_of(world, "input_scale", input_scale)
        checked = []
        for r, x, ids, scale in zip(
            engine.ranks,
            inputs.ranks_of(world, "input_tokens", input_tokens),
            inputs.ranks_of(world, "topk_ids", topk_ids),
            scales,
        ):
            x = inputs.tokens(cfg, engine.machine, r.rank, x)
            ids = inputs.topk_ids(cfg, engine.machine, r.rank, ids, x.shape[0])
            checked.append((r, x, ids, 1.0 if function else inputs.input_scale(r.rank, scale)))
        place = engine.placing.place
        return [
            Sent(
                cfg,
                r.rank,
                engine.check,
                TokenArray(place(r.rank, "input_tokens", x), x.shape[0]),
                place(r.rank, "topk_ids", ids, np.int32),
                scale,
                function,
                engine.lent(r.dispatch_pool.lend()),
                read=on_device(
                    (f"input_tokens of rank {r.rank}", x), (f"topk_ids of rank {r.rank}", ids)
                ),
            )
            for r, x, ids, scale in checked
        ]

    def into(self, sent, out):
        """Where the results go: `out` is None, or a Dispatched a rank whose arrays (None: lent ones) are written."""
        engine = self.engine
        given = [None] * len(sent) if out is None else inputs.ranks_of(engine.world, "out", out)
        results = []
        for r, s, d in zip(engine.ranks, sent, given):
            arrays = (
                {}
                if d is None
                else {
                    n: _writable(d, n, a) for n in ARRAYS if (a := getattr(d, n, None)) is not None
                }
            )
            arrays.pop(
                "topk_ids", None
            )  # dispatch_async writes the cleaned ids before out is known
            unknown = [name for name in arrays if name not in s.loan.fields]
            if unknown:
                raise EPValueError(
                    f"out of rank {r.rank} has {', '.join(unknown)}, which token_format="
                    f"{self.cfg.token_format!r} does not produce: leave it None"
                )
            results.append(Results(s.loan, engine.machine, r.rank, arrays))
        expect_apart(
            [one for result in results for one in result.outs],
            [one for s in sent for one in s.read],
        )
        for s, result in zip(sent, results):
            s.results, s.read = result, ()

    def launch_async(self, sent, streams):
        """dispatch_async of every rank."""
        for r, s in zip(self.engine.ranks, sent):
            self.engine.call("dispatch_async_kernel", input_scale=s.scale_function)(
                s.tokens,
                s.topk_ids,
                r.address("dispatch_send_buf"),
                r.peers("dispatch_recv_buf"),
                r.peers("dispatch_recv_count"),
                r.address("ep_counters"),
                r.rank,
                clean_topk_ids=s.loan.address("topk_ids"),
                input_scale=s.scale,
                **self.engine.launch_arguments(r, streams[r.rank]),
            )

    def launch_wait(self, sent, streams):
        """dispatch_wait of every rank."""
        for r, s in zip(self.engine.ranks, sent):
            to = s.results.address
            self.engine.call("dispatch_wait_kernel")(
                self._handler(s),
                to("row_offsets"),
                to("expert_ids"),
                to("src_info"),
                r.address("dispatch_recv_buf"),
                r.address("dispatch_recv_count"),
                r.address("ep_counters"),
                r.rank,
                recv_counts=to("recv_count"),
                input_tokens=s.tokens,
                send_buf_p=r.address("dispatch_send_buf"),
                **self.engine.launch_arguments(r, streams[r.rank]),
            )

    def launch_fused(self, sent, streams):
        """The fused dispatch of every rank."""
        for r, s in zip(self.engine.ranks, sent):
            to = s.results.address
            self.engine.call("dispatch_kernel", input_scale=s.scale_function)(
                s.tokens,
                s.topk_ids,
                self._handler(s),
                to("row_offsets"),
                to("expert_ids"),
                to("src_info"),
                r.address("dispatch_send_buf"),
                r.peers("dispatch_recv_buf"),
                r.peers("dispatch_recv_count"),
                r.address("ep_counters"),
                r.rank,
                clean_topk_ids=s.loan.address("topk_ids"),
                recv_counts=to("recv_count"),
                input_scale=s.scale,
                **self.engine.launch_arguments(r, streams[r.rank]),
            )

    def finish(self, sent):
        """Dispatched of every rank; waits for the kernels only if the caller's host arrays are to be filled."""
        if any(s.results.copies for s in sent):
            self.engine.check()
        for s in sent:
            s.results.finish()
        return [Dispatched.of_round(s) for s in sent]

    def _handler(self, s):
        return FormatHandler(
            {name: s.results.address(name) for name in self._format.output_fields}, self.capacity
        )
