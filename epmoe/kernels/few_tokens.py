"""Small batches: one block for each dst_rank does all of its work, so that no block waits for another.

With a handful of tokens, a dispatch takes as long as its longest chain of dependent steps. The longest step is a
release, which waits until the peer has acknowledged everything sent before. So a block sends all payloads at once,
before it knows their experts, each to a fixed place: row [local expert 0, my_rank, token] of recv_buf. Then a warp
fences. Other warps clean the ids while the fence waits. The routing goes into the words of recv_count themselves
(described.py). So there are no trailers, no slots to claim in `reserved`, no pieces to count in `finished`, and no
announcement, since nothing is under way for long. A launch has only as many blocks and threads as have work, since idle
threads slow the others down at each step. A kernel for small batches has no code for more tokens, because unused code
still costs instruction fetches.
"""

from epmoe import layout
from epmoe.device import (SIM, block_dim, block_idx, device_fn, fence_acq_rel_sys, i32, lane_id, n_warps,
                          shared_add_i32, shared_array, store_i32, syncthreads, syncthreads_or, thread_idx, u64,
                          warp_id)
from epmoe.device import int32

from . import ahead, described, formats, ids, stamps, transport
from .described import share_of, word_of
from .division import divided
from .formats.row_copy import most_parts
from .launch import SIMULATOR_BLOCKS
from .pieces import BF16_BYTES

MOST_TOKENS = described.MOST_TOKENS     # of a rank
MOST_EXPERTS = 2048     # of a rank, in shared memory
RECEIVERS_A_TOKEN, MOST_RECEIVERS = 16, 32      # blocks that receive
THREADS_A_TOKEN, MOST_THREADS = 256, 512        # of a block; 256 load a row of 14 kB in one go, four vectors each


def applies(cfg, shares):
    """Whether the configuration allows this: payloads are shared, and not needed in send_buf."""
    encodes_for_itself = cfg.fused_shared_expert and not formats.of(cfg).direct
    return shares and not cfg.skip_a2a and not encodes_for_itself and cfg.n_local_experts <= MOST_EXPERTS


def are_all(cfg, shares, launch):
    """Whether no launch can have more tokens, nor fewer blocks than this way wants; with fewer it is right as well."""
    return most(cfg, shares, launch) >= cfg.max_tokens_per_rank


def most(cfg, shares, launch):
    """Up to how many tokens a rank's launches go this way; -1 for none, as there are fewer blocks than it wants."""
    blocks = launch.n_sms or (SIMULATOR_BLOCKS if SIM else 2 * cfg.n_ranks)
    return MOST_TOKENS if applies(cfg, shares) and blocks >= 2 * cfg.n_ranks else -1


def size(cfg, shares, blocks, threads, num_tokens):
    """(blocks, threads) of a launch that may have the given ones; any size is right, this one is quick."""
    if not applies(cfg, shares) or num_tokens > MOST_TOKENS:
        return blocks, threads
    n = max(1, num_tokens)
    most = max(2 * cfg.n_ranks, cfg.n_ranks + min(MOST_RECEIVERS, RECEIVERS_A_TOKEN * n))
    return min(blocks, most), min(threads, MOST_THREADS, THREADS_A_TOKEN * n)


def size_of_senders(cfg, shares, blocks, threads, num_tokens):
    """The same of a launch that only sends."""
    n_blocks, n_threads = size(cfg, shares, blocks, threads, num_tokens)
    if applies(cfg, shares) and num_tokens <= MOST_TOKENS and blocks >= 2 * cfg.n_ranks:
        n_blocks = cfg.n_ranks
    return n_blocks, n_threads


def size_of_receivers(cfg, shares, blocks, threads, num_tokens):
    """The same of a launch that only receives, whatever number of tokens others have: at most cfg's."""
    n = max(1, cfg.max_tokens_per_rank)
    if not applies(cfg, shares) or n > MOST_TOKENS:
        return blocks, threads
    return min(blocks, MOST_RECEIVERS, RECEIVERS_A_TOKEN * n), min(threads, MOST_THREADS, THREADS_A_TOKEN * n)


def make(cfg, block, mark, scale_of):
    """Device function send_few(params, topk_ids, tokens, num_tokens, my_rank, n_senders, failed) -> whether it gave up.

    For blocks [0, n_senders), each for every n_senders-th destination, and at most MOST_TOKENS tokens. scale_of: device
    function params -> input scale.
    """
    fmt, sizes, to = formats.of(cfg), layout.message(cfg), transport.make(cfg, block)
    load_id, clean_id, record_id = ids.make(cfg)
    recv_buf, tell, direct, encode_part = to.recv_buf, to.tell, fmt.direct, fmt.encode_part
    ask, put = ahead.piece(sizes.token_size)
    most = most_parts(sizes.token_size) if direct else fmt.encode_parts
    top_k, local, n_ranks, tokens_per_rank = cfg.top_k, cfg.n_local_experts, cfg.n_ranks, cfg.max_tokens_per_rank
    row_bytes, msg_bytes = cfg.hidden * BF16_BYTES, sizes.msg_bytes
    p_clean, p_status = block.index("clean_topk_ids"), block.index("status")

    @device_fn
    def id_of(topk_ids, token, num_tokens, lane):
        """The id of this lane's k, -1 if there is no such token."""
        value = i32(-1)
        if token < num_tokens:
            value = load_id(topk_ids, token, lane)
        return value

    @device_fn
    def ask_piece(tokens, unit, num_tokens, n_parts, lane):
        """Begins to load the piece of a payload that is this unit."""
        if direct and unit < num_tokens * n_parts:
            token = divided(unit, n_parts)
            return ask(tokens + u64(token) * u64(row_bytes), i32(unit - token * n_parts), n_parts, lane)
        return ahead.nothing()

    @device_fn
    def send_payloads(params, tokens, num_tokens, n_parts, to_buf, my_rank, held, lane):
        """Warps write pieces of all payloads; held: of a warp's first one, on their way."""
        unit, first_row = i32(warp_id()), u64(my_rank) * u64(tokens_per_rank)
        while unit < num_tokens * n_parts:
            if unit != warp_id():
                held = ask_piece(tokens, unit, num_tokens, n_parts, lane)
            token = divided(unit, n_parts)
            place, part = u64(to_buf + (first_row + u64(token)) * u64(msg_bytes)), i32(unit - token * n_parts)
            src = u64(tokens + u64(token) * u64(row_bytes))
            if direct:
                put(place, src, part, n_parts, lane, held)
            else:
                encode_part(src, place, scale_of(params), part, n_parts, lane)
            unit = i32(unit + n_warps())

    @device_fn
    def describe(params, value, token, owner, my_rank, low, high, lane):
        """A warp cleans a token's ids, and says to those of the owner's experts that it comes."""
        expert = clean_id(value, i32(0), lane)
        if expert >= 0 and expert // local == owner:
            add_low, add_high = share_of(token, lane)
            shared_add_i32(low, i32(expert % local), add_low)
            shared_add_i32(high, i32(expert % local), add_high)
        if owner == my_rank:        # one of the blocks
            if lane < top_k:
                store_i32(params[p_clean] + u64(4) * u64(token * top_k + lane), expert)
            if value != expert:
                record_id(value, expert, token, lane, params[p_status])

    @device_fn
    def send_to(params, topk_ids, tokens, num_tokens, owner, my_rank, failed, low, high):
        """All that a block does for the rank `owner`; whether it had to give up."""
        # everything that comes from memory is under way before any of it is waited for
        lane, token, i = i32(lane_id()), i32(warp_id() - 1), i32(thread_idx())
        if token < 0:
            token = i32(n_warps() - 1)          # the warp that fences has ids to clean only where tokens are many
        to_buf = recv_buf(params, owner, my_rank)
        n_parts = i32(max(1, min(most, divided(n_warps(), i32(max(1, num_tokens))))))
        held = ask_piece(tokens, i32(warp_id()), num_tokens, n_parts, lane)
        value = id_of(topk_ids, token, num_tokens, lane)
        while i < local:
            low[i], high[i] = 0, 0
            i = i32(i + block_dim())
        if syncthreads_or(failed):              # and zeros before sums
            return True
        send_payloads(params, tokens, num_tokens, n_parts, to_buf, my_rank, held, lane)
        syncthreads()                           # payloads by all warps, before one releases them
        if warp_id() == 0:
            fence_acq_rel_sys()                 # release: one for all words, since each waits for the peer
        while token < num_tokens:
            describe(params, value, token, owner, my_rank, low, high, lane)
            token = i32(token + n_warps())
            value = id_of(topk_ids, token, num_tokens, lane)
        mark(params, stamps.CLAIMED)
        syncthreads()                           # sums by all warps
        if warp_id() == 0:
            while lane < local:
                tell(params, owner, i32(lane * n_ranks + my_rank), word_of(low[lane], high[lane]))
                lane = i32(lane + 32)
        mark(params, stamps.SENT)
        return False

    @device_fn
    def send_few(params, topk_ids, tokens, num_tokens, my_rank, n_senders, failed):
        low, high = shared_array(local, int32), shared_array(local, int32)
        owner, gave_up = i32(block_idx()), False
        while owner < n_ranks and not gave_up:
            gave_up = send_to(params, topk_ids, tokens, num_tokens, owner, my_rank, failed, low, high)
            owner = i32(owner + n_senders)
            if owner < n_ranks:
                syncthreads()                   # all words told, before their sums are cleared
        return gave_up

    return send_few
