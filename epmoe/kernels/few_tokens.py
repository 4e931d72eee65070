"""Few tokens: a block for each destination rank does all that concerns it, so that no block waits for another's word.

With a handful of tokens a dispatch takes as long as the longest chain of steps that wait for each other. Here the
block of a destination counts what its experts get, gives out the slots itself, in shared memory, sends, and signals
behind one barrier: `reserved` and `finished` are not needed, nor an announcement, since nothing is long under way.
All counts are told at that one time, zeros too: a release waits until the peer has acknowledged what was sent before.
Receivers see nothing unusual: counts whose messages are there already. A launch has no more blocks and threads than
have work to do, since a thread that has none costs the others time at each step.
"""

from epmoe import layout
from epmoe.device import (ballot, block_dim, block_idx, device_fn, ffs, i32, lane_id, load_u64, n_warps,
                          shared_add_i32, shared_array, store_i32, syncthreads, syncthreads_or, thread_idx, u32,
                          u64, warp_id)
from epmoe.device import int32, uint64

from . import ahead, formats, ids, stamps, transport
from .division import divided
from .formats.row_copy import most_parts
from .pieces import BF16_BYTES

MOST_TOKENS = 8         # of a rank; beyond, one block a destination takes longer than all together
MOST_EXPERTS = 2048     # of a rank, in shared memory
RECEIVERS = 32          # blocks that receive
THREADS_A_TOKEN = 256   # of a block; as many as load a row of 14 kB in one go, four vectors each


def applies(cfg, shares):
    """Whether the configuration has this way: payloads are shared, and nobody needs them in send_buf."""
    encodes_for_itself = cfg.fused_shared_expert and not formats.of(cfg).direct
    return shares and not cfg.skip_a2a and not encodes_for_itself and cfg.n_local_experts <= MOST_EXPERTS


def size(cfg, shares, blocks, threads, num_tokens):
    """(blocks, threads) of a launch that may have the given ones; any size is right, this one is quick."""
    if not applies(cfg, shares) or num_tokens > MOST_TOKENS:
        return blocks, threads
    most = max(2 * cfg.n_ranks, cfg.n_ranks + RECEIVERS)
    return min(blocks, most), min(threads, THREADS_A_TOKEN * max(1, num_tokens))


def make(cfg, block, mark, scale_of, pieces):
    """Device function send_few(params, topk_ids, tokens, num_tokens, my_rank, failed) -> whether it had to give up.

    For all sending blocks, n_ranks at least, and at most MOST_TOKENS tokens. scale_of: device function params ->
    input scale.
    """
    fmt, sizes, to = formats.of(cfg), layout.message(cfg), transport.make(cfg, block)
    load_id, clean_id, record_id = ids.make(cfg)
    carries, store_trailers = pieces.carries, pieces.store_trailers
    recv_buf, signal, direct, encode_part = to.recv_buf, to.signal, fmt.direct, fmt.encode_part
    ask, put = ahead.piece(sizes.token_size)
    most = most_parts(sizes.token_size) if direct else fmt.encode_parts
    top_k, local, n_ranks, tokens_per_rank = cfg.top_k, cfg.n_local_experts, cfg.n_ranks, cfg.max_tokens_per_rank
    row_bytes, msg_bytes, n_slots = cfg.hidden * BF16_BYTES, sizes.msg_bytes, MOST_TOKENS * cfg.top_k
    n_carriers = max(1, MOST_TOKENS)
    p_clean, p_status = block.offset("clean_topk_ids"), block.offset("status")

    @device_fn
    def id_of(topk_ids, token, num_tokens, lane):
        """The id in the slot of this lane, -1 where there is no such token."""
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
    def place_token(params, to_buf, value, token, owner, my_rank, wanted, places, experts, carriers, lane):
        """A warp cleans a token's ids and gives places to its messages to the owner; place 0 to all others."""
        expert = clean_id(value, i32(0), lane)
        is_there = expert >= 0 and expert // local == owner
        place, carrier = u64(0), u32(ballot(carries(expert) and is_there))
        if is_there:
            slot = shared_add_i32(wanted, i32(expert % local), i32(1))
            row = u64(expert % local * n_ranks + my_rank) * u64(tokens_per_rank) + u64(slot)
            place = u64(to_buf + row * u64(msg_bytes))
        if lane < top_k:
            places[token * top_k + lane], experts[token * top_k + lane] = place, expert
        if lane == 0:
            carriers[token] = i32(i32(ffs(carrier)) - 1)
        if owner == my_rank:        # one of the blocks
            if lane < top_k:
                store_i32(u64(load_u64(params + u64(p_clean))) + u64(4) * u64(token * top_k + lane), expert)
            if value != expert:
                record_id(value, expert, token, lane, u64(load_u64(params + u64(p_status))))

    @device_fn
    def send_piece(params, tokens, unit, n_parts, held, places, carriers, lane):
        """A warp writes a piece of a token's payload, if it goes there."""
        token = divided(unit, n_parts)
        part = i32(unit - token * n_parts)
        if carriers[token] >= 0:
            place, src = u64(places[token * top_k + carriers[token]]), u64(tokens + u64(token) * u64(row_bytes))
            if direct:
                put(place, src, part, n_parts, lane, held)
            else:
                encode_part(src, place, scale_of(params), part, n_parts, lane)

    @device_fn
    def send_all(params, tokens, num_tokens, n_parts, my_rank, held, places, experts, carriers, lane):
        """Pieces of payloads, then trailers, which other warps send if there are enough."""
        unit, n_pieces = i32(warp_id()), i32(num_tokens * n_parts)
        while unit < n_pieces + num_tokens:
            if unit < n_pieces:
                if unit != warp_id():
                    held = ask_piece(tokens, unit, num_tokens, n_parts, lane)
                send_piece(params, tokens, unit, n_parts, held, places, carriers, lane)
            elif carriers[unit - n_pieces] >= 0:
                token = i32(unit - n_pieces)
                m = i32(token * top_k + carriers[token])
                store_trailers(params, u64(places[m]), token, m, my_rank, places, experts, lane)
            unit = i32(unit + n_warps())

    @device_fn
    def send_to(params, topk_ids, tokens, num_tokens, owner, my_rank, failed, wanted, places, experts, carriers):
        """All that a block does for the rank `owner`; whether it had to give up."""
        # everything that comes from memory is under way before any of it is waited for
        lane, token, i = i32(lane_id()), i32(warp_id()), i32(thread_idx())
        to_buf, value = recv_buf(params, owner, my_rank), id_of(topk_ids, token, num_tokens, lane)
        free = i32(max(0, n_warps() - num_tokens))     # warps that need not send trailers
        n_parts = i32(max(1, min(most, divided(free, i32(max(1, num_tokens))))))
        held = ask_piece(tokens, token, num_tokens, n_parts, lane)
        while i < local:
            wanted[i] = 0
            i = i32(i + block_dim())
        syncthreads()                           # zeros before counts
        while token < num_tokens:
            place_token(params, to_buf, value, token, owner, my_rank, wanted, places, experts, carriers, lane)
            token = i32(token + n_warps())
            value = id_of(topk_ids, token, num_tokens, lane)
        if syncthreads_or(failed):              # counts and places by all warps
            return True
        mark(params, stamps.CLAIMED)
        send_all(params, tokens, num_tokens, n_parts, my_rank, held, places, experts, carriers, lane)
        syncthreads()                           # all messages by all warps, which the signals release
        i = i32(thread_idx())
        while i < local:
            signal(params, owner, my_rank, i32(i * n_ranks + my_rank), i32(wanted[i]))
            i = i32(i + block_dim())
        mark(params, stamps.SENT)
        return False

    @device_fn
    def send_few(params, topk_ids, tokens, num_tokens, my_rank, failed):
        places, experts = shared_array(n_slots, uint64), shared_array(n_slots, int32)
        wanted, carriers = shared_array(local, int32), shared_array(n_carriers, int32)
        if block_idx() < n_ranks:
            return send_to(params, topk_ids, tokens, num_tokens, i32(block_idx()), my_rank, failed, wanted, places,
                           experts, carriers)
        return syncthreads_or(failed) != 0

    return send_few
