"""Dispatch on the host: inputs checked and placed, kernels launched, Dispatched made."""

from dataclasses import dataclass, field

import numpy as np

from epmoe.host import inputs
from epmoe.host.arrays import seen, view
from epmoe.host.dispatched import ARRAYS, Dispatched
from epmoe.host.inputs import VECTOR_BYTES
from epmoe.host.overlaps import expect_apart, on_device
from epmoe.host.rank_memory import dispatch_arrays
from epmoe.host.results import Results
from epmoe.host.same_functions import earlier
from epmoe.host.user_functions import check_returned, check_signature
from epmoe.kernels import TokenArray, formats
from epmoe.kernels.params import float32_word
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

INT32, ONE, MOST_KNOWN = np.dtype(np.int32), float32_word(1.0), 4096
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

    cfg, rank, check: as in a Dispatched.
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
    read: tuple = ()  # Arrays of the inputs, until it is known where results go
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
        fields = formats.of(engine.cfg).output_fields
        self.capacity = dispatch_arrays(engine.cfg)[1]
        self._written = *fields, "row_offsets", "expert_ids", "src_info", "recv_count"
        self._n_fields = len(fields)
        self._known = {}  # forms of arrays -> _Known

    def again(self, input_tokens, topk_ids, input_scale):
        """[Sent], launched, where there is a plan for such arrays: in GPU memory, of a process that has one rank."""
        x, ids = seen(input_tokens), seen(topk_ids)
        if x is None or ids is None or type(input_scale) is not float:
            return None
        known = self._known.get((x.form, ids.form))
        if known is None or (x.address | ids.address) % VECTOR_BYTES:
            return None
        return known.start(x, ids, input_scale)

    def remember(self, sent, input_tokens, topk_ids):
        """There is a plan for arrays like these, which were sent in the general way."""
        x, ids = seen(input_tokens), seen(topk_ids)
        if self.engine.remembers and x is not None and ids is not None:
            if x.host is None and ids.host is None and sent[0].scale_function is None:
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known[x.form, ids.form] = _Known(self, sent[0], ids)

    def forget(self):
        """No plan is known any more."""
        self._known.clear()

    def begin(self, input_tokens, topk_ids, input_scale):
        """Check all ranks' inputs, then place them: a list of Sent. Nothing is launched."""
        engine, cfg, world = self.engine, self.cfg, self.engine.world
        function = earlier(input_scale) if callable(input_scale) else None
        if function is not None:
            check_signature(function, "input_scale", ("i",), ())
            check_returned(engine.machine, function, "input_scale", (np.int32(0),), (), ())
            input_scale = 1.0
        scales = [input_scale] * len(engine.ranks)
        if world.lists and isinstance(input_scale, (list, tuple)):
            scales = inputs.ranks_of(world, "input_scale", input_scale)
        checked = [
            (r, *self._checked(r.rank, x, ids), inputs.input_scale(r.rank, scale))
            for r, x, ids, scale in zip(
                engine.ranks,
                inputs.ranks_of(world, "input_tokens", input_tokens),
                inputs.ranks_of(world, "topk_ids", topk_ids),
                scales,
            )
        ]
        place, is_captured = engine.placing.place, bool(engine.rounds.capture)
        return [
            Sent(
                cfg,
                r.rank,
                engine.check,
                TokenArray(place(r.rank, "input_tokens", x), x.shape[0]),
                place(r.rank, "topk_ids", ids, INT32),
                scale,
                function,
                engine.lent(r.lend(r.dispatch_result), is_captured),
                read=(x, ids),
            )
            for r, x, ids, scale in checked
        ]

    def _checked(self, rank, x, ids):
        """Arrays of a rank, which are accepted: of device memory that is told by their forms, once."""
        x, ids = view(x, f"input_tokens of rank {rank}"), view(ids, f"topk_ids of rank {rank}")
        forms = x.form, ids.form
        if not self.engine.accepts(forms, x, ids):
            x = inputs.tokens(self.cfg, self.engine.machine, rank, x)
            ids = inputs.topk_ids(self.cfg, self.engine.machine, rank, ids, x.shape[0])
            self.engine.accept(forms)
        return x, ids

    def into(self, sent, out):
        """Where the results go: `out` is None, or a Dispatched a rank whose arrays (None: lent ones) are written."""
        if out is None:
            for s in sent:
                s.results, s.read = Results(s.loan), ()
            return
        engine, results = self.engine, []
        for r, s, d in zip(engine.ranks, sent, inputs.ranks_of(engine.world, "out", out)):
            arrays = {} if d is None else _arrays_of(d)
            # dispatch_async writes the cleaned ids before out is known
            arrays.pop("topk_ids", None)
            unknown = [name for name in arrays if name not in s.loan.fields]
            if unknown:
                raise EPValueError(
                    f"out of rank {r.rank} has {', '.join(unknown)}, which token_format="
                    f"{self.cfg.token_format!r} does not produce: leave it None"
                )
            results.append(Results(s.loan, engine.machine, r.rank, arrays))
        expect_apart(
            [one for result in results for one in result.outs],
            on_device(
                *(
                    (f"{name} of rank {s.rank}", a)
                    for s in sent
                    for name, a in zip(("input_tokens", "topk_ids"), s.read)
                )
            ),
        )
        for s, result in zip(sent, results):
            s.results, s.read = result, ()

    def launch_async(self, sent, streams):
        """dispatch_async of every rank."""
        nowhere = (0,) * (len(self._written) + 1)
        for r, s in zip(self.engine.ranks, sent):
            self._plan("dispatch_async_kernel", r, s, streams).start(*self._read_by(s), *nowhere)

    def launch_wait(self, sent, streams):
        """dispatch_wait of every rank."""
        for r, s in zip(self.engine.ranks, sent):
            plan = self._plan("dispatch_wait_kernel", r, s, streams)
            plan.start(s.tokens.address, 0, 0, 0, *self._written_by(s))

    def launch_fused(self, sent, streams):
        """The fused dispatch of every rank."""
        for r, s in zip(self.engine.ranks, sent):
            plan = self._plan("dispatch_kernel", r, s, streams)
            plan.start(*self._read_by(s), *self._written_by(s))

    def _read_by(self, s):
        """Words of what dispatch reads, and of the cleaned ids."""
        return s.tokens.address, s.topk_ids, s.loan.address("topk_ids"), float32_word(s.scale)

    def _written_by(self, s):
        """Words of what dispatch writes."""
        words = s.results.addresses(self._written)
        words.insert(self._n_fields, self.capacity)
        return words

    def _plan(self, factory, r, s, streams):
        """What launches a kernel of this module for so many tokens of a rank."""
        engine, function = self.engine, s.scale_function
        if factory == "dispatch_wait_kernel":
            function = None

        def make():
            options = {} if factory == "dispatch_wait_kernel" else {"input_scale": function}
            return engine.call(factory, **options).plan(
                s.tokens.n,
                r.rank,
                r.dispatch_regions,
                machine=engine.machine,
                stream=streams[r.rank],
                timeout_s=engine.timeout,
            )

        return engine.plan((factory, r.rank, s.tokens.n, function), make)

    def finish(self, sent):
        """Dispatched of every rank; waits for the kernels only if the caller's host arrays are to be filled."""
        if any([s.results.given and s.results.copies for s in sent]):
            self.engine.check()
            for s in sent:
                s.results.finish()
        return [Dispatched.of_round(s) for s in sent]


def _arrays_of(d):
    """{name: array} of a Dispatched that is given as out=."""
    return {n: _writable(d, n, a) for n in ARRAYS if (a := getattr(d, n, None)) is not None}


class _Known:
    """The plan of dispatches of arrays of two forms, by the fused kernel: it was accepted and launched once."""

    def __init__(self, phase, sent, ids):
        self.engine, self.rank, (r,) = phase.engine, sent.rank, phase.engine.ranks
        self.lend, self.result, fields = r.lend, r.dispatch_result, r.dispatch_result.fields
        self.launch = self.engine.plan(("dispatch_kernel", r.rank, sent.num_tokens, None), None)
        self.at = [fields[name].offset for name in phase._written]
        self.at.insert(phase._n_fields, 0)
        self.n_fields, self.capacity = phase._n_fields, phase.capacity
        self.clean, self.is_int32 = fields["topk_ids"].offset, ids.dtype == INT32
        self.of_round = dict(vars(sent), loan=None, results=None, made=None)

    def start(self, x, ids, scale):
        """[Sent], launched."""
        engine, placing = self.engine, self.engine.placing
        word = ONE if scale == 1.0 else float32_word(inputs.input_scale(self.rank, scale))
        if self.is_int32:
            placing.placed[self.rank, "topk_ids"] = None, ids.owner
            ids_at = ids.address
        else:
            ids_at = placing.place(self.rank, "topk_ids", ids, INT32)
        placing.placed[self.rank, "input_tokens"] = None, x.owner
        loan = self.lend(self.result)
        if engine.rounds.capture:
            engine.lent(loan, True)
        base = loan.base
        words = [base + at for at in self.at]
        words[self.n_fields] = self.capacity
        self.launch.start(x.address, ids_at, base + self.clean, word, *words)
        sent = Sent.__new__(Sent)
        sent.__dict__ = of_round = self.of_round.copy()
        of_round["loan"], of_round["results"], of_round["made"] = loan, Results(loan), {}
        return [sent]
