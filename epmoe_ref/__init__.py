"""The reference: the exact results of expert-parallel dispatch and combine, in NumPy.

It computes all ranks at once. Every argument and result that differs between ranks is a list over ranks. There is one
module for each noun of the protocol. The docstrings are the specification. It needs only NumPy and ml_dtypes.
"""

from . import formats, fused_a2a, protocol
from .arithmetic import add_rn, fma_rn, mul_rn
from .canonical import canonical
from .combine import combine
from .config import EPConfig
from .counters import EPLocalSyncCounters
from .dispatch import dispatch, shared_expert_share
from .dispatched import Dispatched, segments
from .errors import (
    DeadlockError,
    EPError,
    EPStateError,
    EPValueError,
    OutOfBoundsError,
    PeerTimeout,
    RaceError,
    UnavailableError,
)
from .formats import (
    BF16TokenFormat,
    BlockwiseFP8TokenFormat,
    MXFP4TokenFormat,
    NVBlockScaledTokenFormat,
    TokenFormat,
    format_of,
)
from .swiglu import fused_silu, fused_silu_fp8

__all__ = [
    "BF16TokenFormat",
    "BlockwiseFP8TokenFormat",
    "DeadlockError",
    "Dispatched",
    "EPConfig",
    "EPError",
    "EPLocalSyncCounters",
    "EPStateError",
    "EPValueError",
    "MXFP4TokenFormat",
    "NVBlockScaledTokenFormat",
    "OutOfBoundsError",
    "PeerTimeout",
    "RaceError",
    "TokenFormat",
    "UnavailableError",
    "add_rn",
    "canonical",
    "combine",
    "dispatch",
    "fma_rn",
    "format_of",
    "formats",
    "fused_a2a",
    "fused_silu",
    "fused_silu_fp8",
    "mul_rn",
    "protocol",
    "segments",
    "shared_expert_share",
]
