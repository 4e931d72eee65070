"""Dispatch on the host: inputs checked and placed, kernels launched, Dispatched made."""

import numpy as np

from epmoe.host import inputs
from epmoe.host.arrays import PEEKS, peek, view
from epmoe.host.dispatched import ARRAYS, Dispatched
from epmoe.host.overlaps import expect_apart, on_device
from epmoe.host.rank_memory import dispatch_arrays
from epmoe.host.results import Results
from epmoe.host.same_functions import earlier
from epmoe.host.user_functions import check_returned, check_signature
from epmoe.kernels import formats
from epmoe.kernels.params import float32_word
from epmoe_ref.errors import EPValueError

INT32, INT64, ONE = np.dtype(np.int32), np.dtype(np.int64), float32_word(1.0)
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


class _Plan:
    """One rank's dispatches of arrays of two forms: what was checked of them, and how they are launched.

    narrowing: of ids in device memory, for Placing.narrowed; None where kernels read them as they are. options: of
    the factories of kernels that send. cfg, rank, check: as in a Dispatched.
    """

    def __init__(self, phase, r, num_tokens, narrowing, options):
        self.engine, self.r, self.num_tokens = phase.engine, r, num_tokens
        self.cfg, self.rank, self.check = phase.cfg, r.rank, phase.engine.check
        self.narrowing, self._options, self._launches = narrowing, options, {}

    def launch(self, factory):
        """What launches a kernel; prepared once."""
        launch = self._launches.get(factory)
        if launch is None:
            options = {} if factory == "dispatch_wait_kernel" else self._options
            launch = self._launches[factory] = self.engine.prepared(
                factory, self.r, self.num_tokens, self.r.dispatch_regions, options
            )
        return launch


class Sent:
    """One rank's part of the open round: its placed inputs, and the loan that its results go into.

    scale: its word. results: the loan, or the caller's arrays. made: arrays by name, when they were first looked at.
    cfg, rank, check, num_tokens: as in a Dispatched.
    """

    __slots__ = ("plan", "num_tokens", "tokens", "topk_ids", "scale", "loan", "results", "made")

    def __init__(self, plan, tokens, topk_ids, scale, loan):
        self.plan, self.num_tokens = plan, plan.num_tokens
        self.tokens, self.topk_ids, self.scale = tokens, topk_ids, scale
        self.loan = self.results = loan
        self.made = {}

    cfg = property(lambda self: self.plan.cfg)
    rank = property(lambda self: self.plan.rank)
    check = property(lambda self: self.plan.check)

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
    """begin, perhaps into, then launch."""

    def __init__(self, engine):
        self.engine, self.cfg = engine, engine.cfg
        fields = formats.of(engine.cfg).output_fields
        self.capacity = dispatch_arrays(engine.cfg)[1]
        self._written = *fields, "row_offsets", "expert_ids", "src_info", "recv_count"
        self._n_fields = len(fields)
        of = engine.ranks[0].dispatch_result.fields
        self._offsets = [of[name].offset for name in self._written]
        self._clean = of["topk_ids"].offset
        self._named = [
            (r, f"input_tokens of rank {r.rank}", f"topk_ids of rank {r.rank}")
            for r in engine.ranks
        ]
        self._kept = []  # inputs in device memory, until the next ones come

    def begin(self, input_tokens, topk_ids, input_scale):
        """Check all ranks' inputs, then place them: a list of Sent. Nothing is launched."""
        engine, world, function = self.engine, self.engine.world, None
        if engine.has_many:
            engine.forget_calls()
        if callable(input_scale):
            function = earlier(input_scale)
            check_signature(function, "input_scale", ("i",), ())
            check_returned(engine.machine, function, "input_scale", (np.int32(0),), (), ())
            input_scale = 1.0
        if world.lists:
            scales = [input_scale] * len(engine.ranks)
            if isinstance(input_scale, (list, tuple)):
                scales = inputs.ranks_of(world, "input_scale", input_scale)
            arrays = inputs.each_rank(world, input_tokens=input_tokens, topk_ids=topk_ids)
            given = zip(self._named, arrays, scales)
        else:
            given = ((self._named[0], (input_tokens, topk_ids), input_scale),)
        checked = []
        for (r, of_x, of_ids), (x, ids), scale in given:
            x_form, x_at, x = (PEEKS.get(type(x)) or peek)(x, of_x)
            ids_form, ids_at, ids = (PEEKS.get(type(ids)) or peek)(ids, of_ids)
            key = r.rank, x_form, ids_form, function
            plan = engine.plans.get(key)
            # in host memory, what they hold is looked at, too
            if plan is None or x_at is None or ids_at is None:
                plan, x, ids = self._checked(key, x, ids)
            word = ONE if scale == 1.0 and type(scale) is float else None
            if word is None:
                word = float32_word(inputs.input_scale(r.rank, scale))
            checked.append((plan, x_at, x, ids_at, ids, word))
        self._kept, sent = checked, []
        for plan, x_at, x, ids_at, ids, word in checked:
            r = plan.r
            if x_at is None:
                x_at = engine.placing.place(r.rank, "input_tokens", x)
            if ids_at is None:
                ids_at = engine.placing.place(r.rank, "topk_ids", ids, INT32)
            elif plan.narrowing is not None:
                ids_at = engine.placing.narrowed(plan.narrowing, ids_at)
            loan = r.arena.lend(r.dispatch_result)
            if engine.rounds.capture:
                engine.captured.append(loan)
            sent.append(Sent(plan, x_at, ids_at, word, loan))
        return sent

    def _checked(self, key, x, ids):
        """The plan of arrays that have passed all checks, and the arrays."""
        rank, _, _, function = key
        x = inputs.tokens(self.cfg, self.engine.machine, rank, x)
        ids = inputs.topk_ids(self.cfg, self.engine.machine, rank, ids, x.shape[0])

        plan = self.engine.plans.get(key)
        if plan is None:
            of_rank = next(r for r in self.engine.ranks if r.rank == rank)
            narrowing, options = None, {"input_scale": function}
            if ids.host is None and ids.dtype == INT64 and self.engine.kernels == "fast":
                options["id_bytes"] = 8
            elif ids.host is None and ids.dtype != INT32:
                narrowing = rank, "topk_ids", ids.dtype, ids.shape[0] * ids.shape[1]
            plan = self.engine.enter(key, _Plan(self, of_rank, x.shape[0], narrowing, options))
        return plan, x, ids

    def into(self, sent, out):
        """Where the results go: `out` is a Dispatched a rank, whose arrays (None: lent ones) are written."""
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
        read = [
            (what, view(a, what))
            for (_, *names), (_, _, x, _, ids, _) in zip(self._named, self._kept)
            for what, a in zip(names, (x, ids))
        ]
        expect_apart([one for result in results for one in result.outs], on_device(*read))
        for s, result in zip(sent, results):
            s.results = result

    def launch(self, call, sent, fused=False):
        """Launch the kernels of a call for every rank; of a whole dispatch the Dispatched of every rank."""
        launches = []
        if call != "dispatch_wait" and not fused:
            nowhere = (0,) * (len(self._written) + 1)
            for s in sent:
                words = s.tokens, s.topk_ids, s.loan.base + self._clean, s.scale, *nowhere
                launches.append((s.plan.launch("dispatch_async_kernel"), words))
        if call != "dispatch_async":
            for s in sent:
                if s.results.given:
                    written = [s.results.address(name) for name in self._written]
                else:
                    base = s.loan.base
                    written = [base + offset for offset in self._offsets]
                written.insert(self._n_fields, self.capacity)
                if fused:
                    launch = s.plan.launch("dispatch_kernel")
                    words = s.tokens, s.topk_ids, s.loan.base + self._clean, s.scale, *written
                else:
                    launch = s.plan.launch("dispatch_wait_kernel")
                    words = s.tokens, 0, 0, 0, *written
                launches.append((launch, words))
        self.engine.start(call, launches, fused)
        made = []
        for s in sent if call != "dispatch_async" else ():
            if s.results.copies:  # the caller's host arrays are to be filled
                self.engine.check()
                s.results.finish()
            d = _new(Dispatched)
            d.round = s
            made.append(d)
        return made


_new = object.__new__


def _arrays_of(d):
    """{name: array} of a Dispatched that is given as out=."""
    return {n: _writable(d, n, a) for n in ARRAYS if (a := getattr(d, n, None)) is not None}
