"""All ranks of a world, which step in any legal order."""

import numpy as np

from ..config import EPConfig
from ..dispatched import Dispatched
from . import combine, dispatch
from .state import RankState, Step


class World:
    """The states of all ranks. A step of a rank delivers its writes at once. Ranks may be at different steps.

    cfg: EPConfig. fill: the byte that the buffers hold before the first round. ranks: list of RankState.
    """

    def __init__(self, cfg: EPConfig, fill: int = 0):
        self.cfg = cfg
        self.ranks = [RankState.initial(cfg, rank, fill) for rank in range(cfg.n_ranks)]

    def ready(self) -> list[int]:
        """The ranks that can step now: their next step is no wait, or all of its signals have arrived."""
        return [state.rank for state in self.ranks if not state.missing_signals()]

    def dispatch_async(self, rank: int, input_tokens, topk_ids, **options) -> None:
        """Step `rank` through dispatch_async; options are its keyword arguments."""
        self._take(dispatch.dispatch_async(self.ranks[rank], input_tokens, topk_ids, **options))

    def dispatch_wait(self, rank: int) -> Dispatched:
        """Step `rank` through dispatch_wait."""
        return self._take(dispatch.dispatch_wait(self.ranks[rank]))

    def combine_async(self, rank: int, expert_outputs: np.ndarray, src_info: np.ndarray) -> None:
        """Step `rank` through combine_async."""
        self._take(combine.combine_async(self.ranks[rank], expert_outputs, src_info))

    def combine_wait(self, rank: int, **options) -> np.ndarray | None:
        """Step `rank` through combine_wait; options are its keyword arguments."""
        return self._take(combine.combine_wait(self.ranks[rank], **options))

    def _take(self, step: Step):
        self.ranks[step.state.rank] = step.state
        for dst_rank in sorted({write.dst_rank for write in step.writes}):
            writes = [w for w in step.writes if w.dst_rank == dst_rank]
            self.ranks[dst_rank] = self.ranks[dst_rank].received(writes)
        return step.result
