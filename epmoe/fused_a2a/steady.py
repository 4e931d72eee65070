"""Calls of a Buffer that were made before with the same arguments: the fast way on a GPU, one rank a process.

In a steady state arrays come at addresses, and with shapes and types, that an earlier call had, and results get memory
that an earlier call's results had. What is checked and what is launched follows from these alone, as in
epmoe/host/steady_calls.py, so the launches of a call that took the general way start again. Everything else takes the
general way: host arrays, lists over ranks, calls that wait for the host, results that found no room in the heap, calls
that are captured into a CUDA graph.
"""

from contextlib import contextmanager
from sys import getrefcount

from epmoe import device
from epmoe.device.captures import is_captured
from epmoe.fused_a2a.heap import place_of
from epmoe.host.arrays import DeviceArray
from epmoe.host.steady_calls import UNSEEN, WAYS, look

MAX_REMEMBERED = 1024
AT_ONCE = 2             # results of one call that are kept
PAIRS, NOTHING = (tuple, list), (None,)


def _look_closer(a):
    """What decides how None, a pair, or an array of a type that was not seen before is treated; its addresses first."""
    if type(a) not in PAIRS:
        return NOTHING if a is None else look(a)
    seen = [NOTHING if one is None else look(one) for one in a]
    return UNSEEN if UNSEEN in seen else (tuple([at[0] for at in seen]), *seen)


class _Known:
    """One call: what was seen of its arrays, the memory that it lends, how results are made of that, launches by it."""

    def __init__(self, seen, memory, results):
        self.seen, self.memory, self.results, self.launches = seen, memory, results, {}


class _Last:
    """One of the last calls: its launches and results, which nobody else looks at where `counts` are as at first."""

    __slots__ = ("known", "launches", "results", "loans", "objects", "counts")

    def __init__(self, known, launches, results, loans):
        self.known, self.launches, self.results, self.loans = known, launches, results, loans
        self.objects = [*_objects(results), *loans]


def _objects(results):
    """All objects of a call's results through which somebody could keep or see their memory."""
    if isinstance(results, (list, tuple)):
        yield results
        for one in results:
            yield from _objects(one)
    elif results is not None:
        yield results
        holds = getattr(results, "__dict__", {}).values()       # a handle's
        yield from (held for held in holds if isinstance(held, DeviceArray))


class SteadyCalls:
    """The remembered calls of one Buffer.

    Of each kind the last results are kept, two of them where both are in use at once; a call like theirs has them
    again, the very same objects, when nobody else holds any of them. A call that is new gives them all back first.
    """

    def __init__(self, buffer):
        self.applies = not device.SIM and not buffer.world.lists
        self._buffer, self._machine = buffer, buffer.machine
        self._known, self._last, self._state, self._kept = {}, {}, None, None

    def key(self, kind, arrays, *numbers):
        """What the call is known by; None if it has to take the general way. arrays: None, arrays, pairs of arrays.

        A call that waits for the host has no key; any other begins here, so here the machine learns of captures.
        """
        if is_captured(self._machine) or not self.applies:
            return None
        where, seen = [kind, *numbers], []
        for a in arrays:
            way = WAYS.get(type(a))
            at = _look_closer(a) if way is None else way(a)
            if at is UNSEEN:
                return None
            where.append(at[0])                 # an address is sooner looked up than a type
            seen.append(at)
        return tuple(where), seen

    def again(self, key, arrays):
        """Results of a call that is known, its kernels launched; else None. arrays: of key(), kept till the next."""
        known = key and self._find(*key)
        if known is None:
            self.give_back()
            return None
        for last in self._last.get(key[0][0], ()):
            if last.known is known and last.counts == list(map(getrefcount, last.objects)):
                break
        else:
            last = self._lend(key[0][0], known)
            if last is None:
                return None
        self._buffer.expect_open()
        try:
            self._machine.start(last.launches)
        except Exception as error:
            self._buffer.failure = self._buffer.failure or error
            raise
        self._kept = arrays
        return last.results

    def give_back(self):
        """What the last calls were lent, as far as nobody looks at it."""
        self._last.clear()

    def _find(self, where, seen):
        state = self._machine.n_freed, self._buffer.n_changes
        if state != self._state:                # launches may name memory that is gone
            self._known.clear()
            self._last.clear()
            self._state = state
        known = self._known.get(where)
        return known if known is not None and known.seen == seen else None

    def _lend(self, kind, known):
        """The _Last of new results; None if there is no room, or no launches are known for where it is.

        These will be after the general way, which finds the same room.
        """
        # Of this call's last results somebody holds some, which may end; those of other calls go if there is no room.
        others = [last for last in self._last.get(kind, ()) if last.known is known][:AT_ONCE - 1]
        loans = [memory.lend() for memory in known.memory]
        if None in loans:
            loans = others = None
            self.give_back()
            loans = [memory.lend() for memory in known.memory]
        launches = None if None in loans else known.launches.get(tuple([place_of(loan) for loan in loans]))
        if launches is None:
            return None
        last = _Last(known, launches, known.results(*loans), loans)
        last.counts = list(map(getrefcount, last.objects))
        self._last[kind] = [last, *(others or ())]
        return last

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
        if (self._machine.n_freed, self._buffer.n_changes) != self._state or None in loans:
            return
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        where, seen = key
        known = self._known.get(where)
        if known is None or known.seen != seen:
            known = self._known[where] = _Known(seen, memory, results)
        known.launches[tuple([place_of(loan) for loan in loans])] = launches


def _forget(memory, loans, results):
    """Nothing."""
