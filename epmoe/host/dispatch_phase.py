"""Dispatch on the host: checks all ranks' inputs, places them, launches the kernels and returns Dispatched."""

import numpy as np

from epmoe.host import inputs
from epmoe.host.arrays import PEEKS, view
from epmoe.host.dispatched import ARRAYS, Dispatched, kind_of
from epmoe.host.engine import Plan
from epmoe.host.out_arrays import Out, expect_apart
from epmoe.host.rank_memory import dispatch_arrays
from epmoe.host.user_functions import check_function, earlier
from epmoe.kernels import formats
from epmoe.kernels.params import float32_word
from epmoe_ref.errors import EPValueError

INT32, INT64, ONE = np.dtype(np.int32), np.dtype(np.int64), float32_word(1.0)
MOST_CALLS = 64  # of the engine, kept from round to round
READONLY = "src_info", "topk_ids", "row_offsets"  # in the simulator; combine needs these
SPLIT = {  # call: the split kernels that it launches
    "dispatch_async": ["dispatch_async_kernel"],
    "dispatch_wait": ["dispatch_wait_kernel"],
    "dispatch": ["dispatch_async_kernel", "dispatch_wait_kernel"],
}
FUSED = ["dispatch_kernel"]
_new = object.__new__


class Part:
    """One rank's part of the open round: the words of its next launch, and the Loan of its results.

    words: for dispatch's launches, then for combine's. out: the caller's out= arrays, as an Out, or None.
    cfg, rank, check, num_tokens: as in a Dispatched.
    """

    __slots__ = "plan", "words", "loan", "out"

    def __init__(self, plan, words, loan):
        self.plan, self.words, self.loan, self.out = plan, words, loan, None

    cfg = property(lambda self: self.plan.r.cfg)
    rank = property(lambda self: self.plan.r.rank)
    num_tokens = property(lambda self: self.plan.num_tokens)
    check = property(lambda self: self.plan.engine.check)

    def array(self, name):
        """An array of the Dispatched; None if the token format has no array of that name."""
        if self.out is not None and name in self.out.arrays:
            return self.out.arrays[name]
        array = self.loan.array(name, self.num_tokens if name == "topk_ids" else None)
        if self.out is None and name in READONLY and isinstance(array, np.ndarray):
            array.flags.writeable = False
        return array


class DispatchPhase:
    """Runs dispatch: begin() and launch(). In two halves: begin(), launch(), into() if out= is given, launch()."""

    def __init__(self, engine):
        self.engine, self.cfg = engine, engine.cfg
        fields = formats.of(engine.cfg).output_fields
        self.capacity = dispatch_arrays(engine.cfg)[1]
        # words: input tokens, ids, clean ids, scale, the format's arrays, their capacity, the other arrays
        self._capacity_at = 4 + len(fields)
        written = *fields, "row_offsets", "expert_ids", "src_info", "recv_count"
        of = engine.ranks[0].dispatch_result.fields
        self._clean, self._tokens = of["topk_ids"].offset, of["output_tokens"]
        self._offsets = [of[name].offset for name in written]
        # {name: its word}
        self._written = {n: 4 + i + (i >= len(fields)) for i, n in enumerate(written)}
        self._named = [(r, f"input_tokens of rank {r.rank}", f"topk_ids of rank {r.rank}") for r in engine.ranks]
        self._kept = []  # keeps this round's inputs alive until the next round

    def begin(self, input_tokens, topk_ids, input_scale, out=None):
        """Check all ranks' inputs, then place them; sets engine.parts, a Part for each rank."""
        engine, function = self.engine, None
        if len(engine.calls) > MOST_CALLS:
            engine.forget_calls()
        if callable(input_scale):
            function, input_scale = earlier(input_scale), 1.0
        given, scales = ((input_tokens, topk_ids),), (input_scale,)
        if engine.lists:
            given = inputs.each_rank(engine.world, input_tokens=input_tokens, topk_ids=topk_ids)
            scales = [input_scale] * len(engine.ranks)
            if isinstance(input_scale, (list, tuple)):
                scales = inputs.ranks_of(engine.world, "input_scale", input_scale)
        plans, kept, parts, unplaced = engine.plans, [], [], []
        for (r, of_x, of_ids), (x, ids), scale in zip(self._named, given, scales):
            x_form, x_at, x = PEEKS[type(x)](x, of_x)
            ids_form, ids_at, ids = PEEKS[type(ids)](ids, of_ids)
            key = r.rank, x_form, ids_form, function
            plan = plans.get(key)
            # values in host memory are checked in every call
            if plan is None or x_at is None or ids_at is None:
                plan, x, ids = self._checked(key, r, x, ids)
            word = ONE
            if type(scale) is not float or scale != 1.0:
                word = float32_word(inputs.input_scale(r.rank, scale))
            loan = r.arena.lend(r.dispatch_result)
            base = loan.base
            words = [x_at, ids_at, base + self._clean, word, *map(base.__add__, self._offsets)]
            words.insert(self._capacity_at, self.capacity)
            if x_at is None:
                unplaced.append((words, 0, r.rank, "input_tokens", x))
            if ids_at is None or plan.narrows:
                unplaced.append((words, 1, r.rank, "topk_ids", ids, INT32))
            kept += x, ids
            parts.append(Part(plan, words, loan))
        self._kept = kept
        if out is not None:
            self.into(parts, out)
        if unplaced:
            engine.placing.fill_in(unplaced)
        if engine.rounds.capture:
            engine.captured += [part.loan for part in parts]
        engine.parts = parts

    def _checked(self, key, r, x, ids):
        """Check a rank's arrays: (plan, x, ids)."""
        engine, function = self.engine, key[-1]
        x = inputs.tokens(self.cfg, engine.machine, r.rank, x)
        ids = inputs.topk_ids(self.cfg, engine.machine, r.rank, ids, x.shape[0])
        plan = engine.plans.get(key)
        if plan is None:
            options = {"input_scale": function}
            if function is not None:
                check_function(engine.machine, function, "input_scale")
            # ids in device memory of a type that the kernels cannot read are cast to int32 there
            narrows = ids.host is None and ids.dtype != INT32
            if narrows and ids.dtype == INT64 and engine.kernels == "fast":
                options["id_bytes"], narrows = 8, False
            plan = engine.plans[key] = Plan(engine, r, x.shape[0], options)
            plan.narrows = narrows
        return plan, x, ids

    def into(self, parts, out):
        """Make the results go into `out`, a Dispatched for each rank; arrays that are None there are lent as usual."""
        outs = []
        for part, d in zip(parts, inputs.ranks_of(self.engine.world, "out", out)):
            if d is not None and not isinstance(d, Dispatched):
                raise EPValueError(f"out of rank {part.rank} must be a Dispatched of epmoe, not {kind_of(d)}")
            arrays = {} if d is None else _arrays_of(d)
            # dispatch_async writes the cleaned ids before out is known
            arrays.pop("topk_ids", None)
            unknown = [name for name in arrays if name not in part.loan.fields]
            if unknown:
                raise EPValueError(
                    f"out of rank {part.rank} has {', '.join(unknown)}, which token_format="
                    f"{self.cfg.token_format!r} does not produce: leave it None"
                )
            outs.append(Out(part.loan, self.engine.machine, part.rank, arrays))
        names = [name for _, *names in self._named for name in names]
        read = [(what, view(a, what)) for what, a in zip(names, self._kept)]
        expect_apart([one for o in outs for one in o.named.values()], read)
        for part, o in zip(parts, outs):
            part.out = o if o.arrays else None
            for name, i in self._written.items():
                part.words[i] = o.address(name)

    def launch(self, call, fused=False):
        """Launch a call's kernels for every rank. Returns Dispatched, or a list over ranks; None for dispatch_async."""
        parts, factories = self.engine.parts, FUSED if fused else SPLIT[call]
        self.engine.start(call, [(part.plan[of], part.words) for of in factories for part in parts], fused)
        if call == "dispatch_async":
            return None
        made = []
        for part in parts:
            d = _new(Dispatched)
            d.round = part
            if part.out is None:
                d.output_tokens = part.loan.part(self._tokens)
            else:
                part.out.finish(self.engine)
                d.output_tokens = part.array("output_tokens")
            made.append(d)
        return made if self.engine.lists else made[0]


def _arrays_of(d):
    """{name: array} of a Dispatched given as out=. Read-only arrays of an earlier dispatch are made writable."""
    found = {n: a for n in ARRAYS if (a := getattr(d, n, None)) is not None}
    for name in READONLY if d.round is not None else ():
        array, loan = found.get(name), d.round.loan
        if isinstance(array, np.ndarray) and not array.flags.writeable and loan.holds(view(array, name)):
            found[name] = loan.array(name)
    return found
