"""The status region: errors that a kernel found, as int32 words that the host reads when it synchronises anyway.

Kernels do not raise; they record. The first thread whose wait expires writes the words FAILED..BLOCK. Every other wait
of this rank, in this launch and in later ones, then ends when it next looks at FAILED. Bad ids are counted, and treated
as -1; they have no other effect.
"""

import numpy as np
from epmoe.device import (atomic_add_relaxed_gpu_i32, atomic_cas_relaxed_gpu_i32, block_dim, block_idx, device_fn, i32,
                          ld_relaxed_gpu_i32, store_i32, thread_idx, u64)
from epmoe.layout import ANNOUNCED
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError, PeerTimeout

# Words of the region
FAILED = 0                      # 0, or the phase whose wait expired
WAITED_FOR = 1                  # one of FOR_...
INDEX = 2                       # which word of the region that was waited for
EXPECTED, SEEN = 3, 4
BLOCK = 5
BAD_IDS, REPEATED_IDS = 8, 9    # how many were treated as -1
BAD_TOKEN, BAD_K, BAD_ID = 10, 11, 12    # the first that was recorded: 1 + token, k, the id
MISSING_RANKS = 13              # FOR_ROWS: a bit for each src_rank of which something has not come

# Phases that wait; combine_async never waits, and dispatch_async only in the plain kernels, for blocks of its own rank
DISPATCH_ASYNC, DISPATCH_WAIT, COMBINE_WAIT = 1, 2, 4
PHASES = {DISPATCH_ASYNC: "dispatch_async", DISPATCH_WAIT: "dispatch_wait", COMBINE_WAIT: "combine_wait"}

# The purposes of waits
FOR_FINISHED, FOR_RECV_COUNT, FOR_SEND_BUF, FOR_ROWS, FOR_READY, FOR_REDUCING = 1, 2, 4, 8, 16, 32
LOCAL_WAITS = {FOR_FINISHED: "finished[{}]: messages that this rank's own blocks were to write",
               FOR_SEND_BUF: "send_buf_ready: tokens that this rank's own blocks were to encode",
               FOR_READY: "the ready flag E, which block 0 raises when it has numbered the rows",
               FOR_REDUCING: "the ready flag of block {}, which block 0 raises when all rows have come back"}


@device_fn
def has_failed(status):
    """Whether some wait of this rank has expired."""
    return ld_relaxed_gpu_i32(status + u64(4 * FAILED)) != 0


@device_fn
def failed_before(status):
    """Whether an earlier wait of this rank expired. Only the last thread of a block looks, as it has nothing to load.

    The result goes into the block's next vote. So the look costs no barrier of its own, and its load overlaps with
    other loads.
    """
    return thread_idx() == block_dim() - 1 and has_failed(status)


@device_fn
def record_expired(status, phase, waited_for, index, expected, seen):
    """Records an expired wait. Only a rank's first one is kept."""
    if atomic_cas_relaxed_gpu_i32(status + u64(4 * FAILED), i32(0), i32(phase)) == 0:
        store_i32(status + u64(4 * WAITED_FOR), i32(waited_for))
        store_i32(status + u64(4 * INDEX), i32(index))
        store_i32(status + u64(4 * EXPECTED), i32(expected))
        store_i32(status + u64(4 * SEEN), i32(seen))
        store_i32(status + u64(4 * BLOCK), i32(block_idx()))


@device_fn
def record_bad_id(status, word, token, k, value):
    """Counts an id that is treated as -1, in `word`: BAD_IDS or REPEATED_IDS; records the first one and its place."""
    if atomic_add_relaxed_gpu_i32(status + u64(4 * word), i32(1)) == 0:
        if atomic_cas_relaxed_gpu_i32(status + u64(4 * BAD_TOKEN), i32(0), i32(token + 1)) == 0:
            store_i32(status + u64(4 * BAD_K), i32(k))
            store_i32(status + u64(4 * BAD_ID), i32(value))


def raise_if_failed(words, cfg: EPConfig, rank: int, timeout_s: float, recv_count=None):
    """Raises PeerTimeout if a wait of this rank expired.

    words: the status region [STATUS_WORDS] int32. recv_count: this rank's words [n_local_experts, n_src_ranks] uint64
    of the phase that failed (see `failed_recv_count`): those without a signal are named as missing.
    """
    words = np.asarray(words)
    if not words[FAILED]:
        return
    phase, waited_for, index = PHASES[int(words[FAILED])], int(words[WAITED_FOR]), int(words[INDEX])
    if waited_for == FOR_RECV_COUNT:
        what, remedy = _missing_signals(cfg, rank, index, recv_count)
    elif waited_for == FOR_ROWS:
        some = "no word that its combine has begun"
        if index >= 0:          # a segment, (local expert, src_rank), of which a row is missing
            local_expert, src_rank = divmod(index, cfg.n_src_ranks)
            some = f"rows of expert {src_rank * cfg.n_local_experts + local_expert} are missing"
        missing = int(words[MISSING_RANKS])
        names = ", ".join(str(r) for r in range(cfg.n_src_ranks) if missing >> r & 1)
        what = f"nothing, or not all, from src_rank {names} ({some})"
        remedy = ": has it ended, or made another call, or changed src_info? reset() by all ranks starts anew"
    else:
        remedy = ""
        what = (f"waited for {LOCAL_WAITS[waited_for].format(index)} (expected {words[EXPECTED]}, saw {words[SEEN]}); "
                "its blocks do not all run at once: lower n_sms or share the device less")
    raise PeerTimeout(f"rank {rank}, {phase}: {what}; gave up after timeout={timeout_s:g} s{remedy}")


def failed_recv_count(words) -> str | None:
    """Name of the recv_count region that `raise_if_failed` wants, or None if nothing failed."""
    phase = int(np.asarray(words)[FAILED])
    return {0: None, COMBINE_WAIT: "combine_recv_count"}.get(phase, "dispatch_recv_count")


def raise_if_bad_ids(words, cfg: EPConfig, rank: int):
    """Raises EPValueError if the kernels met ids that they treated as -1."""
    words = np.asarray(words)
    outside, repeated = int(words[BAD_IDS]), int(words[REPEATED_IDS])
    if not outside and not repeated:
        return
    value = int(words[BAD_ID])
    inside = 0 <= value < cfg.n_experts
    rule = "which this token selects already" if inside else f"outside [0, n_experts={cfg.n_experts})"
    raise EPValueError(f"rank {rank}: topk_ids[{words[BAD_TOKEN] - 1}, {words[BAD_K]}] is {value}, {rule}; "
                       f"{outside} ids outside the range and {repeated} repeated ids were treated as -1 (no expert): "
                       "give each token distinct ids, and -1 where there is no expert")


def _missing_signals(cfg, rank, index, recv_count):
    ranks = cfg.n_src_ranks
    if recv_count is None:
        missing = [divmod(index, ranks)]
    else:
        missing = np.argwhere(np.asarray(recv_count) >= np.uint64(ANNOUNCED)).tolist()
    if not missing:
        return "signals came after the timeout", ": give a longer one if ranks may be so slow"
    first, by_src_rank = rank * cfg.n_local_experts, {}
    for local_expert, src_rank in missing:
        by_src_rank.setdefault(rank if cfg.skip_a2a else src_rank, []).append(first + local_expert)
    parts = []
    for src_rank, experts in sorted(by_src_rank.items()):
        some = ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
        parts.append(f"src_rank {src_rank} ({len(experts)} of {cfg.n_local_experts} experts: {some})")
    remedy = ": has it ended, or made another call? reset() by all ranks starts anew"
    return "no signal from " + "; ".join(parts), remedy
