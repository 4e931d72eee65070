"""Which words of a rank's memory are fixed after each step, which are free, and by which rule.

The model (epmoe_ref.protocol) has a value for every word. Other implementations may have another value where the
protocol leaves it open: the slots of messages in a segment are a permutation, some words are scratch, and some may be
zeroed early. Two memories are equal if they agree in this form.
"""

from typing import Any, NamedTuple

import numpy as np

from .config import EPConfig
from .formats import format_of
from .protocol.state import STEPS, RankState


class Words(NamedTuple):
    """What one region of a rank must hold: each word equals `values`, or `or_else` where given, unless it is free.

    values: the region in the shape of its indices; dispatch_recv_buf with the messages of a segment `in_token_order`.
    or_else: None, or a second allowed value for each word. free: bool, words that may hold anything. index_names: one
    an axis. rule: the sentence of the protocol that fixes the words after the rank's last step.
    """

    values: np.ndarray
    or_else: np.ndarray | None
    free: np.ndarray
    index_names: tuple[str, ...]
    rule: str

    def wrong(self, got: np.ndarray) -> np.ndarray:
        """Indices where `got`, in the same form, breaks the rule: int [n, axes], in order."""
        right = self.free | (got == self.values)
        if self.or_else is not None:
            right |= got == self.or_else
        return np.argwhere(~right)


def words(state: RankState, under_way: np.ndarray | None = None) -> dict[str, Words]:
    """What the recv_bufs, the recv_counts and the eleven counter regions of a rank must hold, by region.

    send_bufs are left out, because only their owner reads them. Free are: bytes of dispatch_recv_buf past the count
    of a segment, and padding bytes of messages; rows of combine_recv_buf that nobody has sent in this round; always B
    and C; with a fused shared expert, F and G between dispatch_async and dispatch_wait. Between combine_async and
    combine_wait some words may hold one of two values: entries of A (kept or 0), finished (0 or the rows returned),
    rank_completion (0 or the signals sent to each rank of the p2p world).

    under_way: None, or bool [n_local_experts, n_ranks]: segments of other p2p worlds whose signal has not arrived,
    although the step that sent it has ended (SHMEM puts complete later). Their counts and counted messages are free.
    """
    cfg, done = state.cfg, STEPS[STEPS.index(state.next_step) - 1]
    found = {"dispatch_recv_buf": _messages(state), "combine_recv_buf": _rows(state)}
    if under_way is not None:
        _free_under_way(state, found, under_way)
    for name, index_names in INDEX_NAMES.items():
        values = state.region(name)
        free, or_else = np.zeros(values.shape, bool), None
        if name in "BC" or (name in "FG" and done == "dispatch_async" and cfg.fused_shared_expert):
            free[:] = True
        if name.endswith("_recv_count") and under_way is not None:
            free |= under_way
        if done == "combine_async":
            or_else = _or_else(state, name)
        found[name] = Words(values, or_else, free, index_names, rule(name, done))
    return found


def may_be_under_way(state: RankState) -> np.ndarray:
    """Segments whose signal may arrive after the step that sent it has ended: bool [n_local_experts, n_ranks].

    Other p2p worlds write these words, after dispatch_async and combine_async. A wait ends when all have arrived.
    """
    cfg = state.cfg
    other_world = cfg.world(np.arange(cfg.n_src_ranks)) != cfg.world(state.rank)
    sending = not cfg.skip_a2a and state.next_step.endswith("_wait")
    return np.broadcast_to(other_world & sending, state.messages_here.shape)


def in_token_order(cfg: EPConfig, recv_buf: np.ndarray, messages_here: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A dispatch_recv_buf with the messages of each segment sorted by token: (sorted copy, the slot each came from).

    messages_here: int [n_local_experts, n_ranks], how many slots of each segment hold messages. A token has at most
    one message in a segment, so this form is the same for every order in which slots were claimed. The slots are int
    [n_local_experts, n_ranks, max_tokens_per_rank].
    """
    at = format_of(cfg).src_info_offset()
    token = np.ascontiguousarray(recv_buf[..., at : at + 4]).view("<i4")[..., 0].astype(np.int64)
    token[np.arange(cfg.max_tokens_per_rank) >= messages_here[..., None]] = 2**31
    order = np.argsort(token, axis=-1, kind="stable")
    return np.take_along_axis(recv_buf, order[..., None], axis=-2), order


def rule(name: str, done: str) -> str:
    """The sentence that fixes the words of a region after the step `done`."""
    return RULES.get((name, done)) or RULES[name]


def _free_under_way(state: RankState, found: dict[str, Words], under_way: np.ndarray) -> None:
    cfg, ids = state.cfg, state.topk_ids
    if state.next_step == "dispatch_wait":
        found["dispatch_recv_buf"].free[under_way] = True
    elif state.next_step == "combine_wait" and under_way.any():
        rows = (ids >= 0) & under_way[cfg.local_expert(ids), cfg.owner(ids)]
        found["combine_recv_buf"].free[: len(ids)][rows] = True


def _messages(state: RankState) -> Words:
    cfg, fmt = state.cfg, format_of(state.cfg)
    values, _ = in_token_order(cfg, state.dispatch_recv_buf, state.messages_here)
    padding = np.ones(fmt.msg_size(), bool)
    scales = fmt.scales_offset_in_payload()
    for start, size in (
        (0, fmt.values_size()),
        (scales, fmt.scales_size()),
        (fmt.src_info_offset(), 4),
        (fmt.topk_info_offset(), 2 * cfg.top_k),
    ):
        padding[start : start + size] = False
    empty = np.arange(cfg.max_tokens_per_rank) >= state.messages_here[..., None]
    names = ("local_expert", "src_rank", "slot", "byte")
    return Words(values, None, empty[..., None] | padding, names, RULES["dispatch_recv_buf"])


def _rows(state: RankState) -> Words:
    free = np.repeat(~state.rows_here[..., None], state.combine_recv_buf.shape[-1], axis=-1)
    return Words(state.combine_recv_buf, None, free, ("token", "k", "byte"), RULES["combine_recv_buf"])


def _or_else(state: RankState, name: str) -> np.ndarray | None:
    cfg, values = state.cfg, state.region(name)
    if name == "A":
        return np.zeros_like(values)
    if name == "finished":
        return state.region("A")[..., 1]
    if name == "rank_completion":
        signals = np.zeros_like(values)
        world = [rank for rank in range(cfg.n_ranks) if cfg.world(rank) == cfg.world(state.rank)]
        signals[[cfg.world_rank(rank) for rank in ([state.rank] if cfg.skip_a2a else world)]] = cfg.n_local_experts
        return signals
    return None


_SEGMENT, _DST = ("local_expert", "src_rank"), ("local_expert", "dst_rank")
INDEX_NAMES: dict[str, tuple[str, ...]] = {
    "dispatch_recv_count": _SEGMENT,
    "combine_recv_count": _SEGMENT,
    "reserved": _DST,
    "finished": _DST,
    "rank_completion": ("peer",),
    "A": (*_SEGMENT, "field"),
    "B": _SEGMENT,
    "C": ("local_expert",),
    "D": ("word",),
    "E": ("word",),
    "F": ("word",),
    "G": ("word",),
    "combine_wait": ("reducing_block",),
}

_RESET = "when dispatch_wait has ended, reserved, finished, rank completion, D, E, F and G are 0"
_RESET_C = "when combine_wait has ended, A, reserved, finished, rank completion and the combine_wait region are 0"
_ARRIVED = "a count word is MAX_FINITE until the signal arrives, then the number of {}, perhaps 0"
RULES: dict[Any, str] = {
    "dispatch_recv_buf": "the message of pair (t, k), payload | src_info | topk_info, goes to recv_buf[local_expert, "
    "src_rank, slot] of its expert's owner; the slots of a segment are 0 .. count - 1, each once",
    "combine_recv_buf": "the row of pair (t, k) goes to recv_buf[t, k] of the rank that the token came from",
    "dispatch_recv_count": "when dispatch_wait has ended, every dispatch recv_count word is MAX_FINITE again",
    ("dispatch_recv_count", "dispatch_async"): _ARRIVED.format("messages of (local_expert, src_rank)"),
    ("dispatch_recv_count", "combine_wait"): _ARRIVED.format("messages of (local_expert, src_rank)"),
    "combine_recv_count": "when combine_wait has ended, every combine recv_count word is MAX_FINITE again",
    ("combine_recv_count", "dispatch_wait"): _ARRIVED.format("rows returned by (local_expert of src_rank, src_rank)"),
    ("combine_recv_count", "combine_async"): _ARRIVED.format("rows returned by (local_expert of src_rank, src_rank)"),
    "reserved": _RESET,
    "finished": _RESET,
    "rank_completion": _RESET,
    "A": _RESET_C,
    ("reserved", "dispatch_async"): "reserved is the next free slot: after dispatch_async the number of messages to "
    "(local_expert, dst_rank); dispatch_wait resets it",
    ("finished", "dispatch_async"): "finished counts the messages completely written to (local_expert, dst_rank); "
    "dispatch_wait resets it",
    ("rank_completion", "dispatch_async"): "rank completion counts the signals already written to each peer of the p2p "
    "world: n_local_experts of them; dispatch_wait resets it",
    ("A", "dispatch_wait"): "A[2i] = READY + end row, A[2i+1] = count, i = local_expert * n_ranks + src_rank, READY = "
    "1024; end rows include the shared expert's rows and the format's padding",
    ("A", "combine_async"): "combine_async reads A; an entry is zeroed only after everybody who reads it has read it",
    ("finished", "combine_async"): "in combine, finished may count the rows written of (local_expert, src_rank)",
    ("rank_completion", "combine_async"): "in combine, rank completion may count the signals to each peer",
    **{(name, "combine_wait"): _RESET_C for name in ("reserved", "finished", "rank_completion")},
    "B": "B is scratch between steps",
    "C": "C is scratch between steps",
    "D": _RESET,
    "E": _RESET,
    "F": _RESET,
    "G": _RESET,
    "combine_wait": _RESET_C,
}
