"""The limits of the fast kernels for pairs; the plain ones have no limit on top_k."""

from epmoe_ref.config import MAX_GPUS_PER_NODE, EPConfig
from epmoe_ref.errors import EPValueError

MAX_TOP_K = 32      # one lane of a warp holds one k


def check(cfg: EPConfig) -> None:
    """Refuses a configuration that these kernels do not serve: EPValueError."""
    if cfg.top_k > MAX_TOP_K:
        raise EPValueError(f"top_k={cfg.top_k} must be at most {MAX_TOP_K} for the fast kernels: one lane of a warp "
                           "holds one slot; the plain kernels take more")
    if cfg.p2p_world_size > MAX_GPUS_PER_NODE:
        raise EPValueError(f"p2p_world_size={cfg.p2p_world_size} must be at most {MAX_GPUS_PER_NODE} "
                           "(MAX_GPUS_PER_NODE): use more p2p worlds")
