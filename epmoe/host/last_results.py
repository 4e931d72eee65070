"""Results that calls give again, in the very same arrays, when nobody else refers to them nor to their memory."""

from sys import getrefcount

from epmoe.host.dispatch_phase import Sent
from epmoe.host.dispatched import Dispatched
from epmoe.host.references import References
from epmoe.host.results import Results
from epmoe.kernels import TokenArray

_new = Dispatched.__new__


class LastDispatch:
    """Memory that dispatches write, and its arrays: given again when nobody else refers to any of them.

    key: what the last of these dispatches followed from, and start: how its launches start again.
    """

    __slots__ = ("address", "n", "of_rank", "sent", "fields", "loan", "key", "start", "held", "_made", "_references")

    def __init__(self, n, loan, dispatched, results=None):
        self.address, self.n, self.loan = loan.buffer.address, n, loan
        # Nobody asks again where the caller's arrays were
        self.of_rank = Sent(TokenArray(0, n), 0, 1.0, None, loan, results or Results(loan))
        self._made = self.of_rank.made
        self.sent, self.fields = [self.of_rank], dispatched(self.of_rank).__dict__
        self.key = self.start = self.held = None

    def dispatched(self):
        """A Dispatched for the caller, at which nobody has looked."""
        d = _new(Dispatched)
        d.__dict__ = self.fields.copy()
        return d

    def count(self):
        """Nobody but the caller of this and what this holds refers to it now."""
        self._refer([self.of_rank, self.loan])

    def count_arrays(self):
        """The same of arrays that were made of it since; whether there are any."""
        n, (of_rank, loan, *before) = len(self._made), self._references.counts
        if n == len(before):
            return False
        # an array refers to the loan, as its function that reads it does; a dictionary and a list refer to the array
        counts = [of_rank, loan + 2 * (n - len(before))] + n * [2]
        self._refer([self.of_rank, self.loan, *self._made.values()], counts)
        return True

    def _refer(self, *what):
        self._references = References(*what)
        self.held = self._references.address


class LastCombine:
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
