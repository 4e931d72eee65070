"""Ends a call anywhere inside, as Ctrl-C does: at its n-th call of a Python function."""

import sys
from contextlib import contextmanager


class Interruption(BaseException):
    """What KeyboardInterrupt, SystemExit and pytest-timeout's Failed have in common: no Exception."""


@contextmanager
def at_function_call(n, kind=Interruption):
    """Raise this exception at the n-th Python function that is called inside; n=None counts them alone.

    Gives a list, to which the name of every function is added. Python drops exceptions that come in a finaliser, or in a
    generator expression that is closed before its end, so they do not come there but at the next function.
    """
    seen, is_raised = [], False

    def look(frame, event, argument):
        nonlocal is_raised
        if event == "call":
            seen.append(frame.f_code.co_name)
            is_late = n is not None and len(seen) >= n and not is_raised
            if is_late and not is_in_finaliser(frame):
                is_raised = True
                raise kind(f"at {frame.f_code.co_name}")

    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def is_in_finaliser(frame):
    """Whether a function runs in a __del__, or in a generator expression."""
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "<genexpr>"):
            return True
        frame = frame.f_back
    return False


def places(n_calls, n):
    """n numbers of calls, spread over all of them."""
    return sorted({1 + i * (n_calls - 1) // max(1, n - 1) for i in range(n)})
