"""The sending blocks of dispatch: send tokens to the owners of their experts, in an order that lets receivers follow.

A block takes a batch of tokens. It claims slots for its messages (a warp for each token), encodes payloads (steps of a
row over the warps), and sends pieces of payloads (a warp for each piece, 16 bytes a lane: pieces.py). All blocks send
in the same order: by local expert, and for each local expert to all owners in turn, so that the links to all peers stay
busy. Each rank begins with itself, so that no two ranks send to the same peer at the same time. Messages to the first
experts are complete long before the last message, and their receivers copy them meanwhile. This holds for shared
payloads too, because a payload goes with the message to its lowest expert.

One block counts and announces. It has no tokens, unless there are only a few sending blocks.
"""

from epmoe import layout
from epmoe.device import (atomic_add_relaxed_gpu_i32, block_dim, block_idx, device_fn, f32, i32, lane_id, n_warps, prefetch, shared_array, store_i32, syncthreads, syncthreads_or, thread_idx,
                          u32, u32_as_f32, u64, warp_id)
from epmoe.device import int32, uint64

from . import ahead, counters, few_tokens, formats, ids, pieces, shared_expert, signaller, stamps, transport
from .division import divided
from .formats.row_copy import copy_part
from .pieces import BF16_BYTES

MAX_MESSAGES = 512          # of a batch, in shared memory
CLERK_FROM = 4              # sending blocks from which one of them only counts and announces


def batch_of(cfg):
    """Tokens that a block sends at a time."""
    return max(1, MAX_MESSAGES // cfg.top_k)


def _scale_of(block, input_scale):
    """Device function params -> input scale."""
    p_scale = block.index("input_scale")
    if input_scale is None:
        @device_fn
        def given_number(params):
            return u32_as_f32(u32(params[p_scale]))

        return given_number
    given = device_fn(input_scale)

    @device_fn
    def of_function(params):
        return f32(given(i32(0)))

    return of_function


def make(cfg, block, mark, input_scale=None, shares=False, few=-1, are_few=False):
    """Device function send_tokens(params, topk_ids, tokens, num_tokens, my_rank, n_senders, failed) -> whether it had
    to give up.

    For blocks [0, n_senders); where the counters are used it ends with a barrier. failed: whether this thread knows of
    an earlier wait that expired; then nothing is sent. Block 0 announces the counts first, unless there are few tokens
    (few_tokens.py). input_scale: None for the number in the parameter block, or a function i -> float32 that is read at
    0. shares: whether messages to one rank share the token's payload. few: up to how many tokens few_tokens.py sends.
    are_few: there are never more.
    """
    fmt, at, sizes = formats.of(cfg), counters.words(cfg), layout.message(cfg)
    load_id, clean_id, record_id = ids.make(cfg)
    own_share, scale_of = shared_expert.make(cfg, block), _scale_of(block, input_scale)
    encoded, share = own_share.encoded, own_share.share
    to = transport.make(cfg, block)
    recv_buf, crosses = to.recv_buf, to.crosses
    announce, finish = signaller.make(cfg, block, mark)
    piece = pieces.make(cfg, block, finish, shares)
    count_pieces, carries, send_piece, store_trailer = piece.count, piece.carries, piece.send, piece.store_trailer
    n_payloads = piece.payloads
    staged_at = pieces.staged_at(block, sizes.msg_bytes)
    encode_part, encode_parts, direct = fmt.encode_part, fmt.encode_parts, fmt.direct
    copy_payload = copy_part(sizes.token_size, read_only=direct)
    fetch_row, fetch_words = ahead.span(cfg.hidden * BF16_BYTES), ahead.span(8 * cfg.n_experts)

    top_k, local, ranks, n_ranks = cfg.top_k, cfg.n_local_experts, cfg.n_src_ranks, cfg.n_ranks
    tokens_per_rank, keeps_own, fused_share = cfg.max_tokens_per_rank, cfg.skip_a2a, cfg.fused_shared_expert
    row_bytes, msg_bytes = cfg.hidden * BF16_BYTES, sizes.msg_bytes
    batch = batch_of(cfg)
    n_slots, last_key = batch * top_k, cfg.n_experts
    p_tokens, p_clean = block.index("input_tokens"), block.index("clean_topk_ids")
    p_counters, p_status = block.index("ep_counters"), block.index("status")

    @device_fn
    def claim(params, words, expert, my_rank):
        """A place for one message at the expert's owner: its address."""
        owner, local_expert = i32(expert // local), i32(expert % local)
        source, entry = i32(my_rank), i32(local_expert * ranks + owner)
        if keeps_own:
            source, entry = i32(0), i32(local_expert)
        slot = atomic_add_relaxed_gpu_i32(words + u64(at.reserved) + u64(4) * u64(entry), i32(1))
        row = u64(local_expert * ranks + source) * u64(tokens_per_rank) + u64(slot)
        return u64(recv_buf(params, owner, my_rank) + row * u64(msg_bytes))

    @device_fn
    def claim_for(params, topk_ids, clean_topk_ids, words, token, at_slot, my_rank, places, experts, keys, lane):
        """A warp cleans a token's ids and claims for them; lane k holds slot k. Place 0 means that nothing is sent, and
        the last key that there is no payload to send."""
        value = load_id(topk_ids, token, lane)
        expert = clean_id(value, i32(0), lane)
        if value != expert:
            record_id(value, expert, token, lane, params[p_status])
        has_payload = carries(expert)
        if lane < top_k:
            store_i32(clean_topk_ids + u64(4) * u64(token * top_k + lane), expert)
            kept = expert >= 0
            if keeps_own:
                kept = kept and expert // local == my_rank
            place, key = u64(0), i32(last_key)
            if kept:
                place = claim(params, words, expert, my_rank)
                turn = i32(expert // local - my_rank)       # this rank, the next one, ...
                if turn < 0:
                    turn = i32(turn + n_ranks)
                if has_payload:
                    key = i32(expert % local * n_ranks + turn)
            places[at_slot + lane], experts[at_slot + lane], keys[at_slot + lane] = place, expert, key

    @device_fn
    def put_in_order(keys, order, n):
        """order[i]: the number of the i-th message to send, of n; those without a payload come last."""
        m = i32(thread_idx())
        while m < n:
            key, before, j = i32(keys[m]), i32(0), i32(0)
            while j < n:
                other = i32(keys[j])
                if other < key or (other == key and j < m):
                    before = i32(before + 1)
                j = i32(j + 1)
            order[before] = m
            m = i32(m + block_dim())

    @device_fn
    def encode_batch(params, first, stride, n_tokens):
        """Payloads of the batch in send_buf: warps share a row where there are more warps than rows.

        Where there are many more, those encode that have no token to claim for, at the same time.
        """
        claiming = i32(n_tokens)
        if 2 * n_tokens > n_warps():
            claiming = i32(0)
        warps = i32(n_warps() - claiming)
        n_parts = i32(max(1, min(encode_parts, divided(warps, n_tokens))))
        lane, unit = i32(lane_id()), i32(warp_id() - claiming)
        while unit >= 0 and unit < n_tokens * n_parts:
            i = divided(unit, n_parts)
            token = i32(first + i * stride)
            src = params[p_tokens] + u64(token) * u64(row_bytes)
            encode_part(src, staged_at(params, token), scale_of(params), i32(unit - i * n_parts), n_parts, lane)
            unit = i32(unit + warps)

    @device_fn
    def stage_batch(params, first, stride, n_tokens, experts):
        """Whole messages in send_buf, for the network; `encode_batch` has put payloads there that are encoded."""
        lane, i = i32(lane_id()), i32(warp_id())
        while i < n_tokens:
            token = i32(first + i * stride)
            if direct:
                src = params[p_tokens] + u64(token) * u64(row_bytes)
                copy_payload(staged_at(params, token), src, 0, 1, lane)
            store_trailer(staged_at(params, token), token, i32(i * top_k), experts, lane)
            i = i32(i + n_warps())

    @device_fn
    def send_pieces(params, first, stride, n_messages, n_parts, my_rank, places, experts, keys, order):
        """Where no warp has more than one piece, all are counted together behind a barrier, else each one at once."""
        lane, unit, key = i32(lane_id()), i32(warp_id()), i32(-1)
        in_turns = n_messages // top_k * n_payloads * n_parts > n_warps()
        while unit < n_messages * n_parts and key != last_key:
            i = divided(unit, n_parts)
            m = i32(order[i])
            key = i32(keys[m])
            if key != last_key:
                token = i32(first + m // top_k * stride)
                send_piece(params, token, m, i32(unit - i * n_parts), n_parts, in_turns, my_rank, places, experts, lane)
            unit = i32(unit + n_warps())
        if not in_turns:
            syncthreads()               # all pieces by all warps, before each thread releases a message
            m = i32(thread_idx())
            while m < n_messages:
                if places[m] != u64(0):
                    finish(params, i32(experts[m]), my_rank, n_parts)
                m = i32(m + block_dim())

    @device_fn
    def shared_in(first, stride, n_tokens, first_shared, n_shared):
        """How many tokens of the batch are rows of the shared expert here."""
        n, i = i32(0), i32(0)
        while i < n_tokens:
            token = i32(first + i * stride)
            if token >= first_shared and token < first_shared + n_shared:
                n = i32(n + 1)
            i = i32(i + 1)
        return n

    @device_fn
    def fetch_ids(topk_ids, token, num_tokens):
        """Asks for the ids of a token; a thread of the block takes one."""
        if thread_idx() < batch and token < num_tokens:
            prefetch(topk_ids + u64(4) * u64(token * top_k))

    @device_fn
    def fetch_all_ids(topk_ids, num_tokens):
        """Asks for all ids, for the block that counts."""
        i = i32(thread_idx())
        while i * ahead.SECTOR < num_tokens * top_k * 4:
            prefetch(topk_ids + u64(ahead.SECTOR) * u64(i))
            i = i32(i + block_dim())

    @device_fn
    def send_many(params, topk_ids, tokens, num_tokens, my_rank, n_senders, failed):
        places, order = shared_array(n_slots, uint64), shared_array(n_slots, int32)
        experts, keys = shared_array(n_slots, int32), shared_array(n_slots, int32)
        # consecutive tokens go to different blocks, and the first ones not to the block that announces
        n_workers, first = n_senders, i32(n_senders - 1 - block_idx())
        if n_senders >= CLERK_FROM:
            n_workers, first = i32(n_senders - 1), i32(block_idx() - 1)
            if block_idx() == 0:
                first = i32(num_tokens)
        # all of these are under way at once, while one thread looks whether an earlier wait failed
        clean_topk_ids, words = params[p_clean], params[p_counters]
        if first < num_tokens:
            fetch_ids(topk_ids, i32(first + thread_idx() * n_workers), num_tokens)
            fetch_row(tokens + u64(first) * u64(row_bytes))
            fetch_words(words + u64(at.reserved))                                       # and finished, behind it
        stride = i32(n_workers)
        n_parts = count_pieces(i32(max(1, min(batch, divided(i32(num_tokens + stride - 1), stride)))))
        if block_idx() == 0:
            fetch_all_ids(topk_ids, num_tokens)
            if not announce(params, topk_ids, num_tokens, my_rank, n_parts, failed):
                return True
        elif syncthreads_or(failed):
            return True
        n_shared, first_shared = share(num_tokens, my_rank)
        lane = i32(lane_id())
        while first < num_tokens:
            n_tokens = i32(min(batch, divided(i32(num_tokens - first + stride - 1), stride)))
            i = i32(warp_id())
            while i < n_tokens:
                claim_for(params, topk_ids, clean_topk_ids, words, i32(first + i * stride), i32(i * top_k), my_rank,
                          places, experts, keys, lane)
                i = i32(i + n_warps())
            mark(params, stamps.CLAIMED)
            if not direct:
                encode_batch(params, first, stride, n_tokens)
                mark(params, stamps.ENCODED)
            syncthreads()                       # places, keys and payloads by all warps
            if fused_share and not direct:
                if thread_idx() == 0:
                    encoded(params, shared_in(first, stride, n_tokens, first_shared, n_shared))
            if crosses:
                stage_batch(params, first, stride, n_tokens, experts)
            put_in_order(keys, order, i32(n_tokens * top_k))
            syncthreads()                       # the order, and whole messages, by all threads
            send_pieces(params, first, stride, i32(n_tokens * top_k), n_parts, my_rank, places, experts, keys, order)
            mark(params, stamps.SENT)
            syncthreads()                       # all have read the batch, and all is written at the end
            first = i32(first + n_tokens * stride)
        return False

    if few < 0:
        return send_many
    send_few = few_tokens.make(cfg, block, mark, scale_of)
    if are_few:
        return send_few

    @device_fn
    def send_tokens(params, topk_ids, tokens, num_tokens, my_rank, n_senders, failed):
        if num_tokens <= few and n_senders >= n_ranks:
            return send_few(params, topk_ids, tokens, num_tokens, my_rank, n_senders, failed)
        return send_many(params, topk_ids, tokens, num_tokens, my_rank, n_senders, failed)

    return send_tokens
