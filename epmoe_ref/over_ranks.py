"""Arguments over ranks: lists with one entry for each rank."""

from .config import EPConfig
from .errors import EPValueError


def over_ranks(cfg: EPConfig, name: str, values) -> list:
    """The values as a list; EPValueError unless they are a list or tuple of n_ranks entries."""
    if not isinstance(values, (list, tuple)) or len(values) != cfg.n_ranks:
        what = f"{len(values)} entries" if isinstance(values, (list, tuple)) else f"type {type(values).__name__}"
        raise EPValueError(
            f"{name} has {what} and must be a list over ranks, n_ranks={cfg.n_ranks} entries: the "
            "reference computes a world at once"
        )
    return list(values)
