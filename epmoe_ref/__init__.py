"""The reference: what expert-parallel dispatch and combine must produce, to the bit, in NumPy."""

from .config import EPConfig
from .errors import (DeadlockError, EPError, EPStateError, EPValueError, OutOfBoundsError, PeerTimeout, RaceError,
                     UnavailableError)

__all__ = ["EPConfig", "DeadlockError", "EPError", "EPStateError", "EPValueError", "OutOfBoundsError", "PeerTimeout",
           "RaceError", "UnavailableError"]
