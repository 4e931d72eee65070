"""Few tokens: a block for each destination rank does all that concerns it, so that no block waits for another's word.

With a handful of tokens a dispatch takes as long as the longest chain of steps that wait for each other. Here the
block of a destination counts what its experts get, gives out the slots itself, in shared memory, sends, and signals
behind one barrier: `reserved` and `finished` are not needed, nor an announcement, since nothing is long under way.
Receivers see nothing unusual: counts whose messages are there already.
"""

from epmoe import layout
from epmoe.device import (ballot, block_dim, block_idx, device_fn, ffs, i32, lane_id, load_u64, n_warps, prefetch,
                          shared_add_i32, shared_array, store_i32, syncthreads, syncthreads_or, thread_idx, u64,
                          warp_id)
from epmoe.device import int32, uint64

from . import ahead, formats, ids, stamps, transport
from .formats.row_copy import copy_part, most_parts
from .pieces import BF16_BYTES

MOST_TOKENS = 8         # of a rank; beyond, one block a destination takes longer than all together
MOST_EXPERTS = 2048     # of a rank, in shared memory


def applies(cfg, shares):
    """Whether the configuration has this way: payloads are shared, and nobody needs them in send_buf."""
    encodes_for_itself = cfg.fused_shared_expert and not formats.of(cfg).direct
    return shares and not cfg.skip_a2a and not encodes_for_itself and cfg.n_local_experts <= MOST_EXPERTS


def make(cfg, block, mark, scale_of, pieces):
    """Device function send_few(params, topk_ids, tokens, num_tokens, my_rank, failed) -> whether it had to give up.

    For all sending blocks, n_ranks at least, and at most MOST_TOKENS tokens. scale_of: device function params ->
    input scale.
    """
    fmt, sizes, to = formats.of(cfg), layout.message(cfg), transport.make(cfg, block)
    load_id, clean_id, record_id = ids.make(cfg)
    carries, store_trailers = pieces.carries, pieces.store_trailers
    recv_buf, signal, direct, encode_part = to.recv_buf, to.signal, fmt.direct, fmt.encode_part
    copy_payload = copy_part(sizes.token_size, read_only=True)
    most = most_parts(sizes.token_size) if direct else fmt.encode_parts
    fetch_row = ahead.span(cfg.hidden * BF16_BYTES)
    top_k, local, n_ranks, tokens_per_rank = cfg.top_k, cfg.n_local_experts, cfg.n_ranks, cfg.max_tokens_per_rank
    row_bytes, msg_bytes, n_slots = cfg.hidden * BF16_BYTES, sizes.msg_bytes, MOST_TOKENS * cfg.top_k
    p_clean, p_status = block.offset("clean_topk_ids"), block.offset("status")

    @device_fn
    def fetch(topk_ids, tokens, num_tokens):
        """Asks for ids and rows."""
        if thread_idx() < num_tokens:
            prefetch(topk_ids + u64(4) * u64(thread_idx() * top_k))
        token = i32(0)
        while token < num_tokens:
            fetch_row(tokens + u64(token) * u64(row_bytes))
            token = i32(token + 1)

    @device_fn
    def place_token(params, topk_ids, token, owner, my_rank, wanted, places, experts, lane):
        """A warp cleans a token's ids and gives places to its messages to the owner; place 0 to all others."""
        value = load_id(topk_ids, token, lane)
        expert = clean_id(value, i32(0), lane)
        place = u64(0)
        if expert >= 0 and expert // local == owner:
            slot = shared_add_i32(wanted, i32(expert % local), i32(1))
            row = u64(expert % local * n_ranks + my_rank) * u64(tokens_per_rank) + u64(slot)
            place = u64(recv_buf(params, owner, my_rank) + row * u64(msg_bytes))
        if lane < top_k:
            places[token * top_k + lane], experts[token * top_k + lane] = place, expert
        if owner == my_rank:        # one of the blocks
            if lane < top_k:
                store_i32(u64(load_u64(params + u64(p_clean))) + u64(4) * u64(token * top_k + lane), expert)
            if value != expert:
                record_id(value, expert, token, lane, u64(load_u64(params + u64(p_status))))

    @device_fn
    def send_piece(params, tokens, token, part, n_parts, my_rank, places, experts, lane):
        """A warp writes a piece of a token's payload, and all its trailers with the first one, if it goes there."""
        expert = i32(-1)
        if lane < top_k and places[token * top_k + lane] != u64(0):
            expert = i32(experts[token * top_k + lane])
        carrier = i32(i32(ffs(ballot(carries(expert)))) - 1)
        if carrier >= 0:
            m = i32(token * top_k + carrier)
            place, src = u64(places[m]), u64(tokens + u64(token) * u64(row_bytes))
            if direct:
                copy_payload(place, src, part, n_parts, lane)
            else:
                encode_part(src, place, scale_of(params), part, n_parts, lane)
            if part == 0:
                store_trailers(params, place, token, m, my_rank, places, experts, lane)

    @device_fn
    def send_to(params, topk_ids, tokens, num_tokens, owner, my_rank, failed, wanted, places, experts):
        lane, token, i = i32(lane_id()), i32(warp_id()), i32(thread_idx())
        while i < local:
            wanted[i] = 0
            i = i32(i + block_dim())
        syncthreads()                           # zeros before counts
        while token < num_tokens:
            place_token(params, topk_ids, token, owner, my_rank, wanted, places, experts, lane)
            token = i32(token + n_warps())
        if syncthreads_or(failed):              # counts and places by all warps
            return True
        mark(params, stamps.CLAIMED)
        i = i32(block_dim() - 1 - thread_idx())         # the last warps may have no piece to send
        while i < local:
            if wanted[i] == 0:
                signal(params, owner, my_rank, i32(i * n_ranks + my_rank), i32(0))
            i = i32(i + block_dim())
        n_parts = i32(max(1, min(most, i32(n_warps() // max(1, num_tokens)))))
        unit = i32(warp_id())
        while unit < num_tokens * n_parts:
            send_piece(params, tokens, i32(unit // n_parts), i32(unit % n_parts), n_parts, my_rank, places, experts,
                       lane)
            unit = i32(unit + n_warps())
        syncthreads()                           # all messages by all warps, which the signals release
        i = i32(thread_idx())
        while i < local:
            if wanted[i] > 0:
                signal(params, owner, my_rank, i32(i * n_ranks + my_rank), i32(wanted[i]))
            i = i32(i + block_dim())
        mark(params, stamps.SENT)
        return False

    @device_fn
    def send_few(params, topk_ids, tokens, num_tokens, my_rank, failed):
        places, experts = shared_array(n_slots, uint64), shared_array(n_slots, int32)
        wanted = shared_array(local, int32)
        if block_idx() < n_ranks:
            fetch(topk_ids, tokens, num_tokens)
            return send_to(params, topk_ids, tokens, num_tokens, i32(block_idx()), my_rank, failed, wanted, places,
                           experts)
        return syncthreads_or(failed) != 0

    return send_few
