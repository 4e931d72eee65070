"""Calls that were made before with the same arguments: the fast way through dispatch and combine on a GPU.

In a steady state arrays come back at the addresses, and with the shapes and types, that an earlier call had. Whether
they are acceptable, and what is launched with which parameters, follows from these alone, since of device arrays
nothing else is looked at. So the launches of a call that took the general way are remembered with what they followed
from, and start again when all of that is the same: no check is left out, its verdict is known.

It applies to dispatch and combine where a process has one rank, on a GPU, with arrays in device memory. The general
way is for everything else: host arrays, whose contents are checked; expert outputs with as many rows as were received,
a number that has to be asked for; arguments of functions; out= of dispatch; the first call with any new argument; calls
that are captured into a CUDA graph; and virtual ranks, whose kernels need streams of their own.

A call like one of the last two has that one's result again, in the very same arrays, when nobody else refers to them
nor to their memory: to lend the memory anew and to make arrays of it takes as long as all the rest.
"""

import contextlib
from functools import partial
from sys import getrefcount

from epmoe import device
from epmoe.device.captures import CAPTURED
from epmoe.host.arrays import DeviceArray, lent_again
from epmoe.host.dispatch_phase import Sent
from epmoe.host.dispatched import Dispatched
from epmoe.host.looks import UNSEEN, look
from epmoe.host.results import Results

MAX_REMEMBERED = 1024       # calls of one kind
AT_ONCE = 2                 # results that are kept of each: calls often take turns in two memories

_new = Dispatched.__new__
ALONE, = map(getrefcount, [object()])       # of an object that one list or dictionary holds


class _LastDispatch:
    """One of the last dispatches: a call like it has its arrays again, when nobody else refers to any of them."""

    __slots__ = ("key", "start", "sent", "of_rank", "fields", "loan", "uses")

    def __init__(self, key, start, tokens, ids, loan, dispatched):
        self.key, self.start, self.loan = key, start, loan
        self.of_rank = Sent(tokens, ids, key[-1], None, loan, Results(loan))
        self.sent, self.fields = [self.of_rank], dispatched(self.of_rank).__dict__

    def dispatched(self):
        """A Dispatched for the caller, at which nobody has looked."""
        d = _new(Dispatched)
        d.__dict__ = self.fields.copy()
        return d

    def count(self):
        """How often what is given again is referred to, besides by the arrays that were made of it."""
        return getrefcount(self.of_rank), getrefcount(self.loan) - 2 * len(self.of_rank.made)

    def is_free(self):
        """Whether nobody else refers to it now."""
        if self.count() != self.uses:
            return False
        made = self.of_rank.made
        return not made or all([n == ALONE for n in map(getrefcount, made.values())])


class _LastCombine:
    """One of the last combines, whose result was lent: the same."""

    __slots__ = ("key", "start", "is_lent", "result", "loan", "uses")

    def __init__(self, key, start, is_lent, result, loan):
        self.key, self.start, self.is_lent, self.result, self.loan = key, start, is_lent, result, loan

    def count(self):
        """How often the result and its memory are referred to."""
        return getrefcount(self.result), getrefcount(self.loan)

    def is_free(self):
        """Whether nobody else refers to it now."""
        return self.count() == self.uses


class SteadyCalls:
    """The remembered calls of one ExpertParallel. dispatch and combine give None for what takes the general way.

    dispatched: function (Sent, rank) -> Dispatched. The general way is to be run inside watching(), and
    remember_dispatch or remember_combine called at its end. It is for calls out of order, too.
    """

    def __init__(self, engine, capacity, dispatched, applies):
        self.applies = applies and not device.SIM and not engine.world.lists
        self._engine, self._rounds, self._machine, self._capacity = engine, engine.rounds, engine.machine, capacity
        self._rank, self._placing = engine.ranks[0], engine.placing
        self._dispatched = partial(dispatched, rank=self._rank.rank)
        self._inputs, self._outputs = (tuple((self._rank.rank, name) for name in names) for names in (
            ("input_tokens", "topk_ids"), ("router_weights", "expert_outputs")))
        self._kept_inputs = self._kept_outputs = None       # device arrays of the caller, kept until the next such call
        self._dispatches, self._combines = {}, {}       # what a call followed from -> how its launches start
        self._last_dispatches, self._last_combines = [], []
        self._n_freed = self._launches = None
        if self.applies:
            self._machine.again([])         # compiles what that needs, before anybody waits for this rank

    def dispatch(self, input_tokens, topk_ids, input_scale, out):
        """The open round as a _LastDispatch, its kernel launched."""
        if not self.applies or out is not None or not self._rounds.comes("dispatch"):
            return None
        key = _dispatch_key(input_tokens, topk_ids, input_scale)
        if self._machine.n_freed != self._n_freed:
            self._forget(self._machine.n_freed)
        for last in self._last_dispatches:
            if last.key == key and last.is_free():
                break
        else:
            last = self._lend_dispatch(key)
            if last is None:
                return None
        if not self._started("dispatch", last.start):
            return None
        if self._placing.placed:
            self._placing.let_go_of(self._inputs)
        self._kept_inputs = input_tokens, topk_ids
        return last

    def _lend_dispatch(self, key):
        """A _LastDispatch in other memory, if launches are known for that; others than of such calls are given back."""
        others = self._last_dispatches[:] = [one for one in self._last_dispatches if one.key == key][:AT_ONCE - 1]
        if key is UNSEEN:
            return None
        loan = self._rank.dispatch_pool.lend()      # where the results go is a part of what is launched
        known = self._dispatches.get((key, loan.buffer.address))
        if known is None:
            return None
        last = _LastDispatch(key, *known, loan, self._dispatched)
        del loan
        last.uses = last.count()
        self._last_dispatches[:] = last, *others
        return last

    def remember_dispatch(self, sent, input_tokens, topk_ids, input_scale, out):
        """The general way has launched this call."""
        self._kept_inputs = None
        if self.applies and out is None and not self._rounds.capture:
            key = _dispatch_key(input_tokens, topk_ids, input_scale)
            if key is not UNSEEN:
                s = sent[0]
                self._remember(self._dispatches, (key, s.loan.buffer.address), s.tokens, s.topk_ids)

    def combine(self, sent, expert_outputs, d, router_weights, epilogue, arguments, out):
        """The combined output, its kernel launched. arguments: whether functions are given any."""
        if not self.applies or arguments or not self._rounds.comes("combine"):
            return None
        key = _combine_key(sent[0], expert_outputs, d, router_weights, epilogue, out)
        if self._machine.n_freed != self._n_freed:
            self._forget(self._machine.n_freed)
        for last in self._last_combines:
            if last.key == key and last.is_free():
                break
        else:
            last = self._lend_combine(key, router_weights, out)
            if last is None:
                return None
        if not self._started("combine", last.start):
            return None
        if self._placing.placed:
            self._placing.let_go_of(self._outputs)
        self._kept_outputs = router_weights, None if last.is_lent else expert_outputs
        return last.result

    def _lend_combine(self, key, router_weights, out):
        """A _LastCombine with other memory, or the caller's, if launches are known for that."""
        if key is UNSEEN or len(self._last_combines) == AT_ONCE:
            self._last_combines.clear()         # their memory can be lent again
        if key is UNSEEN:
            return None
        loan = None
        if out is None:
            loan = (self._rank.unreduced_pool if router_weights is None else self._rank.reduced_pool).lend()
        known = self._combines.get((key, loan and loan.buffer.address))
        if known is None:
            return None
        start, is_lent, result = known
        if loan is None:
            return _LastCombine(key, start, is_lent, out, None)
        last = _LastCombine(key, start, is_lent, loan.again(result)[0], loan)
        del loan
        last.uses = last.count()
        self._last_combines.append(last)
        return last

    def remember_combine(self, sent, reduction, expert_outputs, d, router_weights, epilogue, arguments, out):
        """The general way has launched this call."""
        self._kept_outputs = None
        if not self.applies or arguments or self._rounds.capture:
            return
        key = _combine_key(sent[0], expert_outputs, d, router_weights, epilogue, out)
        lent = sent[0].loan.holds_address
        # With fewer rows than capacity the verdict follows from the round's row count as well.
        if key is UNSEEN or key[0][1][0] != self._capacity or not all(map(lent, key[1])):
            return
        to = result = None
        if out is None:
            loan = reduction[0].results.loan
            to, result = loan.buffer.address, lent_again([loan.array("output_tokens", sent[0].tokens.n)], None, None)
        self._remember(self._combines, (key, to), lent(key[0][0]), result)

    def close(self):
        """Give back what is kept of the last calls; nothing is remembered any more."""
        self._forget(None)
        self._kept_inputs = self._kept_outputs = None
        self.applies = False

    @contextlib.contextmanager
    def watching(self):
        """Context of the general way: its launches are recorded."""
        if not self.applies:
            yield
            return
        with self._machine.recording() as self._launches:
            yield

    def _forget(self, n_freed):
        """What was remembered may name memory that is gone. n_freed: of the machine."""
        self._n_freed = n_freed
        for known in self._dispatches, self._combines, self._last_dispatches, self._last_combines:
            known.clear()

    def _remember(self, calls, key, *what):
        if len(calls) >= MAX_REMEMBERED:
            calls.clear()
        calls[key] = (self._machine.again(self._launches), *what)

    def _started(self, call, start):
        """Whether the launches were started: not if the call is captured."""
        code = start()
        if code == CAPTURED:
            return False
        if code:
            try:
                self._machine.refused(code)
            except Exception as error:
                self._rounds.fail(error)
                raise
        self._rounds.advance(call)
        return True


def _dispatch_key(input_tokens, topk_ids, input_scale):
    x, ids = look(input_tokens), look(topk_ids)
    if x is UNSEEN or ids is UNSEEN or type(input_scale) is not float:
        return UNSEEN
    return x, ids, input_scale


def _combine_key(sent, expert_outputs, d, router_weights, epilogue, out):
    if type(d) is not Dispatched or d.round is not sent:
        return UNSEEN
    weights = router_weights
    if weights is not None and not callable(weights):
        weights = look(weights)
        if weights is UNSEEN:
            return UNSEEN
    to = None
    if out is not None:
        to = look(out)
        if to is UNSEEN:
            return UNSEEN
    y, where = look(expert_outputs), _places(sent, d.__dict__)
    if y is UNSEEN or where is UNSEEN:
        return UNSEEN
    return y, where, sent.tokens.n, weights, epilogue, to


def _places(sent, seen):
    """Where src_info and topk_ids of a Dispatched lie: the address of its loan if where they always do, else both."""
    loan = sent.loan
    if "src_info" not in seen and "topk_ids" not in seen and not sent.results.given:
        return (loan.buffer.address,)       # arrays that nobody has looked at so far are not made for this
    src_info, topk_ids, places = seen.get("src_info"), seen.get("topk_ids"), ()
    for name, array in (("src_info", src_info), ("topk_ids", topk_ids)):
        if array is None:
            array = sent.array(name)
        if type(array) is not DeviceArray or array.strides is not None:
            return UNSEEN
        places += (array.address,)
    usual = loan.address("src_info"), loan.address("topk_ids")
    return (loan.buffer.address,) if places == usual else places
