"""Calls of a Buffer that were made before with the same arguments: the fast way on a GPU, one rank a process.

In a steady state arrays come at addresses, and with shapes and types, that an earlier call had, and results get memory
that an earlier call's results had. What is checked and what is launched follows from these alone, as in
epmoe/host/steady_calls.py, so the launches of a call that took the general way start again. Everything else takes the
general way: host arrays, lists over ranks, expert-major dispatches that wait for the number of rows, results that found no
room in the heap, calls that are captured into a CUDA graph.
"""

from contextlib import contextmanager
from sys import getrefcount

from epmoe import device
from epmoe.device.captures import CAPTURED, is_captured
from epmoe.fused_a2a.heap import place_of
from epmoe.host.arrays import DeviceArray
from epmoe.host.looks import UNSEEN, WAYS, look

MAX_REMEMBERED = 1024
AT_ONCE = 2             # calls of one kind whose results are kept
SMALL = ("combine", "hybrid combine")   # kinds whose results are no larger than the rank's own tokens
NOTHING, GENERAL = (None,), (None, None)


def _look_at_pair(a):
    """What decides how a pair of arrays is treated; its addresses first."""
    seen = [look(one) for one in a]
    return UNSEEN if UNSEEN in seen else (tuple([at[0] for at in seen]), *seen)


# By type, of what was seen: as WAYS, but for None and pairs
_WAYS = {type(None): lambda _: NOTHING, tuple: _look_at_pair, list: _look_at_pair}


def _new_way(a):
    look(a)
    way = _WAYS[type(a)] = WAYS[type(a)]
    return way


class _Known:
    """One call: what was seen of its arrays, the memory that it lends, how results are made of that, starts by it."""

    def __init__(self, seen, memory, results):
        self.seen, self.memory, self.results, self.starts, self.counts = seen, memory, results, {}, None


class _Last:
    """One of the last calls: how it starts and its results, which it gives again when nobody else looks at them.

    counts: how often the objects of its results are referred to then, which is the same for every call that is known.
    """

    __slots__ = ("numbers", "seen", "start", "results", "loans", "objects", "counts")

    def __init__(self, numbers, seen, start, results, loans):
        self.numbers, self.seen, self.start, self.results, self.loans = numbers, seen, start, results, loans
        self.objects = None

    def count(self):
        """How often each object of the results, through which somebody could keep or see them, is referred to."""
        if self.objects is None:
            self.objects = [*_objects(self.results), *self.loans]
        return list(map(getrefcount, self.objects))


def _objects(results):
    """The results and all that is in them: lists and tuples, arrays, and a handle with the arrays that it holds."""
    found = [results]
    for one in found:
        kind = type(one)
        if kind is list or kind is tuple:
            found.extend(one)
        elif kind is not DeviceArray:
            found.extend([held for held in getattr(one, "__dict__", {}).values() if type(held) is DeviceArray])
    return [one for one in found if one is not None]


class SteadyCalls:
    """The remembered calls of one Buffer.

    Of each kind the last results of calls on the same arrays (small ones: of any) are kept, since two of them are often
    in use at once, or in turn; a call like theirs has them again, the very same objects, when nobody else holds any of
    them. A call that is new gives them all back first.
    """

    def __init__(self, buffer):
        self.applies = not device.SIM and not buffer.world.lists
        self._buffer, self._machine = buffer, buffer.machine
        self._known, self._last, self._kept = {}, {}, None
        self._n_freed = self._n_changes = None
        if self.applies:
            self._machine.again([])         # compiles what that needs, before anybody waits for this rank

    def again(self, kind, arrays, *numbers):
        """(results of a call that is known, its kernels launched, or None; what a new call is known by, or None).

        arrays: None, arrays, pairs of arrays; they are kept till the next call. numbers: what else it depends on.
        Every call that can be captured begins here, so here the machine learns of captures.
        """
        if not self.applies:
            return GENERAL
        seen = [(_WAYS.get(type(a)) or _new_way(a))(a) for a in arrays]
        buffer = self._buffer
        if self._n_freed != self._machine.n_freed or self._n_changes != buffer.n_changes:
            self._forget()
        for last in self._last.get(kind, ()):
            if last.seen == seen and last.numbers == numbers and last.count() == last.counts:
                break
        else:
            last, key = self._otherwise(kind, seen, numbers)
            if last is None:
                return None, key
        if buffer.failure is not None or buffer.closed:
            buffer.expect_open()
        code = last.start()
        if code:
            return self._not_started(code)
        self._kept = arrays
        return last.results, None

    def give_back(self):
        """What the last calls were lent, as far as nobody looks at it."""
        self._last.clear()

    def _forget(self):
        """Launches may name memory that is gone."""
        self._n_freed, self._n_changes = self._machine.n_freed, self._buffer.n_changes
        self._known.clear()
        self._last.clear()

    def _otherwise(self, kind, seen, numbers):
        """(the _Last of new results of a call that is known, or None; what the call is known by, or None)."""
        key = None
        if UNSEEN not in seen:
            where = kind, numbers, tuple([at[0] for at in seen])    # an address is sooner looked up than a type
            key, known = (where, seen), self._known.get(where)
            if known is not None and known.seen == seen:
                last = self._lend(kind, known, seen, numbers)
                if last is not None:
                    return last, None
            else:
                self.give_back()
        return self._general(key)

    def _general(self, key):
        """What again() gives for a call that takes the general way."""
        if not is_captured(self._machine) and key is not None:      # and the machine has learned of it
            return None, key
        self.give_back()
        return GENERAL

    def _lend(self, kind, known, seen, numbers):
        """The _Last of new results; None if there is no room, or no launches are known for where it is.

        These will be after the general way, which finds the same room.
        """
        kept, is_small = self._last.get(kind, ()), kind in SMALL
        others = self._last[kind] = [one for one in kept if is_small or one.seen == seen][:AT_ONCE - 1]
        loans = [memory.lend() for memory in known.memory]
        if None in loans:
            loans = None
            others.clear()
            self.give_back()
            loans = [memory.lend() for memory in known.memory]
        start = None if None in loans else known.starts.get(tuple([place_of(loan) for loan in loans]))
        if start is None:
            return None
        last = _Last(numbers, seen, start, known.results(*loans), loans)
        last.counts = known.counts = known.counts or last.count()
        self._last[kind] = [last, *others]
        return last

    def _not_started(self, code):
        """What again() gives for a call that is captured; or the error that the driver's code means."""
        if code == CAPTURED:
            return self._general(None)
        try:
            self._machine.refused(code)
        except Exception as error:
            self._buffer.failure = self._buffer.failure or error
            raise

    @contextmanager
    def watching(self, key):
        """Context of the general way; gives remember(memory, loans, results), to be called at its end.

        memory: what lends; loans: what it has lent; results: function of the loans.
        """
        if key is None:
            yield _forget
            return
        with self._machine.recording() as launches:
            yield lambda *what: self._remember(key, launches, *what)

    def _remember(self, key, launches, memory, loans, results):
        as_it_was = (self._machine.n_freed, self._buffer.n_changes) == (self._n_freed, self._n_changes)
        if not as_it_was or None in loans:
            return
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        where, seen = key
        known = self._known.get(where)
        if known is None or known.seen != seen:
            known = self._known[where] = _Known(seen, memory, results)
        known.starts[tuple([place_of(loan) for loan in loans])] = self._machine.again(launches)


def _forget(memory, loans, results):
    """Nothing."""
