"""Questions that are answered by a number in the student's file, with the usual mistakes told apart."""

import math
from dataclasses import dataclass

from epmoe.lessons.answers import Wrong


@dataclass(frozen=True)
class Number:
    """A question's right number and the usual wrong ones.

    right: the number. because: one sentence on how to get it, said with the praise. looks: ((number, what is wrong), ...).
    hint: said of any other number. close: how near an answer must be, relative to `right`; 0 for whole numbers.
    """

    right: float
    because: str
    looks: tuple
    hint: str
    close: float = 0.0

    def judge(self, answer, name):
        """What is right about the answer's number of this name; raises Wrong."""
        given = getattr(answer, name, None)
        if given is None:
            near = next((f", not {n}" for n in vars(answer) if n != name and n.upper() == name), "")
            raise Wrong(f"{name} is not answered: write {name} = and your number{near}.")
        got = _as_float(given)
        if got is None:
            comma = ": write a decimal point, not a comma" * (isinstance(given, tuple) and len(given) == 2)
            raise Wrong(f"{name} must be a number, not {repr(given)[:40]}{comma}")
        if self._is(got, self.right):
            return f"{name} = {_shown(self.right)}: {self.because}"
        for number, says in self.looks:
            if self._is(got, number):
                raise Wrong(f"{name} = {_shown(got)}: {says}")
        if not self.close and abs(self.right) > 1e4 and math.isclose(got, self.right, rel_tol=5e-3):
            raise Wrong(
                f"{name} = {_shown(got)} is rounded: write the calculation, and let Python give the exact number."
            )
        raise Wrong(f"{name} = {_shown(got)} is not right: {self.hint}")

    def _is(self, got, number):
        return math.isclose(got, number, rel_tol=max(self.close, 1e-9), abs_tol=1e-9)


def _as_float(given):
    """The float of a number, None for anything else."""
    try:
        return None if isinstance(given, (bool, str)) else float(given)
    except (TypeError, ValueError, OverflowError):
        return None


def _shown(number):
    number = float(number)
    return f"{number:,.0f}" if number.is_integer() else f"{number:.6g}"
