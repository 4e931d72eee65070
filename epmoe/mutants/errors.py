"""Errors with which the run of a world can end, besides the simulator's own."""

from epmoe_ref.errors import EPError


class WrongResult(EPError):
    """Results differ from the reference."""


class Leftover(EPError):
    """Memory differs from its state before the first round, or was written where no kernel may write."""
