"""Calls of a Buffer that were made before with the same arguments: the fast way on a GPU, one rank a process.

In a steady state arrays come at addresses, and with shapes and types, that an earlier call had, and results get memory
that an earlier call's results had. What is checked and what is launched follows from these alone, as in
epmoe/host/steady_calls.py, so the launches of a call that took the general way start again, and those for arrays that
lie elsewhere are made of them (epmoe/host/elsewhere.py). Where the host waits for the number of rows, what is launched
behind the wait is a call of its own. Everything else takes the general way: host arrays, lists over ranks, calls that
are captured into a CUDA graph.
"""

from collections import defaultdict
from contextlib import contextmanager

from epmoe import device
from epmoe.device.captures import CAPTURED, GONE, HELD, is_captured, is_seen_captured
from epmoe.fused_a2a.heap import is_in_heap, place_of, places_in, places_of_fields
from epmoe.host.arrays import DeviceArray
from epmoe.host.elsewhere import Elsewhere, Place
from epmoe.host.looks import UNSEEN, WAYS, look
from epmoe.host.references import References, are_counted
from epmoe.host.starts import Start

MAX_REMEMBERED, MAX_FORMS = 1024, 256
UNKNOWN = object()  # instead of a start's code: no launches are known
AT_ONCE = (
    2  # calls of one kind whose results are kept, and that are compared before any is looked up
)
SMALL = (
    "combine",
    "hybrid combine",
)  # kinds whose results are no larger than the rank's own tokens
OF_ROWS = SMALL  # kinds whose arrays have as many rows as the handle
NOTHING, GENERAL = (None,), (None, None)


def _look_at_pair(a):
    """What decides how a pair of arrays is treated: that of each."""
    if len(a) != 2:
        return UNSEEN
    x, y = a
    x, y = (WAYS.get(type(x)) or look)(x), (WAYS.get(type(y)) or look)(y)
    return UNSEEN if x is UNSEEN or y is UNSEEN else (x, y)


def _is_pair(seen):
    return type(seen[0]) is tuple


def _address_of(seen):
    """Where an array lies, or each of a pair; None for None."""
    return (seen[0][0], seen[1][0]) if _is_pair(seen) else seen[0]


# By type, of what was seen: as WAYS, but for None and pairs
_WAYS = {type(None): lambda _: NOTHING, tuple: _look_at_pair, list: _look_at_pair}


def _look_at(a):
    """What is seen of an argument of a type that may be new."""
    if type(a) not in _WAYS:
        look(a)
        _WAYS[type(a)] = WAYS[type(a)]
    return _WAYS[type(a)](a)


class _Form:
    """Calls that differ in nothing but where their arrays lie: the memory that they lend, how results are made of it.

    If the host knows how many rows a handle has, calls of a form differ in that, too. numbers: then a function of the
    numbers of rows -> those that launches have because of them, or None if the call needs more room than there is;
    memory may be such a function as well: then arrays of a loan have places of their own. results is given the rows of
    this rank besides.
    counts: how often the objects of results are referred to when nobody looks at them, the same for all.
    facts: as for want_pool().
    """

    def __init__(self, memory, results, numbers, facts):
        self.memory, self.results, self.numbers, self.counts = memory, results, numbers, None
        self.facts = facts


class _Known:
    """One call: what was seen, and what form it is of; by places of the memory lent: Start."""

    __slots__ = ("at", "numbers", "handle", "seen", "rows", "name", "form", "starts")

    def __init__(self, at, seen, rows, name, form):
        (_, self.numbers, self.handle, _), self.at, self.rows = at, at, rows
        self.seen, self.name, self.form, self.starts = seen, name, form, {}


_NO_CALL = _Known(4 * (None,), None, (), None, None)  # nothing that is seen is like it


class _Last:
    """Results that a call gives again when nobody else looks at them; rows: of which handle's, if that matters.

    known, start: of the last call that gave them; _NO_CALL as long as none has.
    """

    __slots__ = ("form", "rows", "at", "results", "loans", "references", "held", "known", "start")

    def __init__(self, form, rows, loans):
        self.known, self.start = _NO_CALL, None
        self.form, self.rows, self.loans = form, rows if callable(form.memory) else None, loans
        self.results, self.at = form.results(*loans, *rows[:1]), tuple(map(place_of, loans))
        # through which somebody could keep or see the results
        self.references = References([*_objects(self.results), *loans], form.counts)
        self.held, form.counts = self.references.address, self.references.counts


def _objects(results):
    """All that is in results and is handed out: tuples, arrays, and a handle with the arrays that it holds.

    Lists over ranks are taken apart first.
    """
    found = [results]
    for one in found:
        kind = type(one)
        if kind is list or kind is tuple:
            found.extend(one)
        elif kind is not DeviceArray:
            found.extend(
                [
                    held
                    for held in getattr(one, "__dict__", {}).values()
                    if type(held) is DeviceArray
                ]
            )
    return [one for one in found if one is not None and type(one) is not list]


class SteadyCalls:
    """The remembered calls of one Buffer.

    Of each kind the last results of calls of one form (small ones: of any) are kept, since two of them are often in use
    at once, or in turn; a call of that form has them again, the very same objects, when nobody else holds any of them.
    A call of a form that is new gives them all back first.
    """

    def __init__(self, buffer):
        self.applies = not device.SIM and not buffer.world.lists and are_counted()
        self._buffer, self._machine, self._calls = buffer, buffer.machine, buffer.calls
        self._known, self._latest, self._forms, self._kept = {}, {}, {}, None
        self._last = defaultdict(tuple)  # kind -> [_Last]
        self._elsewhere = Elsewhere(self._machine)
        self._n_changes = None
        if self.applies:
            self._forget()  # compiles what starts need, before anybody waits for this rank

    def again(self, kind, x, y, z, numbers, handle=()):
        """(results of a call that is known, its kernels launched, or None; what a new call is known by, or None).

        x, y, z: None, arrays, pairs of arrays; they are kept till the next call. numbers: what else it depends on, and
        handle: what is seen of the handle that it is given. Every call that can be captured begins here, so here the
        machine learns of captures.
        """
        if not self.applies:
            return GENERAL
        try:  # what _look_at() says, sooner
            seen = (
                x.seen if type(x) is DeviceArray else _WAYS[type(x)](x),
                y.seen if type(y) is DeviceArray else NOTHING if y is None else _WAYS[type(y)](y),
                z.seen if type(z) is DeviceArray else NOTHING if z is None else _WAYS[type(z)](z),
            )
        except KeyError:
            seen = tuple(map(_look_at, (x, y, z)))
        for last in self._last[kind]:
            known = last.known
            if (
                known.seen == seen
                and known.numbers == numbers
                and (known.handle is handle or known.handle == handle)
            ):
                code = last.start()
                if code == 0:
                    self._kept = x, y, z
                    self._calls.begin(known.form.facts)
                    return last.results, None
                if code == GONE:
                    break
                if code != HELD:
                    return self._not_started(code, known)
        last = None  # its memory may be needed
        return self._again(kind, (x, y, z), seen, numbers, handle)

    def _again(self, kind, arrays, seen, numbers, handle):
        """The same where the call is none of the last, or their results are held, or something has changed."""
        if self._n_changes != self._machine.n_changes:
            self._forget()
        for known in self._latest.get(kind, ()):
            if known.seen == seen and known.numbers == numbers and known.handle == handle:
                break
        else:
            if UNSEEN in seen:
                return self._general(None)
            known = self._find(kind, seen, numbers, handle)
        form = known.form
        if form is None:
            self.give_back()
            return self._general(known)
        code = HELD
        for last in self._last[kind]:
            if last.form is form and (last.rows is None or last.rows == known.rows):
                start = known.starts.get(last.at)
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
            if is_seen_captured(self._machine):  # what a graph is lent, it has for good
                self.give_back()
                return self._general(known)
            last = None  # its memory may be needed
            last = self._lend(kind, form, known.rows)
            if last is None:
                return self._general(known)
            start = known.starts.get(last.at)
            code = 0 if start is None else start.begin(0)
        if code == 0 and start is None:
            code = self._begin(known, last)
        if code:
            return self._not_started(code, known)
        last.known = _NO_CALL
        if start is not None and start.again is not None:
            last.known, last.start = known, start.again
        self._kept = arrays
        self._calls.begin(form.facts)
        return last.results, None

    def give_back(self):
        """What the last calls were lent, as far as nobody looks at it."""
        self._last.clear()

    def changed(self):
        """What calls depend on besides their arguments is not what it was: none is known any more."""
        if self.applies:
            self._machine.changed()

    def close(self):
        """Nothing is known any more, nor kept of the caller; the launches have ended."""
        self._clear()
        self._elsewhere.close()
        self._kept = None
        self.applies = False

    def _forget(self):
        """Launches may name memory that is gone."""
        self._n_changes, self._look = self._machine.n_changes, self._machine.again([])
        self._clear()

    def _clear(self):
        for known in self._known, self._latest, self._forms, self._last:
            known.clear()
        self._elsewhere.forget()

    def _find(self, kind, seen, numbers, handle):
        """The _Known of a call, which may be a new one, with no form if that is new."""
        # an address is sooner looked up than a type
        at = kind, numbers, handle, tuple([_address_of(one) for one in seen])
        known = self._known.get(at)
        if known is None or known.seen != seen:
            rows = handle[1] if handle else ()
            of_rows = rows and kind in OF_ROWS
            if of_rows and any([one is not NOTHING and one[1][0] != rows[0] for one in seen]):
                of_rows = False  # refused, or something unheard of
            name = (
                kind,
                numbers,
                handle[2:],
                bool(of_rows),
                tuple([_form_of(one, of_rows) for one in seen]),
            )
            known = _Known(at, seen, rows, name, self._forms.get(name))
        self._latest[kind] = known, *self._latest.get(kind, ())[: AT_ONCE - 1]
        return known

    def _general(self, key):
        """What again() gives for a call that takes the general way."""
        if not is_captured(self._machine) and key is not None:  # and the machine has learned of it
            return None, key
        self.give_back()
        return GENERAL

    def _lend(self, kind, form, rows):
        """The _Last of new results; None if there is no room."""
        by_rows, lenders = None, form.memory
        if callable(lenders):
            by_rows, lenders = rows, lenders(*rows)
        kept, is_small = self._last[kind], kind in SMALL
        # those of other numbers of rows give their memory back before this one needs some
        others = self._last[kind] = [
            one for one in kept if is_small or one.form is form and one.rows == by_rows
        ][: AT_ONCE - 1]
        del kept
        loans = [memory.lend() for memory in lenders]
        if None in loans:
            loans = None
            others.clear()
            self.give_back()
            loans = [memory.lend_anywhere() for memory in lenders]
            if None in loans:
                return None
        last = _Last(form, rows, loans)
        self._last[kind] = [last, *others]
        return last

    def _begin(self, known, last):
        """Start launches for arrays that lie elsewhere than any before: 0, or as what again() of a machine gives."""
        places = _with_places(known, last.loans)
        slot = self._elsewhere.slot(*places) if places is not None else None
        if slot is None:
            return UNKNOWN
        code = slot.begin()
        if not code:
            self._keep(known)
            known.starts[last.at], slot.owner = (
                Start(self._machine, slot.start, slot),
                (known.starts, last.at),
            )
        return code

    def _keep(self, known):
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[known.at] = known

    def _not_started(self, code, key):
        """What again() gives for a call that is captured, or not known; or the error that the driver's code means."""
        if code == UNKNOWN or code == GONE:
            self.give_back()  # the general way finds the same room
            return self._general(key)
        if code == CAPTURED:
            return self._general(None)
        try:
            self._machine.refused(code)
        except Exception as error:
            self._buffer.failure = self._buffer.failure or error
            raise

    @contextmanager
    def watching(self, key):
        """Context of the general way; gives remember(memory, loans, results, numbers), to be called at its end.

        memory: what lends; loans: what it has lent; results: function of the loans. See _Form.
        """
        if key is None:
            yield _forget
            return
        with self._machine.recording() as launches:
            yield lambda *what: self._remember(key, launches, *what)

    def _remember(self, known, launches, memory, loans, results, numbers=None):
        if self._machine.n_changes != self._n_changes or None in loans:
            return
        if known.form is None:
            if len(self._forms) >= MAX_FORMS:
                self._forget()
            known.form = self._forms[known.name] = _Form(
                memory, results, numbers, self._calls.latest
            )
        self._keep(known)
        known.starts[tuple(map(place_of, loans))] = Start(
            self._machine, self._machine.again(launches)
        )
        places = _with_places(known, loans)
        if places is not None:
            self._elsewhere.learn(*places, launches)


def _form_of(seen, of_rows):
    """What was seen of an array, or of a pair, without where it lies; of_rows: nor how many rows it has."""
    if _is_pair(seen):
        return tuple([one[1:] for one in seen])
    return (seen[1][1:], *seen[2:]) if of_rows and seen is not NOTHING else seen[1:]


def _with_places(known, loans):
    """(the form's name and where its results are, Places of the caller's arrays, of the handle, and of the loans).

    None if the call needs more room than there is.
    """
    *_, handle, addresses = known.at
    places = []
    for one in addresses:
        places += map(Place, one) if type(one) is tuple else [] if one is None else [Place(one)]
    if handle:
        places += handle[0]
    places_of = places_of_fields if callable(known.form.memory) else places_in
    for loan in loans:
        places += places_of(loan)
    if known.rows:
        numbers = known.form.numbers(*known.rows)
        if numbers is None:
            return None
        places += [Place(n, 0) for n in numbers]
    return (known.name, tuple(map(is_in_heap, loans))), places


def _forget(*what):
    """Nothing."""
