"""What a run of a world can end with, besides the simulator's own errors."""

from epmoe_ref.errors import EPError


class WrongResult(EPError):
    """Results differ from the reference's."""


class Leftover(EPError):
    """The memory is not as it was before the first round, or was written where nothing may be written."""
