"""The memory layout of one rank: a table of regions in one allocation, and the counter regions in ep_counters.

Symmetric regions, which peers write, come first. They have the same offset on every rank, because their shapes depend
only on the configuration. Every region starts at a multiple of 256 bytes.
"""

from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

from epmoe_ref.config import MAX_GPUS_PER_NODE, EPConfig

REGION_ALIGNMENT = 256  # bytes
# A word of recv_count in dispatch. Below ANNOUNCED all of its messages have arrived.
#   count (at most max_tokens_per_rank)   the number of messages: the plain signal
#   DESCRIBED + bits                      a signal that also describes up to 8 messages: epmoe/kernels/pairs/message.py
#   ANNOUNCED + count                     count messages are under way
#   MAX_FINITE                            nothing has arrived (so too in combine)
DESCRIBED = 2**57
ANNOUNCED = 2**62
MAX_FINITE = 2**64 - 1
# the sentinel, a word of combine_lamport_buf that has not arrived: epmoe/kernels/lamport.py
ABSENT = 2**32 - 1
# the most that buffer may have; polling its rows pays off only for small batches
LAMPORT_BYTES = 16 << 20
LAMPORT_EXPERTS = 2048  # at most
STATUS_WORDS = 16  # meanings: epmoe/kernels/status.py


class Region(NamedTuple):
    """One array of a rank: bytes [offset, offset + nbytes) of the rank's allocation.

    index_names: a name for each axis, to describe places ("recv_count[local_expert 2, src_rank 1]").
    initial: the value of every element before the first round; None: any bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    nbytes: int
    index_names: tuple[str, ...]
    initial: int | None


class Message(NamedTuple):
    """The parts of a dispatch message, `payload | src_info | topk_info`, in bytes; the payload starts at 0."""

    token_size: int
    src_info_offset: int
    topk_info_offset: int
    msg_bytes: int


@cache
def message(cfg: EPConfig) -> Message:
    """Offsets inside one message. The token format gives the payload's size; each part is padded to cfg.alignment."""
    from .kernels import formats  # the sizes of formats are defined with their encoders

    token_size = formats.of(cfg).token_size
    topk_info = token_size + _align_up(4, cfg.alignment)
    return Message(token_size, token_size, topk_info, topk_info + _align_up(2 * cfg.top_k, cfg.alignment))


def combine_msg_bytes(cfg: EPConfig) -> int:
    """Bytes of a combine message: just a row of the output type, since its place gives (token, k)."""
    return cfg.hidden * cfg.combine_itemsize


def has_lamport_buf(cfg: EPConfig) -> bool:
    """Whether a rank has combine_lamport_buf, a second buffer in which combine's rows need no signals."""
    nbytes = cfg.max_tokens_per_rank * cfg.top_k * combine_msg_bytes(cfg)
    return (
        nbytes <= LAMPORT_BYTES
        and cfg.n_experts <= LAMPORT_EXPERTS
        and cfg.p2p_world_size == cfg.n_ranks
        and not cfg.skip_a2a
    )


@cache
def regions(cfg: EPConfig) -> tuple[Region, ...]:
    """Every region of one rank, in memory order.

    Under skip_a2a the src_rank axis has length 1. combine_send_buf exists only for SHMEM, combine_lamport_buf only if
    has_lamport_buf.
    """
    msg_bytes, combine_bytes = message(cfg).msg_bytes, combine_msg_bytes(cfg)
    local, ranks, tokens = cfg.n_local_experts, cfg.n_src_ranks, cfg.max_tokens_per_rank
    by_peer, last_counters = ("local_expert", "src_rank"), counter_regions(cfg)[-1]
    table = [
        ("dispatch_recv_buf", (local, ranks, tokens, msg_bytes), np.uint8, (*by_peer, "slot", "byte"), None),
        ("dispatch_recv_count", (local, ranks), np.uint64, by_peer, MAX_FINITE),
        ("combine_recv_buf", (tokens, cfg.top_k, combine_bytes), np.uint8, ("token", "k", "byte"), None),
        ("combine_recv_count", (local, ranks), np.uint64, by_peer, MAX_FINITE),
    ]
    if has_lamport_buf(cfg):
        table.append(
            ("combine_lamport_buf", (tokens, cfg.top_k, combine_bytes // 4), np.uint32, ("token", "k", "word"), ABSENT)
        )
    table.append(("dispatch_send_buf", (tokens, msg_bytes), np.uint8, ("token", "byte"), None))
    if cfg.use_shmem:
        table.append(("combine_send_buf", (local * ranks * tokens, combine_bytes), np.uint8, ("row", "byte"), None))
    table += [
        ("ep_counters", ((last_counters.offset + last_counters.nbytes) // 4,), np.int32, ("word",), 0),
        ("status", (STATUS_WORDS,), np.int32, ("word",), 0),
    ]
    placed, offset = [], 0
    for name, shape, dtype, index_names, initial in table:
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        placed.append(Region(name, shape, dtype, offset, nbytes, index_names, initial))
        offset += _align_up(nbytes, REGION_ALIGNMENT)
    return tuple(placed)


def region(cfg: EPConfig, name: str) -> Region:
    """The region of that name."""
    return next(r for r in regions(cfg) if r.name == name)


def total_bytes(cfg: EPConfig) -> int:
    """Bytes of one rank's allocation."""
    last = regions(cfg)[-1]
    return last.offset + _align_up(last.nbytes, REGION_ALIGNMENT)


@cache
def counter_regions(cfg: EPConfig) -> tuple[Region, ...]:
    """The regions inside ep_counters, including A to G; offsets in bytes from the start of ep_counters.

    Shapes show the words that are used. `reserved`, `finished`, A and B have one word per (local expert, rank), which
    is the whole region except under skip_a2a. Of C the first n_local_experts words are used. A's last axis is
    (READY + end row, count). EPLocalSyncCounters has the same offsets and size, taken from the specification page
    independently; a test compares the two.
    """
    local, ranks, n = cfg.n_local_experts, cfg.n_src_ranks, cfg.n_experts
    send, wait, reduce = 0, 2 * n + MAX_GPUS_PER_NODE, 6 * n + MAX_GPUS_PER_NODE + 4
    by_source = ("local_expert", "src_rank")
    table = [
        ("reserved", send + RESERVED * n, (local, ranks), ("local_expert", "dst_rank")),
        ("finished", send + FINISHED * n, (local, ranks), ("local_expert", "dst_rank")),
        ("rank_completion", send + RANK_COMPLETION * n, (MAX_GPUS_PER_NODE,), ("peer",)),
        ("A", wait + REGION_A * n, (local, ranks, 2), (*by_source, "field")),
        ("B", wait + REGION_B * n, (local, ranks), by_source),
        ("C", wait + REGION_C * n, (local,), ("local_expert",)),
        ("D", wait + REGION_D * n, (1,), ("word",)),
        ("E", wait + REGION_D * n + 1, (1,), ("word",)),
        ("F", wait + REGION_D * n + 2, (1,), ("word",)),
        ("G", wait + REGION_D * n + 3, (1,), ("word",)),
        ("combine_ready", reduce, (2 * n,), ("reducing_block",)),
    ]
    word = np.dtype(np.int32)
    return tuple(
        Region(name, shape, word, 4 * offset, 4 * prod(shape), index_names, 0)
        for name, offset, shape, index_names in table
    )


def named_words(cfg: EPConfig) -> list[tuple]:
    """Every region of a rank as (name, offset, shape, dtype, index_names), with ep_counters split into its regions."""
    rows = []
    for r in regions(cfg):
        if r.name != "ep_counters":
            rows.append((r.name, r.offset, r.shape, r.dtype, r.index_names))
            continue
        rows += [(c.name, r.offset + c.offset, c.shape, c.dtype, c.index_names) for c in counter_regions(cfg)]
    return rows


# Starts of the counter regions inside their kernel's region, in units of n_experts int32 words.
RESERVED, FINISHED, RANK_COMPLETION = 0, 1, 2  # dispatch_async: n, n, 8 words
# dispatch_wait = combine_async: 2n, n, n, then D E F G
REGION_A, REGION_B, REGION_C, REGION_D = 0, 2, 3, 4


def _align_up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple
