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
from functools import partial
from sys import getrefcount

from epmoe import device
from epmoe.device.captures import CAPTURED
from epmoe.host.arrays import DeviceArray, lent_again
from epmoe.host.dispatch_phase import Sent
from epmoe.host.dispatched import ARRAYS, Dispatched
from epmoe.host.elsewhere import Elsewhere, Place
from epmoe.host.looks import UNSEEN, WAYS, look
from epmoe.host.results import Results
from epmoe.kernels import TokenArray

MAX_REMEMBERED = 1024       # calls of one kind
WRITTEN = ARRAYS[:-1]       # arrays of the caller that a dispatch may be written into; topk_ids are always lent
UNKNOWN = object()          # instead of a start's code: no launches are known
AT_ONCE = 2                 # results that are kept of each, and calls: these often take turns in two memories

_new = Dispatched.__new__
ALONE, = map(getrefcount, [object()])       # of an object that one list or dictionary holds


class _LastDispatch:
    """Memory that dispatches write, and its arrays: given again when nobody else refers to any of them."""

    __slots__ = ("address", "n", "of_rank", "made", "sent", "fields", "loan", "uses")

    def __init__(self, n, loan, dispatched, results=None):
        self.address, self.n, self.loan = loan.buffer.address, n, loan
        # Nobody asks again where the caller's arrays were
        self.of_rank = Sent(TokenArray(0, n), 0, 1.0, None, loan, results or Results(loan))
        self.made = self.of_rank.made
        self.sent, self.fields = [self.of_rank], dispatched(self.of_rank).__dict__

    def dispatched(self):
        """A Dispatched for the caller, at which nobody has looked."""
        d = _new(Dispatched)
        d.__dict__ = self.fields.copy()
        return d

    def serves(self, n):
        """Whether it is for so many tokens, and nobody else refers to it now."""
        made = self.made
        return (self.n == n and (getrefcount(self.of_rank), getrefcount(self.loan) - 2 * len(made)) == self.uses
                and (not made or all([one == ALONE for one in map(getrefcount, made.values())])))

    def count(self):
        """How often what is given again is referred to, besides by the arrays that were made of it."""
        return getrefcount(self.of_rank), getrefcount(self.loan) - 2 * len(self.made)


class _LastCombine:
    """The result of combines, whose memory is lent: the same."""

    __slots__ = ("address", "n", "reduced", "result", "loan", "uses")

    def __init__(self, n, reduced, result, loan):
        self.address, self.n, self.reduced, self.result, self.loan = loan.buffer.address, n, reduced, result, loan

    def serves(self, n, reduced):
        """Whether it is for so many tokens, reduced or not, and nobody else refers to it now."""
        return (self.n == n and self.reduced == reduced
                and (getrefcount(self.result), getrefcount(self.loan)) == self.uses)

    def count(self):
        """How often the result and its memory are referred to."""
        return getrefcount(self.result), getrefcount(self.loan)


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
        # what calls followed from -> {where their results lie: (how the launches start, Slot or None)}
        self._dispatches, self._combines = {}, {}
        self._latest_dispatches = self._latest_combines = ()    # [(key, starts)], sooner compared than looked up
        self._last_dispatches, self._last_combines = [], []
        self._elsewhere = Elsewhere(self._machine)
        self._made = {}             # (address of memory, tokens) -> result of a combine that is there
        self._accepted = set()      # what arrays of the caller are like that dispatches were written into
        self._n_freed = self._launches = None
        if self.applies:
            self._machine.again([])         # compiles what that needs, before anybody waits for this rank

    def dispatch(self, input_tokens, topk_ids, input_scale, out):
        """The open round as a _LastDispatch, its kernel launched."""
        if not self.applies or not self._rounds.comes("dispatch"):
            return None
        if self._machine.n_freed != self._n_freed:
            self._forget(self._machine.n_freed)
        key = _dispatch_key(input_tokens, topk_ids, input_scale, out)
        if key is UNSEEN:
            self._last_dispatches.clear()       # their memory can be lent again
            return None
        n = key[0][1][0]
        if out is not None:
            if _forms(key[-1]) not in self._accepted:
                return None
            last = self._dispatch_into(n, out)
        else:
            for last in self._last_dispatches:
                if last.serves(n):
                    break
            else:
                last = self._lend_dispatch(n)
        for known, starts in self._latest_dispatches:
            if known == key:
                break
        else:
            starts = _starts(self._dispatches, key)
            self._latest_dispatches = (key, starts), *self._latest_dispatches[:AT_ONCE - 1]
        start = starts.get(last.address)
        code = start[0]() if start is not None else self._begin(starts, last.address, *_of_dispatch(key, last.loan))
        if code:
            self._last_dispatches.clear()
            return self._not_started(code)
        self._rounds.advance("dispatch")
        if self._placing.placed:
            self._placing.let_go_of(self._inputs)
        self._kept_inputs = input_tokens, topk_ids
        return last

    def _lend_dispatch(self, n):
        """A _LastDispatch in other memory; others than of such calls are given back."""
        others = self._last_dispatches[:] = [one for one in self._last_dispatches
                                             if one.n == n][:AT_ONCE - 1]
        last = _LastDispatch(n, self._rank.dispatch_pool.lend(), self._dispatched)
        last.uses = last.count()
        self._last_dispatches[:] = last, *others
        return last

    def _dispatch_into(self, n, out):
        """A _LastDispatch, to be used once, whose results are arrays of the caller."""
        loan = self._rank.dispatch_pool.lend()
        results = Results(loan, self._machine, self._rank.rank, _arrays_of(out))
        return _LastDispatch(n, loan, self._dispatched, results)

    def remember_dispatch(self, sent, input_tokens, topk_ids, input_scale, out):
        """The general way has launched this call."""
        self._kept_inputs = None
        if self.applies and not self._rounds.capture:
            key, loan = _dispatch_key(input_tokens, topk_ids, input_scale, out), sent[0].loan
            if key is not UNSEEN:
                if out is not None:
                    self._accepted.add(_forms(key[-1]))
                self._remember(_starts(self._dispatches, key), loan.buffer.address, *_of_dispatch(key, loan))

    def combine(self, sent, expert_outputs, d, router_weights, epilogue, arguments, out):
        """The combined output, its kernel launched. arguments: whether functions are given any."""
        if not self.applies or arguments or not self._rounds.comes("combine"):
            return None
        if self._machine.n_freed != self._n_freed:
            self._forget(self._machine.n_freed)
        of_rank = sent[0]
        key = _combine_key(of_rank, expert_outputs, d, router_weights, epilogue, out)
        if key is UNSEEN or key[0][1][0] != self._capacity:
            self._last_combines.clear()
            return None
        _, _, n, weights, _, to = key
        loan = last = None
        if to is None:
            reduced = weights is not None
            for last in self._last_combines:
                if last.serves(n, reduced):
                    break
            else:
                last = self._lend_combine(n, reduced)
            to, loan, out = last.address, last.loan, last.result
        else:
            to = to[0]
        for known, starts in self._latest_combines:
            if known == key:
                break
        else:
            starts = _starts(self._combines, key)
            self._latest_combines = (key, starts), *self._latest_combines[:AT_ONCE - 1]
        start = starts.get(to)
        code = start[0]() if start is not None else self._begin(starts, to, *_of_combine(key, of_rank.loan, loan))
        if code:
            self._last_combines.clear()
            return self._not_started(code)
        self._rounds.advance("combine")
        if self._placing.placed:
            self._placing.let_go_of(self._outputs)
        self._kept_outputs = (router_weights, None if of_rank.loan.holds_address(key[0][0]) else expert_outputs,
                              of_rank.results.array("src_info") if of_rank.results.given else None)
        return out

    def _lend_combine(self, n, reduced):
        """A _LastCombine in other memory."""
        kept = self._last_combines
        kept[:] = [one for one in kept if one.n == n and one.reduced == reduced][:AT_ONCE - 1]
        loan = (self._rank.reduced_pool if reduced else self._rank.unreduced_pool).lend()
        known = loan.buffer.address, n
        made = self._made.get(known)
        if made is None:
            if len(self._made) >= MAX_REMEMBERED:
                self._made.clear()
            made = self._made[known] = lent_again([loan.array("output_tokens", n)], None, None)
        last = _LastCombine(n, reduced, loan.again(made)[0], loan)
        del loan
        last.uses = last.count()
        kept.insert(0, last)
        return last

    def remember_combine(self, sent, reduction, expert_outputs, d, router_weights, epilogue, arguments, out):
        """The general way has launched this call."""
        self._kept_outputs = None
        if not self.applies or arguments or self._rounds.capture:
            return
        key, lent = _combine_key(sent[0], expert_outputs, d, router_weights, epilogue, out), sent[0].loan
        # With fewer rows than capacity the verdict follows from the round's row count as well; what dispatch has
        # written has memory for all rows, whosever it is.
        if key is UNSEEN or key[0][1][0] != self._capacity or not all(
                [lent.holds_address(at) or at == sent[0].results.address("src_info") for at in key[1]]):
            return
        loan, to = (reduction[0].results.loan, None) if out is None else (None, key[-1][0])
        self._remember(_starts(self._combines, key), loan.buffer.address if to is None else to,
                       *_of_combine(key, lent, loan))

    def close(self):
        """Give back what is kept of the last calls; nothing is remembered any more."""
        self._forget(None)
        self._elsewhere.close()
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
        for known in self._dispatches, self._combines, self._last_dispatches, self._last_combines, self._made:
            known.clear()
        self._latest_dispatches = self._latest_combines = ()
        self._elsewhere.forget()

    def _remember(self, starts, to, form, places):
        starts[to] = self._machine.again(self._launches), None
        self._elsewhere.learn(form, places, self._launches)

    def _begin(self, starts, to, form, places):
        """Start launches for arrays that lie elsewhere than any before: 0, or as what again() of a machine gives."""
        slot = self._elsewhere.slot(form, places)
        if slot is None:
            return UNKNOWN
        code = slot.begin()
        if not code:
            starts[to], slot.owner = (slot.start, slot), (starts, to)
        return code

    def _not_started(self, code):
        """None for a call that is captured, or not known; or the error that the driver's code means."""
        if code != UNKNOWN and code != CAPTURED:
            try:
                self._machine.refused(code)
            except Exception as error:
                self._rounds.fail(error)
                raise


def _starts(calls, key):
    """How the launches of a call start, by where its results lie."""
    starts = calls.get(key)
    if starts is None:
        if len(calls) >= MAX_REMEMBERED:
            calls.clear()
        starts = calls[key] = {}
    return starts


def _of_dispatch(key, loan):
    """(the form of a dispatch, its Places)."""
    x, ids, scale, *to = key
    to = to[0] if to else ()
    places = [Place(one[0]) for one in (x, ids, *to)]
    return ("dispatch", x[1:], ids[1:], scale, _forms(to)), (*places, _loaned(loan))


def _of_combine(key, sent_loan, loan):
    """(the form of a combine, its Places); loan: of the result, None if it goes into an array of the caller."""
    y, where, n, weights, epilogue, to = key
    seen = [one for one in (weights, to) if type(one) is tuple]
    form = "combine", y[1:], len(where), n, weights and _form(weights), epilogue, to and to[1:]
    places = [Place(y[0]), *(map(Place, where) if len(where) > 1 else [_loaned(sent_loan)]),
              *(Place(one[0]) for one in seen)]
    return form, (*places, _loaned(loan)) if loan is not None else tuple(places)


def _form(weights):
    return weights[1:] if type(weights) is tuple else weights


def _forms(to):
    return tuple([one[1:] for one in to])


def _loaned(loan):
    return Place(loan.buffer.address, loan.buffer.nbytes)


def _dispatch_key(input_tokens, topk_ids, input_scale, out):
    try:        # types that were seen
        x, ids = WAYS[type(input_tokens)](input_tokens), WAYS[type(topk_ids)](topk_ids)
    except KeyError:
        x, ids = look(input_tokens), look(topk_ids)
    if x is UNSEEN or ids is UNSEEN or type(input_scale) is not float:
        return UNSEEN
    if out is None:
        return x, ids, input_scale
    to = [(look(array), name) for name, array in _arrays_of(out).items()]
    if any([seen is UNSEEN for seen, _ in to]):
        return UNSEEN
    return x, ids, input_scale, tuple([(*seen, name) for seen, name in to])


def _arrays_of(out):
    """{name: array} of a Dispatched that a dispatch is to be written into."""
    given = {name: getattr(out, name, None) for name in WRITTEN}
    return {name: array for name, array in given.items() if array is not None}


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
        if type(array) is DeviceArray and array.strides is None:
            places += (array.address,)
        elif sent.results.given and array is sent.results.array(name) and look(array) is not UNSEEN:
            places += (sent.results.address(name),)
        else:
            return UNSEEN
    usual = loan.address("src_info"), loan.address("topk_ids")
    return (loan.buffer.address,) if places == usual else places
