"""Calls that were made before with the same arguments: the fast way through dispatch and combine on a GPU.

In a steady state arrays come back at the addresses, and with the shapes and types, that an earlier call had. Whether
they are acceptable, and what is launched with which parameters, follows from these alone, since of device arrays
nothing else is looked at. So the launches of a call that took the general way are remembered with what they followed
from, and start again when all of that is the same: no check is left out, its verdict is known. Where only addresses
differ, launches are made of earlier ones (elsewhere.py).

It applies to dispatch and combine where a process has one rank, on a GPU, with arrays in device memory. The general
way is for everything else: host arrays, whose contents are checked; expert outputs with as many rows as were received,
a number that has to be asked for; arguments of functions; the first calls of a shape, type or option; calls that are
captured into a CUDA graph; and virtual ranks, whose kernels need streams of their own.

A call has the result of one of the last two again, in the very same arrays, if it is of that form and nobody else
refers to them nor to their memory: to lend the memory anew and to make arrays of it takes as long as all the rest.
"""

import contextlib

from epmoe import device
from epmoe.device.captures import CAPTURED, GONE, HELD
from epmoe.host.arrays import DeviceArray, lent_again, view
from epmoe.host.call_keys import (
    arrays_of,
    combine_key,
    dispatch_key,
    forms_of,
    of_combine,
    of_dispatch,
)
from epmoe.host.dispatched import Dispatched
from epmoe.host.elsewhere import Elsewhere
from epmoe.host.last_results import LastCombine, LastDispatch
from epmoe.host.looks import UNSEEN, WAYS, look
from epmoe.host.overlaps import expect_apart
from epmoe.host.references import are_counted
from epmoe.host.results import Results
from epmoe.host.starts import Start

MAX_REMEMBERED = 1024  # calls of one kind
UNKNOWN = object()  # instead of a start's code: no launches are known
AT_ONCE = 2  # results that are kept of each, and calls: these often take turns in two memories


class SteadyCalls:
    """The remembered calls of one ExpertParallel. dispatch and combine give None for what takes the general way.

    The general way is to be run inside watching(), and remember_dispatch or remember_combine called at its end. It is
    for calls out of order, too.
    """

    def __init__(self, engine, capacity, applies):
        self.applies = applies and not device.SIM and not engine.world.lists and are_counted()
        self._engine, self._rounds, self._machine, self._capacity = (
            engine,
            engine.rounds,
            engine.machine,
            capacity,
        )
        self._rank, self._placing = engine.ranks[0], engine.placing
        self._who = engine.cfg, self._rank.rank, engine.check
        self._inputs, self._outputs = (
            tuple((self._rank.rank, name) for name in names)
            for names in (("input_tokens", "topk_ids"), ("router_weights", "expert_outputs"))
        )
        self._kept_inputs = self._kept_outputs = (
            None  # device arrays of the caller, kept until the next such call
        )
        # what calls followed from -> {where their results lie: Start}
        self._dispatches, self._combines = {}, {}
        self._latest_dispatches = (
            self._latest_combines
        ) = ()  # [(key, starts)], sooner compared than looked up
        self._last_dispatches, self._last_combines = [], []
        self._elsewhere = Elsewhere(self._machine)
        self._made = {}  # (address of memory, tokens) -> result of a combine that is there
        self._accepted = set()  # calls with out=, whose arrays are known to share no memory
        self._launches = None
        if self.applies:
            self._forget()  # compiles what starts need, before anybody waits for this rank

    def dispatch(self, input_tokens, topk_ids, input_scale, out):
        """The open round as a LastDispatch, its kernel launched."""
        try:  # what look() says, sooner
            x = (
                input_tokens.seen
                if type(input_tokens) is DeviceArray
                else WAYS[type(input_tokens)](input_tokens)
            )
            ids = topk_ids.seen if type(topk_ids) is DeviceArray else WAYS[type(topk_ids)](topk_ids)
        except KeyError:
            x, ids = look(input_tokens), look(topk_ids)
        if out is None and type(input_scale) is float:
            rounds, key = self._rounds, (x, ids, input_scale)
            for last in self._last_dispatches:
                if last.key == key:
                    if rounds.state != "idle":
                        return None
                    code = last.start()
                    if code == 0:
                        rounds.state, rounds.opened_in = "dispatched", 0
                        if self._placing.placed:
                            self._placing.let_go_of(self._inputs)
                        self._kept_inputs = input_tokens, topk_ids
                        return last
                    if code == GONE:
                        break
                    if code != HELD:
                        return self._not_started(code)
            last = None  # its memory may be needed
        return self._dispatch(input_tokens, topk_ids, x, ids, input_scale, out)

    def _dispatch(self, input_tokens, topk_ids, x, ids, input_scale, out):
        """The same where it is none of the last calls, or their results are held, or something has changed."""
        if not self.applies or not self._rounds.comes("dispatch"):
            return None
        if self._machine.n_changes != self._n_changes:
            self._forget()
        key = dispatch_key(x, ids, input_scale, out)
        if key is UNSEEN:
            self._last_dispatches.clear()  # their memory can be lent again
            return None
        n, code = key[0][1][0], HELD
        for known, starts in self._latest_dispatches:
            if known == key:
                break
        else:
            starts = _starts(self._dispatches, key)
            self._latest_dispatches = (key, starts), *self._latest_dispatches[: AT_ONCE - 1]
        if out is None:
            for last in self._last_dispatches:
                if last.n == n:
                    start = starts.get(last.address)
                    code = (
                        self._look(last.held)
                        if start is None
                        else start.again()
                        if start.held == last.held
                        else start.begin(last.held)
                    )
                    if code == HELD and last.count_arrays():
                        code = self._look(last.held) if start is None else start.begin(last.held)
                    if code != HELD:
                        break
        elif key not in self._accepted:
            if forms_of(key[-1]) not in self._accepted:
                return None
            self._expect_apart(arrays_of(out), input_tokens=input_tokens, topk_ids=topk_ids)
            self._accept(key)
        if code == HELD:
            last = self._lend_dispatch(n) if out is None else self._dispatch_into(n, out)
            start = starts.get(last.address)
            code = 0 if start is None else start.begin(0)
        if code == 0 and start is None:
            code = self._begin(starts, last.address, *of_dispatch(key, last.loan))
        if code:
            self._last_dispatches.clear()
            return self._not_started(code)
        last.key = None
        if start is not None and start.again is not None:
            last.key, last.start = key, start.again
        self._rounds.advance("dispatch")
        if self._placing.placed:
            self._placing.let_go_of(self._inputs)
        self._kept_inputs = input_tokens, topk_ids
        return last

    def _lend_dispatch(self, n):
        """A LastDispatch in other memory; others than of such calls are given back."""
        others = self._last_dispatches[:] = [one for one in self._last_dispatches if one.n == n][
            : AT_ONCE - 1
        ]
        last = LastDispatch(self._who, n, self._rank.dispatch_pool.lend())
        last.count()
        self._last_dispatches[:] = last, *others
        return last

    def _dispatch_into(self, n, out):
        """A LastDispatch, to be used once, whose results are arrays of the caller."""
        loan = self._rank.dispatch_pool.lend()
        results = Results(loan, self._machine, self._rank.rank, arrays_of(out))
        return LastDispatch(self._who, n, loan, results)

    def remember_dispatch(self, sent, input_tokens, topk_ids, input_scale, out):
        """The general way has launched this call."""
        self._kept_inputs = None
        if self.applies and not self._rounds.capture:
            key, loan = (
                dispatch_key(look(input_tokens), look(topk_ids), input_scale, out),
                sent[0].loan,
            )
            if key is not UNSEEN:
                if out is not None:
                    self._accept(key)
                    self._accept(forms_of(key[-1]))
                self._remember(
                    _starts(self._dispatches, key), loan.buffer.address, *of_dispatch(key, loan)
                )

    def combine(self, sent, expert_outputs, d, router_weights, epilogue, arguments, out):
        """The combined output, its kernel launched. arguments: whether functions are given any.

        Looked up are calls of which a function is an argument, and those whose src_info or topk_ids somebody looked at.
        """
        try:
            y = (
                expert_outputs.seen
                if type(expert_outputs) is DeviceArray
                else WAYS[type(expert_outputs)](expert_outputs)
            )
            weights = (
                router_weights.seen
                if type(router_weights) is DeviceArray
                else WAYS[type(router_weights)](router_weights)
            )
        except KeyError:
            y, weights = look(expert_outputs), look(router_weights)
        rounds = self._rounds
        if rounds.state == "dispatched" and type(d) is Dispatched and out is None and not arguments:
            (of_rank,) = sent
            key = y, weights, epilogue, of_rank.place
            for last in self._last_combines:
                if (
                    last.key == key
                    and d.round is of_rank
                    and (weights is not UNSEEN or router_weights is None)
                    and ("src_info" not in (seen := d.__dict__))
                    and "topk_ids" not in seen
                ):
                    code = last.start()
                    if code == 0:
                        rounds.state = "idle"
                        if self._placing.placed:
                            self._placing.let_go_of(self._outputs)
                        self._kept_outputs = router_weights, expert_outputs if last.keeps else None
                        return last.result
                    if code == GONE:
                        break
                    if code != HELD:
                        return self._not_started(code)
            last = of_rank = None  # memory may be needed
        return self._combine(
            sent, expert_outputs, y, d, router_weights, weights, epilogue, arguments, out
        )

    def _combine(
        self, sent, expert_outputs, y, d, router_weights, weights, epilogue, arguments, out
    ):
        """The same where it is none of the last calls, or their results are held, or something has changed."""
        if not self.applies or arguments or not self._rounds.comes("combine"):
            return None
        of_rank = sent[0]
        key = combine_key(of_rank, y, d, weights, router_weights, epilogue, out)
        if key is UNSEEN or y[1][0] != self._capacity:
            self._last_combines.clear()
            return None
        if out is not None and key not in self._accepted:
            read = (
                {} if weights is None or callable(weights) else {"router_weights": router_weights}
            )
            self._expect_apart(
                {"output_tokens": out},
                expert_outputs=expert_outputs,
                src_info=d.src_info,
                topk_ids=d.topk_ids,
                **read,
            )
            self._accept(key)
        for known, starts in self._latest_combines:
            if known == key:
                break
        else:
            starts = _starts(self._combines, key)
            self._latest_combines = (key, starts), *self._latest_combines[: AT_ONCE - 1]
        _, _, n, weights, _, to = key
        last, code, reduced = None, HELD, weights is not None
        if out is None:
            for last in self._last_combines:
                if last.n == n and last.reduced == reduced:
                    start = starts.get(last.address)
                    code = (
                        self._look(last.held)
                        if start is None
                        else start.again()
                        if start.held == last.held
                        else start.begin(last.held)
                    )
                    if code != HELD:
                        break
        if code == HELD:
            last = self._lend_combine(n, reduced) if out is None else None
            start = starts.get(to[0] if last is None else last.address)
            code = 0 if start is None else start.begin(0)
        loan, at = (None, to[0]) if last is None else (last.loan, last.address)
        if code == 0 and start is None:
            code = self._begin(starts, at, *of_combine(key, of_rank.loan, loan))
        if code:
            self._last_combines.clear()
            return self._not_started(code)
        keeps = not of_rank.loan.holds_address(y[0])
        if last is not None:
            out, last.key = last.result, None
            if (
                start is not None
                and start.again is not None
                and of_rank.place is not None
                and not callable(weights)
            ):
                last.key, last.start, last.keeps = (
                    (y, weights, epilogue, of_rank.place),
                    start.again,
                    keeps,
                )
        self._rounds.advance("combine")
        if self._placing.placed:
            self._placing.let_go_of(self._outputs)
        self._kept_outputs = (
            router_weights,
            expert_outputs if keeps else None,
            of_rank.results.array("src_info") if of_rank.results.given else None,
        )
        return out

    def _lend_combine(self, n, reduced):
        """A LastCombine in other memory."""
        kept = self._last_combines
        kept[:] = [one for one in kept if one.n == n and one.reduced == reduced][: AT_ONCE - 1]
        loan = (self._rank.reduced_pool if reduced else self._rank.unreduced_pool).lend()
        known = loan.buffer.address, n
        made = self._made.get(known)
        if made is None:
            if len(self._made) >= MAX_REMEMBERED:
                self._made.clear()
            made = self._made[known] = lent_again([loan.array("output_tokens", n)], None, None)
        last = LastCombine(n, reduced, loan.again(made)[0], loan)
        del loan
        last.count()
        kept.insert(0, last)
        return last

    def remember_combine(
        self, sent, reduction, expert_outputs, d, router_weights, epilogue, arguments, out
    ):
        """The general way has launched this call."""
        self._kept_outputs = None
        if not self.applies or arguments or self._rounds.capture:
            return
        lent = sent[0].loan
        key = combine_key(
            sent[0], look(expert_outputs), d, look(router_weights), router_weights, epilogue, out
        )
        # With fewer rows than capacity the verdict follows from the round's row count as well; what dispatch has
        # written has memory for all rows, whosever it is.
        if (
            key is UNSEEN
            or key[0][1][0] != self._capacity
            or not all(
                [
                    lent.holds_address(at) or at == sent[0].results.address("src_info")
                    for at in key[1]
                ]
            )
        ):
            return
        loan, to = (reduction[0].results.loan, None) if out is None else (None, key[-1][0])
        self._remember(
            _starts(self._combines, key),
            loan.buffer.address if to is None else to,
            *of_combine(key, lent, loan),
        )

    def _expect_apart(self, outs, **read):
        expect_apart(
            [(f"out: {name} of rank {self._rank.rank}", view(a, name)) for name, a in outs.items()],
            [(f"{name} of rank {self._rank.rank}", view(a, name)) for name, a in read.items()],
        )

    def _accept(self, key):
        if len(self._accepted) >= MAX_REMEMBERED:
            self._accepted.clear()
        self._accepted.add(key)

    def close(self):
        """Give back what is kept of the last calls; nothing is remembered any more."""
        self._clear()
        self._elsewhere.close()
        self._kept_inputs = self._kept_outputs = None
        self.applies = False

    @contextlib.contextmanager
    def watching(self):
        """Context of the general way: its launches are recorded."""
        if not self.applies:
            yield
            return
        if self._machine.n_changes != self._n_changes:
            self._forget()
        with self._machine.recording() as self._launches:
            yield

    def _forget(self):
        """What was remembered may name memory that is gone."""
        self._n_changes, self._look = self._machine.n_changes, self._machine.again([])
        self._clear()

    def _clear(self):
        for known in (
            self._dispatches,
            self._combines,
            self._last_dispatches,
            self._last_combines,
            self._made,
        ):
            known.clear()
        self._latest_dispatches = self._latest_combines = ()
        self._elsewhere.forget()

    def _remember(self, starts, to, form, places):
        if self._machine.n_changes != self._n_changes:  # meanwhile
            return
        starts[to] = Start(self._machine, self._machine.again(self._launches))
        self._elsewhere.learn(form, places, self._launches)

    def _begin(self, starts, to, form, places):
        """Start launches for arrays that lie elsewhere than any before: 0, or as what again() of a machine gives."""
        if self._machine.n_changes != self._n_changes:
            return GONE
        slot = self._elsewhere.slot(form, places)
        if slot is None:
            return UNKNOWN
        code = slot.begin()
        if not code:
            starts[to], slot.owner = Start(self._machine, slot.start, slot), (starts, to)
        return code

    def _not_started(self, code):
        """None for a call that is captured, or not known; or the error that the driver's code means."""
        if code == GONE:
            self._forget()
        elif code != UNKNOWN and code != CAPTURED:
            self._machine.refused(code)


def _starts(calls, key):
    """How the launches of a call start, by where its results lie."""
    starts = calls.get(key)
    if starts is None:
        if len(calls) >= MAX_REMEMBERED:
            calls.clear()
        starts = calls[key] = {}
    return starts
