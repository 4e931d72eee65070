"""Launches for arrays that lie elsewhere than any before: what follows from addresses in them, learned from earlier.

Calls of one form differ in nothing but where their arrays lie: the caller's, and those that results are lent. Of calls
that took the general way it is compared which words of their launches changed, and with which address: a word that was
an array's address, or lay as far behind the beginning of a loan, in every one of them is that. Only when each word that
changed is explained, in one way, are launches made of it; and an address that never changed must be the same then.
"""

from typing import NamedTuple

import numpy as np

from epmoe.host.placing import ALIGNMENT
from epmoe.kernels.written_blocks import words_at

N_SLOTS = 512  # calls that are known by their addresses at a time
MAX_FORMS = 256
MAX_LEARNED = 16  # calls of a form; one that is not understood by then never is


class Place(NamedTuple):
    """Where an array of the caller (bytes 1: its address is used, nothing inside) or a loan lies; bytes 0: a number."""

    address: int
    nbytes: int = 1


class Pattern:
    """The launches of calls of one form."""

    def __init__(self):
        self._calls, self._is_hopeless = [], False  # calls: [(addresses, bytes, Flat)]
        self.flat, self._fixed = None, ()

    def learn(self, places, flat):
        """A call took the general way, with arrays at these places."""
        at, nbytes = [p.address for p in places], [p.nbytes for p in places]
        if (
            self._is_hopeless
            or self.holds_for(places)
            or at in [addresses for addresses, *_ in self._calls]
        ):
            return
        if self._calls and not np.array_equal(flat.counted_from, self._calls[0][-1].counted_from):
            self._calls.clear()  # other launches, of which there may be more
        self._calls.append((at, nbytes, flat))
        self._is_hopeless = len(self._calls) > MAX_LEARNED
        self.flat = None
        if self._is_hopeless:
            self._calls.clear()
        elif len(self._calls) > 1:
            self._compare()

    def _compare(self):
        at, nbytes = (np.array([call[i] for call in self._calls]) for i in (0, 1))
        words, first = np.array([flat.words for *_, flat in self._calls]), self._calls[0][-1]
        same, counted_from = words[0].copy(), first.counted_from.copy()
        for i in np.flatnonzero((words != words[0]).any(axis=0)):
            behind = words[:, i, None] - at
            fits = (behind == behind[0]) & (behind >= 0) & (behind < np.maximum(nbytes, 1))
            (explained,) = fits.all(axis=0).nonzero()
            if len(explained) != 1 or counted_from[i]:
                return
            (n,) = explained
            same[i], counted_from[i] = behind[0, n], first.ADDRESSES + n
        self._fixed = [(n, int(at[0, n])) for n in np.flatnonzero((at == at[0]).all(axis=0))]
        self.flat = first._replace(words=same, counted_from=counted_from)

    def holds_for(self, places):
        """Whether launches with arrays at these places are understood: which were accepted, if they are aligned."""
        return (
            self.flat is not None
            and all([places[n].address == address for n, address in self._fixed])
            and not any([p.address % ALIGNMENT for p in places if p.nbytes])
        )


class Elsewhere:
    """The Patterns of one caller, and the memory for the launches that are made of them."""

    def __init__(self, machine):
        self._machine, self._patterns, self._slots = machine, {}, None

    def learn(self, form, places, launches):
        """Launches that took the general way; none where nothing is launched at all."""
        if not launches:
            return
        pattern = self._patterns.get(form)
        if pattern is None:
            if len(self._patterns) >= MAX_FORMS:
                self._patterns.clear()
            pattern = self._patterns[form] = Pattern()
        flat = self._machine.flat(launches, [words_at(one.values[0]) for one in launches])
        if flat is None:
            return
        if self._slots is None:
            self._slots = self._machine.slots(N_SLOTS, flat)
        if self._slots.serve(
            flat
        ):  # on another stream nothing would keep copies behind what reads the memory now
            pattern.learn(places, flat)

    def slot(self, form, places):
        """A Slot that holds the launches of a call of that form with arrays at these places; None if not known."""
        pattern = self._patterns.get(form)
        if pattern is None or not pattern.holds_for(places):
            return None
        slot = self._slots.take()
        if slot.owner is not None:
            calls, key = slot.owner
            if key in calls and calls[key].slot is slot:
                del calls[key]
            slot.owner = None
        slot.fill(pattern.flat, [p.address for p in places])
        return slot

    def forget(self):
        """What was learned may name memory that is gone."""
        self._patterns.clear()

    def close(self):
        """Free the memory; the launches that use it must have ended."""
        self._patterns.clear()
        if self._slots is not None:
            self._slots.free()
            self._slots = None
