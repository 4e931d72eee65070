"""How many blocks of how many threads a kernel gets, and which configurations the fast kernels of pairs serve."""

from dataclasses import dataclass

import numpy as np

from epmoe.device import SIM
from epmoe_ref.config import MAX_GPUS_PER_NODE, EPConfig
from epmoe_ref.errors import EPValueError

MAX_TOP_K = 32      # one lane of a warp holds one k
WARP = 32
MAX_THREADS = 1024
SIMULATOR_BLOCKS, SIMULATOR_THREADS = 3, 64


@dataclass(frozen=True)
class LaunchConfig:
    """Blocks and threads of every kernel of one ExpertParallel; a fused dispatch of few tokens takes fewer of them.

    n_sms: blocks of a launch, at least 2, because some blocks of a fused dispatch send while others receive. Default:
        all SMs of the device (several ranks that share a GPU must share them out, since fused kernels of all ranks have
        to be resident together); 3 in the simulator.
    num_threads: threads of a block, a multiple of 32 up to 1024. Default 1024; 64 in the simulator.
    trace: whether blocks write stamps (stamps.py).
    """

    n_sms: int | None = None
    num_threads: int | None = None
    trace: bool = False

    def __post_init__(self):
        for name in ("n_sms", "num_threads"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
                raise EPValueError(f"{name}={value!r} must be a whole number, or None for the device's own")
        if self.n_sms is not None and self.n_sms < 2:
            raise EPValueError(f"n_sms={self.n_sms} must be at least 2: some blocks send, the others receive")
        threads = self.num_threads
        if threads is not None and (threads < WARP or threads > MAX_THREADS or threads % WARP):
            raise EPValueError(f"num_threads={threads} must be a multiple of {WARP} from {WARP} to {MAX_THREADS}")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_threads or (SIMULATOR_THREADS if SIM else MAX_THREADS)

    def grid(self, machine) -> int:
        """Blocks of a launch on that machine."""
        return self.n_sms or (SIMULATOR_BLOCKS if SIM else max(2, machine.n_sms))


def check_limits(cfg: EPConfig) -> None:
    """Refuses a configuration that these kernels do not serve: EPValueError."""
    if cfg.top_k > MAX_TOP_K:
        raise EPValueError(f"top_k={cfg.top_k} must be at most {MAX_TOP_K} for the fast kernels: one lane of a warp "
                           "holds one slot; the plain kernels take more")
    if cfg.p2p_world_size > MAX_GPUS_PER_NODE:
        raise EPValueError(f"p2p_world_size={cfg.p2p_world_size} must be at most {MAX_GPUS_PER_NODE} "
                           "(MAX_GPUS_PER_NODE): use more p2p worlds")
