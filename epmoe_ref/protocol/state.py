"""The memory of one rank: its buffers, its signals and its counters."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..config import MAX_GPUS_PER_NODE, EPConfig
from ..counters import EPLocalSyncCounters
from ..errors import EPStateError, EPValueError
from ..formats import format_of

MAX_FINITE = np.uint64(2**64 - 1)  # a recv_count word: "not arrived"
STEPS = ("dispatch_async", "dispatch_wait", "combine_async", "combine_wait")


class Write(NamedTuple):
    """Bytes or a signal that a step writes into a rank's memory: `region[index] = value` there.

    region: "dispatch_recv_buf", "dispatch_recv_count", "combine_recv_buf" or "combine_recv_count". A signal is a write
    into a recv_count. It follows the writes that it covers: a rank that sees the signal sees these writes.
    """

    dst_rank: int
    region: str
    index: tuple  # type: ignore[assignment]    # hides tuple.index, which nobody calls
    value: Any


class Step(NamedTuple):
    """What a step returns: the rank's next state, its writes to other ranks in order, and the result of a wait."""

    state: "RankState"
    writes: list[Write]
    result: Any = None


@dataclass(frozen=True, eq=False)
class RankState:
    """The memory of one rank between two steps. Steps copy it and never write the arrays of an existing state.

    Buffers (msg_bytes: of the token format in dispatch; hidden * itemsize in combine, whose messages have no trailer;
    the src_rank axis has length 1 under skip_a2a):

    dispatch_send_buf    uint8 [max_tokens_per_rank, msg_bytes]: the rank's own messages, by token
    dispatch_recv_buf    uint8 [n_local_experts, n_ranks, max_tokens_per_rank, msg_bytes]: written by peers, [local
                         expert, src_rank, slot]; slots past the count keep whatever bytes they had
    dispatch_recv_count  uint64 [n_local_experts, n_ranks]: the signal of (local expert, src_rank): the number of
                         messages, perhaps 0; MAX_FINITE: not arrived
    combine_send_buf     uint8 [n_local_experts * n_ranks * max_tokens_per_rank, msg_bytes] with use_shmem, else [0,
                         msg_bytes]: stages rows for other p2p worlds; only its owner reads it, and its bytes are free
    combine_recv_buf     uint8 [max_tokens_per_rank, top_k, msg_bytes]: written by peers; rows of pairs that were not
                         sent keep whatever bytes they had
    combine_recv_count   uint64 [n_local_experts, n_ranks]: the signal of (local expert of the src_rank, src_rank)
    ep_counters          int32 [8 * n_experts + 12]: the eleven regions of EPLocalSyncCounters; see `region`

    Before the first round buffers hold any bytes, recv_counts MAX_FINITE, counters 0.

    The rest is not device memory. next_step: the step that is due. topk_ids (checked, int32) and shared_outputs
    (the shared expert's rows of the combine input): arguments of an earlier step that combine_wait needs.
    messages_here int [n_local_experts, n_ranks], rows_here bool [max_tokens_per_rank, top_k]: which slots and which
    pairs of the two recv_bufs were written by peers in their latest round.
    """

    cfg: EPConfig
    rank: int
    next_step: str
    dispatch_send_buf: np.ndarray
    dispatch_recv_buf: np.ndarray
    combine_send_buf: np.ndarray
    combine_recv_buf: np.ndarray
    dispatch_recv_count: np.ndarray
    combine_recv_count: np.ndarray
    ep_counters: np.ndarray
    messages_here: np.ndarray
    rows_here: np.ndarray
    topk_ids: Any = None
    shared_outputs: Any = None

    @classmethod
    def initial(cls, cfg: EPConfig, rank: int, fill: int = 0) -> "RankState":
        """The state before the first round. `fill` is the byte that the buffers hold.

        Errors: EPValueError for p2p_world_size over 8, the length of the rank completion region.
        """
        if cfg.p2p_world_size > MAX_GPUS_PER_NODE:
            raise EPValueError(
                f"p2p_world_size={cfg.p2p_world_size} must be at most {MAX_GPUS_PER_NODE}, the length "
                "of the rank completion region: use more p2p worlds"
            )
        local, ranks, tokens = cfg.n_local_experts, cfg.n_src_ranks, cfg.max_tokens_per_rank
        msg_bytes, combine_bytes = format_of(cfg).msg_size(), cfg.hidden * cfg.combine_itemsize
        staged = local * ranks * tokens if cfg.use_shmem else 0
        shapes = [(tokens, msg_bytes), (local, ranks, tokens, msg_bytes)]
        shapes += [(staged, combine_bytes), (tokens, cfg.top_k, combine_bytes)]
        buffers = [np.full(shape, fill, np.uint8) for shape in shapes]
        signals = [np.full((local, ranks), MAX_FINITE) for _ in range(2)]
        counters = np.zeros(EPLocalSyncCounters(cfg.n_experts).total_size(), np.int32)
        here = [np.zeros((local, ranks), np.int64), np.zeros((tokens, cfg.top_k), bool)]
        arrays: list[Any] = [*buffers, *signals, counters, *here]
        return cls(cfg, rank, STEPS[0], *arrays)

    def region(self, name: str) -> np.ndarray:
        """A buffer, a recv_count or a counter region, as a view in the shape of its indices.

        A counter region is cut to the words in use: reserved, finished [n_local_experts, n_ranks] by (local expert,
        dst_rank), A [n_local_experts, n_ranks, 2] and B [n_local_experts, n_ranks] by (local expert, src_rank),
        C [n_local_experts], rank_completion [8], D, E, F, G [1], combine_wait [2 * n_experts]. The rank axis has
        length 1 under skip_a2a. Words of a region that are not in use stay 0.
        """
        if name in BUFFERS:
            return getattr(self, name)
        local, ranks = self.cfg.n_local_experts, self.cfg.n_src_ranks
        start, size = EPLocalSyncCounters(self.cfg.n_experts).regions()[name]
        shape = {"A": (local, ranks, 2), "C": (local,)}.get(name, (size,))
        if name in ("reserved", "finished", "B"):
            shape = (local, ranks)
        return self.ep_counters[start : start + int(np.prod(shape))].reshape(shape)

    def begin(self, step: str) -> "RankState":
        """A copy for a step to write into.

        Errors: EPStateError if another step is due, or if a signal is missing (a device would wait for it).
        """
        if step != self.next_step:
            raise EPStateError(
                f"rank {self.rank}: {step} before {self.next_step}: steps take turns in the order "
                f"{', '.join(STEPS)}, without exception"
            )
        if missing := self.missing_signals():
            raise EPStateError(
                f"rank {self.rank}: {step.replace('_wait', '_recv_count')} has not arrived from (local expert, "
                f"src_rank) {', '.join(map(str, missing[:4]))}{' ...' * (len(missing) > 4)}: let "
                "those ranks step first"
            )
        after = STEPS[(STEPS.index(step) + 1) % len(STEPS)]
        return replace(self._copied(), next_step=after)

    def missing_signals(self) -> list[tuple[int, ...]]:
        """The (local expert, src_rank) of missing signals that the next step waits for. Empty unless it is a wait."""
        if not self.next_step.endswith("_wait"):
            return []
        words = self.region(self.next_step.replace("_wait", "_recv_count"))
        return [tuple(at) for at in np.argwhere(words == MAX_FINITE).tolist()]

    def received(self, writes: Iterable[Write]) -> "RankState":
        """The state after writes from other ranks, applied in their order.

        A signal lands only on a word that holds MAX_FINITE. A rank consumes the signals of a round before peers can
        send the next round's, because no rank ends combine i before all have sent combine i, after dispatch_wait i.
        For the same reason no message of round i is overwritten before it is read. Errors: EPStateError otherwise.
        """
        state = self._copied()
        for write in writes:
            words = state.region(write.region)
            if write.region.endswith("_recv_count") and words[write.index] != MAX_FINITE:
                raise EPStateError(
                    f"rank {self.rank}: a second signal for {write.region}{list(write.index)}, which "
                    f"holds {words[write.index]} that nobody has taken yet"
                )
            words[write.index] = write.value
            if write.region == "dispatch_recv_count":
                state.messages_here[write.index] = write.value
            elif write.region == "combine_recv_buf":
                state.rows_here[write.index] = True
        return state

    def _copied(self) -> "RankState":
        return replace(self, **{name: getattr(self, name).copy() for name in COPIED})


MESSAGES = "dispatch_send_buf", "dispatch_recv_buf", "combine_send_buf", "combine_recv_buf"
BUFFERS = (*MESSAGES, "dispatch_recv_count", "combine_recv_count")
COPIED = (*BUFFERS, "ep_counters", "messages_here", "rows_here")


def sent(state: RankState, writes: list[Write], result=None) -> Step:
    """The Step of a state and all its writes. Writes to the rank itself are applied to its next state."""
    own = [write for write in writes if write.dst_rank == state.rank]
    others = [write for write in writes if write.dst_rank != state.rank]
    return Step(state.received(own) if own else state, others, result)
