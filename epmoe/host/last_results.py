"""Results that calls give again, in the very same arrays, when nobody else refers to them nor to their memory."""

from epmoe.host.dispatch_phase import Sent
from epmoe.host.references import References
from epmoe.host.results import Results
from epmoe.kernels import TokenArray


class LastDispatch:
    """Memory that dispatches write, and its arrays: given again when nobody else refers to any of them.

    key: what the last of these dispatches followed from, and start: how its launches start again, unless held, the
    address of References, says that somebody does.
    who: (cfg, rank, check), as in a Dispatched.
    """

    __slots__ = (
        "address",
        "n",
        "of_rank",
        "sent",
        "loan",
        "key",
        "start",
        "held",
        "_made",
        "_references",
    )

    def __init__(self, who, n, loan, results=None):
        self.address, self.n, self.loan = loan.buffer.address, n, loan
        # Nobody asks again where the caller's arrays were
        self.of_rank = Sent(
            *who,
            TokenArray(0, n),
            0,
            1.0,
            None,
            loan,
            results or Results(loan),
            None if results else (loan.buffer.address, n),
        )
        self._made = self.of_rank.made
        self.sent, self.key, self.start, self.held = [self.of_rank], None, None, None

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
        self.key = self.start = None  # which looks at the References until now
        self._references = References(*what)
        self.held = self._references.address


class LastCombine:
    """The result of combines, whose memory is lent: the same.

    key: (what look() saw of expert outputs, weights or None; epilogue, Sent.place), None where a call is looked up.
    keeps: whether the expert outputs are the caller's, to be kept.
    """

    __slots__ = (
        "address",
        "n",
        "reduced",
        "result",
        "loan",
        "key",
        "start",
        "held",
        "keeps",
        "_references",
    )

    def __init__(self, n, reduced, result, loan):
        self.address, self.n, self.reduced, self.result, self.loan = (
            loan.buffer.address,
            n,
            reduced,
            result,
            loan,
        )
        self.key = self.start = self.held = self.keeps = None

    def count(self):
        """Nobody but the caller of this and what this holds refers to it now."""
        self._references = References([self.result, self.loan])
        self.held = self._references.address
