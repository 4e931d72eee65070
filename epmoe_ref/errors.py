"""The errors of this project: one small tree, so that `except EPError` catches everything it raises on purpose."""


class EPError(Exception):
    """Anything that expert-parallel dispatch and combine report themselves."""


class EPValueError(EPError, ValueError):
    """An argument breaks a rule; the message names the value, the rule and the remedy. Nothing was launched."""


class EPStateError(EPError, RuntimeError):
    """A call came when it has no meaning: a wait without an async, a combine without a dispatch, after close."""


class UnavailableError(EPError):
    """This machine lacks what the call needs (a GPU, a library, MPI, SHMEM); the message names the remedy."""


class PeerTimeout(EPError):
    """A signal did not arrive in time; names the rank, the phase, and the experts and source ranks that are missing.

    The rank that is named has ended, is slower than `timeout`, or made other calls than the one that waited. Results of
    this round are not to be used; after `reset()` by all ranks rounds go on.
    """


class DeadlockError(EPError):
    """The simulator proved that no thread can go on; lists where each one waits and for which word."""


class OutOfBoundsError(EPError):
    """The simulator saw an access outside every registered buffer, or one that is not aligned to its size."""


class RaceError(EPError):
    """The race detector found two conflicting accesses that no synchronisation orders."""
