"""Dispatch of at most 8 tokens: one block for each dst_rank does all sending to it; no block waits for another.

With so few tokens, a dispatch takes as long as its longest chain of dependent steps. The longest step is a
release, which waits until the peer has acknowledged everything sent before. So
1. a block sends all payloads at once, before it knows their experts, each to a fixed place: row [local expert 0,
   my_rank, token] of recv_buf.
2. After a barrier warp 0 fences. Meanwhile the other warps clean the ids, and sum up each local expert's word.
3. Warp 0 writes these words, packed signals (message.py), into the peer's recv_count.
So there are no trailers, no slots to claim in `reserved`, no parts to count in `finished`, and no announcement, since
nothing is under way for long. A launch has only as many blocks and threads as have work, since idle threads slow the
others down at each step. If no launch can have more tokens, the kernel has no code for them, because unused code still
costs instruction fetches.
"""

from epmoe.device import (SIM, block_dim, block_idx, device_fn, fence_acq_rel_sys, i32, int32, lane_id, load16_nc,
                          n_warps, shared_add_i32, shared_array, store_i32, syncthreads, syncthreads_or, thread_idx,
                          u64, warp_id)

from .. import formats, ids, stamps
from ..bits import parts_of_each, split
from ..formats.row_copy import copy_in_halves, most_parts, no_vectors, part_bounds
from ..launch import SIMULATOR_BLOCKS
from ..params import BF16_BYTES
from . import message, peers
from .send import scale_of

HELD = 4        # vectors of a part that a lane holds


def applies(cfg, tuning):
    """Whether the configuration allows this path: few experts; payloads are shared, and not needed in send_buf."""
    needs_send_buf = cfg.fused_shared_expert and not formats.of(cfg).direct     # shared rows are read there
    return message.shares_payloads(cfg) and not needs_send_buf and cfg.n_local_experts <= tuning.few_experts


def most(cfg, launch, tuning):
    """The most tokens that a rank's launches send this way; -1 for none: cfg forbids it, or blocks are too few."""
    wanted = tuning.few_blocks_a_rank * cfg.n_ranks
    blocks = launch.n_sms or (SIMULATOR_BLOCKS if SIM else wanted)
    return tuning.few_tokens if applies(cfg, tuning) and blocks >= wanted else -1


def size(cfg, tuning, halves, blocks, threads, num_tokens):
    """(blocks, threads) of a launch that may have the given numbers. Any size is correct; this one is fast.

    halves: "sends", "receives" or "both". Receivers go by cfg's maximum, since peers may have that many tokens.
    """
    receivers, senders, largest = blocks, cfg.n_ranks, cfg.max_tokens_per_rank
    n = max(1, largest if halves == "receives" else num_tokens)
    if not applies(cfg, tuning) or n > tuning.few_tokens:
        return blocks, threads
    threads = min(threads, tuning.few_threads, tuning.few_threads_a_token * n)
    if halves == "sends":
        return senders if blocks >= 2 * senders else blocks, threads
    if largest <= tuning.few_tokens:
        receivers = min(tuning.few_receivers, tuning.few_receivers_a_token * largest)
    return min(blocks, receivers if halves == "receives" else senders + max(senders, receivers)), threads


def make(build):
    """Device function send_few(call, n_senders, failed) -> whether it gave up.

    Called by blocks [0, n_senders). Each serves every n_senders-th dst_rank. At most tuning.few_tokens tokens.
    """
    cfg, mark = build.cfg, stamps.make(build.trace)
    fmt, msg, to, input_scale = formats.of(cfg), message.make(cfg), peers.make(cfg), scale_of(build.input_scale)
    of_ids = ids.make(cfg.n_experts, cfg.top_k, build.id_bytes)
    direct, encode_part = fmt.direct, fmt.encode_part
    bounds, (ask, store_held), nothing = part_bounds(fmt.token_size), copy_in_halves(HELD, load16_nc), no_vectors(HELD)
    parts_limit = most_parts(fmt.token_size) if direct else fmt.encode_parts
    top_k, local, n_ranks, row_bytes = cfg.top_k, cfg.n_local_experts, cfg.n_ranks, cfg.hidden * BF16_BYTES

    @device_fn
    def id_of(call, token):
        """The id at the k of this lane, -1 if there is no such token."""
        return of_ids.load(call.topk_ids, token, lane_id()) if token < call.num_tokens else i32(-1)

    @device_fn
    def ask_part(call, unit, n_parts):
        """Begins to load a payload's part `unit`, for `store_held`; a format that encodes loads nothing yet."""
        if direct and unit < call.num_tokens * n_parts:
            token, part = split(unit, n_parts)
            first, end = bounds(part, n_parts)
            return ask(call.input_tokens + u64(token) * u64(row_bytes), first, end)
        return nothing()

    @device_fn
    def send_payloads(call, to_buf, n_parts, held):
        """Warps write parts of all payloads. held: a warp's first part, whose loads are under way."""
        unit = i32(warp_id())
        while unit < call.num_tokens * n_parts:
            if unit != warp_id():
                held = ask_part(call, unit, n_parts)
            token, part = split(unit, n_parts)
            place = msg.at(to_buf, call.my_rank, token)         # of local expert 0
            src = u64(call.input_tokens + u64(token) * u64(row_bytes))
            if direct:
                first, end = bounds(part, n_parts)
                store_held(place, src, first, end, held)
            else:
                encode_part(src, place, input_scale(call), part, n_parts, lane_id())
            unit = i32(unit + n_warps())

    @device_fn
    def add_token(call, value, token, dst_rank, low, high):
        """A warp cleans a token's ids, and adds the token to the words of its experts at dst_rank."""
        lane = i32(lane_id())
        expert = of_ids.clean(value, i32(0), lane)
        if expert >= 0 and expert // local == dst_rank:
            add_low, add_high = message.bits_of(token, lane)
            shared_add_i32(low, i32(expert % local), add_low)
            shared_add_i32(high, i32(expert % local), add_high)
        if dst_rank == call.my_rank:        # so that only one block does this
            if lane < top_k:
                store_i32(call.clean_topk_ids + u64(4) * u64(token * top_k + lane), expert)
            of_ids.record(value, expert, token, lane, call.status)

    @device_fn
    def send_to(call, dst_rank, low, high, failed):
        """A block does all work for one rank -> whether it had to give up. low, high: halves of its experts' words."""
        # everything that comes from memory is under way before any of it is waited for
        lane, token, i = i32(lane_id()), i32(warp_id() - 1), i32(thread_idx())
        if token < 0:
            token = i32(n_warps() - 1)          # the warp that fences cleans ids only if tokens are as many as warps
        to_buf = to.recv_buf(call, dst_rank)
        n_parts = parts_of_each(call.num_tokens, n_warps(), parts_limit)
        held = ask_part(call, i32(warp_id()), n_parts)
        value = id_of(call, token)
        while i < local:
            low[i], high[i] = 0, 0
            i = i32(i + block_dim())
        if syncthreads_or(failed):              # and zeros before sums
            return True
        send_payloads(call, to_buf, n_parts, held)
        syncthreads()                           # payloads by all warps, before one releases them
        if warp_id() == 0:
            fence_acq_rel_sys()                 # one release for all words: each release awaits the peer
        while token < call.num_tokens:
            add_token(call, value, token, dst_rank, low, high)
            token = i32(token + n_warps())
            value = id_of(call, token)
        mark(call, stamps.CLAIMED)
        syncthreads()                           # sums by all warps
        if warp_id() == 0:
            while lane < local:
                to.write_word(call, dst_rank, i32(lane * n_ranks + call.my_rank), message.word_of(low[lane], high[lane]))
                lane = i32(lane + 32)
        mark(call, stamps.SENT)
        return False

    @device_fn
    def send_few(call, n_senders, failed):
        low, high = shared_array(local, int32), shared_array(local, int32)
        dst_rank, gave_up = i32(block_idx()), False
        while dst_rank < n_ranks and not gave_up:
            gave_up = send_to(call, dst_rank, low, high, failed)
            dst_rank = i32(dst_rank + n_senders)
            if dst_rank < n_ranks:
                syncthreads()                   # all words written, before their sums are cleared
        return gave_up

    return send_few
