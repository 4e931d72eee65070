"""The communicating blocks of dispatch_async: one warp takes a token, and sends it to the owners of its experts."""

from epmoe import layout
from epmoe.device import (atomic_add_relaxed_gpu_i32, block_idx, device_fn, f32, grid_dim, i32, lane_id, load_f32,
                          load_u64, n_warps, red_add_release_gpu_i32, store_i32, syncwarp, u64, warp_id)

from . import counters, crossing, fan_out, formats, ids, message, shared_expert, transport

BF16_BYTES = 2


def _scale_of(block, input_scale):
    """Device function params -> input scale."""
    p_scale = block.offset("input_scale")
    if input_scale is None:
        @device_fn
        def given_number(params):
            return f32(load_f32(params + u64(p_scale)))

        return given_number
    given = device_fn(input_scale)

    @device_fn
    def of_function(params):
        return f32(given(i32(0)))

    return of_function


def make(cfg, block, input_scale=None):
    """Device function send_tokens(params, num_tokens, my_rank).

    input_scale: None for the number in the parameter block, or a function i -> float32 that is read at 0.
    """
    fmt, at, sizes = formats.of(cfg), counters.words(cfg), layout.message(cfg)
    id_words, trailer, peers = ids.make(cfg), message.make(cfg), transport.make(cfg, block)
    own_share, scale_of = shared_expert.make(cfg, block), _scale_of(block, input_scale)
    load_id, clean_id, record_id = id_words
    trailer_vector, n_trailer_vectors = trailer.vector, trailer.n_vectors
    recv_buf, encode, direct = peers.recv_buf, fmt.encode, fmt.direct
    crosses, stored_at, put_staged = crossing.make(cfg, block)
    encoded, share = own_share.encoded, own_share.share
    copy_payload = fan_out.copy_to_places(sizes.token_size, cfg.top_k, read_only=direct)
    copy_trailer = fan_out.store_to_places(cfg.top_k)

    top_k, local, ranks = cfg.top_k, cfg.n_local_experts, cfg.n_src_ranks
    tokens_per_rank, keeps_own, fused_share = cfg.max_tokens_per_rank, cfg.skip_a2a, cfg.fused_shared_expert
    row_bytes, msg_bytes, token_size = cfg.hidden * BF16_BYTES, sizes.msg_bytes, sizes.token_size
    p_tokens, p_topk, p_clean = block.offset("input_tokens"), block.offset("topk_ids"), block.offset("clean_topk_ids")
    p_send, p_counters, p_status = block.offset("send_buf_p"), block.offset("ep_counters"), block.offset("status")

    @device_fn
    def claim(params, expert, my_rank, words):
        """A place for one message at the expert's owner: (its address, the entry of reserved and finished)."""
        owner, local_expert = i32(expert // local), i32(expert % local)
        source, entry = i32(my_rank), i32(local_expert * ranks + owner)
        if keeps_own:
            source, entry = i32(0), i32(local_expert)
        slot = atomic_add_relaxed_gpu_i32(words + u64(at.reserved) + u64(4) * u64(entry), i32(1))
        row = u64(local_expert * ranks + source) * u64(tokens_per_rank) + u64(slot)
        return u64(recv_buf(params, owner, my_rank) + row * u64(msg_bytes)), entry

    @device_fn
    def send_token(params, token, my_rank, words, scale, in_share, lane):
        value = load_id(u64(load_u64(params + u64(p_topk))), token, lane)
        expert = clean_id(value, i32(0), lane)
        record_id(value, expert, token, lane, u64(load_u64(params + u64(p_status))))
        if lane < top_k:
            store_i32(u64(load_u64(params + u64(p_clean))) + u64(4) * u64(token * top_k + lane), expert)

        # Lane k claims for slot k; place 0 means that nothing is sent.
        place, entry = u64(0), i32(0)
        kept = expert >= 0
        if keeps_own:
            kept = kept and expert // local == my_rank
        if kept:
            place, entry = claim(params, expert, my_rank, words)

        src = u64(load_u64(params + u64(p_tokens))) + u64(token) * u64(row_bytes)
        if not direct:
            staged = u64(load_u64(params + u64(p_send))) + u64(token) * u64(msg_bytes)
            encode(src, staged, scale, lane)
            syncwarp()                  # the payload by all lanes, before any lane reads it and before `encoded`
            if in_share:
                encoded(words, lane)
            src = staged
        near, payload_at = place, place
        if crosses:
            # the whole message in send_buf too, if it goes to other worlds
            staged, owner = u64(load_u64(params + u64(p_send))) + u64(token) * u64(msg_bytes), i32(expert // local)
            near = stored_at(place, owner, my_rank, staged, lane)
            payload_at = near
            if not direct and near == staged:
                payload_at = u64(0)         # `encode` has put it there
        copy_payload(src, payload_at, lane)
        a, b, c, d = trailer_vector(token, expert, lane)
        copy_trailer(a, b, c, d, near, n_trailer_vectors, token_size, lane)
        if crosses:
            put_staged(place, owner, my_rank, staged, msg_bytes)

        syncwarp()                      # all lanes' stores of the message, before a lane releases it
        if kept:
            red_add_release_gpu_i32(words + u64(at.finished) + u64(4) * u64(entry), i32(1))  # acquired by the signaller

    @device_fn
    def send_tokens(params, num_tokens, my_rank):
        lane = lane_id()
        words = u64(load_u64(params + u64(p_counters)))
        scale = scale_of(params)
        n_rows, first = share(num_tokens, my_rank)
        # consecutive tokens go to different blocks, so that a few tokens use many multiprocessors
        n_blocks = i32(grid_dim() - 1)
        token = i32(warp_id() * n_blocks + block_idx() - 1)
        while token < num_tokens:
            in_share = fused_share and token >= first and token < first + n_rows
            send_token(params, token, my_rank, words, scale, in_share, lane)
            token = i32(token + n_warps() * n_blocks)

    return send_tokens
