"""The errors of this project: one small tree, so `except EPError` catches every error it raises on purpose."""


class EPError(Exception):
    """Base class of all errors of this project."""


class EPValueError(EPError, ValueError):
    """An argument breaks a rule. The message names the value, the rule and the remedy.

    Nothing was launched, unless a function of the caller broke the rule inside a kernel: then call `reset()`.
    """


class EPStateError(EPError, RuntimeError):
    """A call in the wrong order: a wait without an async, a combine without a dispatch, a call after close."""


class UnavailableError(EPError):
    """This machine lacks something that the call needs (a GPU, a library, MPI, SHMEM). The message names the remedy."""


class PeerTimeout(EPError):
    """A signal did not arrive in time. The message names the rank, the phase, and the missing experts and src_ranks.

    The named rank has ended, is slower than `timeout`, or made other calls than the rank that waited. Do not use the
    results of this round. To recover, call `reset()` on all ranks
    (HybridEP: `reset_hybrid_ep_buffer`).
    """


class DeadlockError(EPError):
    """The simulator proved that no thread can continue. The message lists where each thread waits, for which word."""


class OutOfBoundsError(EPError):
    """The simulator saw an access outside every registered buffer, or a misaligned access."""


class RaceError(EPError):
    """The race detector found two conflicting accesses that no synchronisation orders."""
