"""The sending blocks of dispatch send tokens to the owners of their experts, in an order that receivers can follow.

Steps 2 and 3 of dispatch.py. A block takes a batch of tokens.
1. It claims a slot for each message; a warp takes a token. It encodes the payloads; several warps may share a row.
2. It orders its messages by local expert, and for each local expert by dst_rank, from its own rank on. All blocks send
   in this order. So the links to all peers stay busy, and ranks seldom send to the same peer at the same time. Messages
   to the first experts are complete long before the last message, and their receivers copy them meanwhile.
3. It sends parts of payloads, a warp each, 16 bytes a lane. The trailers go with the first part. A part of a shared
   payload counts as finished for all messages that refer to it, so the signal of any expert covers its payloads.

Block 0 counts and announces (signal.py). It sends no tokens, unless fewer than tuning.counter_from blocks send.
"""

from typing import NamedTuple

from epmoe.device import (atomic_add_relaxed_gpu_i32, block_dim, block_idx, device_fn, f32, i32, int32, lane_id,
                          n_warps, prefetch, shared_array, shfl_idx, store_i32, syncthreads, syncthreads_or, syncwarp,
                          thread_idx, u32, u32_as_f32, u64, uint64, warp_id)

from .. import formats, ids, stamps
from ..bits import around, divided_up, parts_of_each, split
from ..formats.row_copy import copy_part, most_parts
from ..params import BF16_BYTES, LANES, by_threads, by_warps, namespace
from ..plain import counters
from ..prefetch import SECTOR, fetch_sectors, n_sectors
from . import message, peers, shared_expert, signal


class Batch(NamedTuple):
    """Tokens first, first + stride, ... of a block, n of them, and their messages, top_k a token, in shared memory.

    places: addresses, 0 if nothing is sent. experts: cleaned ids. keys: messages are sent in ascending order of these;
    n_experts for a message without a payload. order: the numbers of the messages in this order.
    """

    first: int
    stride: int
    n: int
    places: object
    experts: object
    keys: object
    order: object


def batch_of(cfg, tuning):
    """Number of tokens that a block sends at a time."""
    return max(1, tuning.batch_messages // cfg.top_k)


def scale_of(input_scale):
    """Device function call -> the input scale: input_scale(0), or for None the number given at the call."""
    if input_scale is None:
        return device_fn(lambda call: u32_as_f32(u32(call.input_scale)))
    given = device_fn(input_scale)
    return device_fn(lambda call: f32(given(i32(0))))


def make(build):
    """Device function send_tokens(call, n_senders, failed) -> whether it had to give up.

    Called by blocks [0, n_senders). Block 0 announces the counts. The others end with a barrier. failed: from
    failed_before; if true anywhere in the block, nothing is sent.
    """
    cfg, mark, shares = build.cfg, stamps.make(build.trace), message.shares_payloads(build.cfg)
    fmt, word, to, msg = formats.of(cfg), counters.words(cfg), peers.make(cfg), message.make(cfg)
    of_ids, own_share = ids.make(cfg.n_experts, cfg.top_k, build.id_bytes), shared_expert.make(cfg)
    signals = signal.make(build)
    payloads = _payloads(build, signals.finish)
    crosses, direct, fused_share, skip_a2a = to.crosses, fmt.direct, cfg.fused_shared_expert, cfg.skip_a2a
    top_k, local, n_ranks, parts_limit = cfg.top_k, cfg.n_local_experts, cfg.n_ranks, most_parts(fmt.token_size)
    row_bytes, batch_size, no_payload = cfg.hidden * BF16_BYTES, batch_of(cfg, build.tuning), cfg.n_experts
    n_payloads = min(top_k, cfg.n_src_ranks) if shares else top_k       # of a token, at most
    n_slots, counter_from, token_bytes = batch_size * top_k, build.tuning.counter_from, build.id_bytes * top_k
    id_sectors, row_sectors, word_sectors = n_sectors(token_bytes), n_sectors(row_bytes), n_sectors(8 * cfg.n_experts)

    @by_warps
    def claim_token(i, call, batch):
        """A warp cleans the ids of token i of the batch and claims slots for its messages; lane k holds the id at k."""
        token, lane = i32(batch.first + i * batch.stride), i32(lane_id())
        value = of_ids.load(call.topk_ids, token, lane)
        expert = of_ids.clean(value, i32(0), lane)
        of_ids.record(value, expert, token, lane, call.status)
        has_payload = payloads.carries(expert)
        if lane < top_k:
            store_i32(call.clean_topk_ids + u64(4) * u64(token * top_k + lane), expert)
            place, key, dst_rank, local_expert = u64(0), i32(no_payload), i32(expert // local), i32(expert % local)
            if expert >= 0 and (not skip_a2a or dst_rank == call.my_rank):
                slot = atomic_add_relaxed_gpu_i32(word.reserved(call.ep_counters, signals.segment_of(expert)), i32(1))
                place = msg.at(to.recv_buf(call, dst_rank), word.segment(local_expert, call.my_rank), slot)
                if has_payload:
                    turn = around(i32(dst_rank - call.my_rank + n_ranks), n_ranks)  # this rank, the next one, ...
                    key = i32(local_expert * n_ranks + turn)
            m = i32(i * top_k + lane)
            batch.places[m], batch.experts[m], batch.keys[m] = place, expert, key

    @by_threads
    def put_in_order(m, batch):
        """Puts messages in the order of their keys. Messages without a payload come last."""
        key, before, j, n = i32(batch.keys[m]), i32(0), i32(0), i32(batch.n * top_k)
        while j < n:
            other = i32(batch.keys[j])
            if other < key or (other == key and j < m):
                before = i32(before + 1)
            j = i32(j + 1)
        batch.order[before] = m

    count_encoded = by_threads(lambda i, call, batch: own_share.encoded(call, i32(batch.first + i * batch.stride)))

    @device_fn
    def send_parts(call, batch, n_parts):
        """Warps send parts. Each adds its own to `finished`, or if none has two, a thread those of a message."""
        unit, key, n_messages = i32(warp_id()), i32(-1), i32(batch.n * top_k)
        several = batch.n * n_payloads * n_parts > n_warps()        # a warp may have several parts
        while unit < n_messages * n_parts and key != no_payload:
            i, part = split(unit, n_parts)
            m = i32(batch.order[i])
            key = i32(batch.keys[m])
            if key != no_payload:
                payloads.send(call, batch, m, part, n_parts)
                syncwarp()              # the part by all lanes, before one of them releases it
                if several:
                    payloads.finish(call, batch, m)
            unit = i32(unit + n_warps())
        if not several:
            syncthreads()               # all parts by all warps, before each thread releases a message
            m = i32(thread_idx())
            while m < n_messages:
                if batch.places[m] != u64(0):
                    signals.finish(call, i32(batch.experts[m]), n_parts)
                m = i32(m + block_dim())

    @device_fn
    def prefetch_first(call, first, stride):
        """Prefetches the ids of the block's tokens, the first one's row, and the counters, all at once."""
        if first < call.num_tokens:
            i, sector = split(i32(thread_idx()), i32(id_sectors))
            token = i32(first + i * stride)
            if i < batch_size and token < call.num_tokens:
                prefetch(call.topk_ids + u64(token_bytes) * u64(token) + u64(SECTOR) * u64(sector))
            fetch_sectors(row_sectors, call.input_tokens + u64(first) * u64(row_bytes))
            fetch_sectors(word_sectors, word.reserved(call.ep_counters, 0))     # and finished, which follows it
        if block_idx() == 0:                                    # which counts all ids
            fetch_sectors(divided_up(i32(call.num_tokens * token_bytes), i32(SECTOR)), call.topk_ids)

    @device_fn
    def send_batch(call, batch, n_parts):
        claim_token(batch.n, call, batch)
        mark(call, stamps.CLAIMED)
        if not direct:
            payloads.encode(call, batch)
            mark(call, stamps.ENCODED)
        syncthreads()                       # places, keys and payloads by all warps
        if fused_share:
            count_encoded(batch.n, call, batch)
        if crosses:
            payloads.stage(batch.n, call, batch)
        put_in_order(batch.n * top_k, batch)
        syncthreads()                       # the order, and whole messages, by all threads
        send_parts(call, batch, n_parts)
        mark(call, stamps.SENT)
        syncthreads()                       # all have read the batch, and all is written at the end

    @device_fn
    def send_tokens(call, n_senders, failed):
        places, order = shared_array(n_slots, uint64), shared_array(n_slots, int32)
        experts, keys = shared_array(n_slots, int32), shared_array(n_slots, int32)
        # consecutive tokens go to different blocks, and the first ones not to the block that announces
        stride, first = i32(n_senders), i32(n_senders - 1 - block_idx())
        if n_senders >= counter_from:
            stride, first = i32(n_senders - 1), i32(block_idx() - 1)
            if block_idx() == 0:
                first = i32(call.num_tokens)
        prefetch_first(call, first, stride)     # while one thread looks whether an earlier wait failed
        # as many parts of a payload as give every warp one; more would not pay: each costs a round trip to the peer
        n_tokens = i32(max(1, min(batch_size, divided_up(i32(call.num_tokens), stride))))
        n_parts = parts_of_each(i32(n_tokens * n_payloads), n_warps(), parts_limit)
        if block_idx() == 0:
            if not signals.announce(call, n_parts, failed):
                return True
        elif syncthreads_or(failed):
            return True
        while first < call.num_tokens:
            n = i32(min(batch_size, divided_up(i32(call.num_tokens - first), stride)))
            send_batch(call, Batch(first, stride, n, places, experts, keys, order), n_parts)
            first = i32(first + n * stride)
        return False

    return send_tokens


def _payloads(build, finish_one):
    """Namespace "payloads" of device functions. m: the number of a message of a batch.

    encode(call, batch): a block writes payloads to send_buf. stage(n, call, batch): it makes n whole messages of them.
    carries(expert), by a warp with a token's cleaned ids, one in each lane -> whether the message has a payload.
    send(call, batch, m, part, n_parts): a warp sends a part of message m, which has a payload, and with the first
        part trailers: its own, or for a shared payload those of all messages of the token to that rank.
    finish(call, batch, m): adds the warp's part to `finished` of each of these messages.
    """
    cfg, shares, row_bytes = build.cfg, message.shares_payloads(build.cfg), build.cfg.hidden * BF16_BYTES
    fmt, to, msg, top_k, local = formats.of(cfg), peers.make(cfg), message.make(cfg), cfg.top_k, cfg.n_local_experts
    direct, encode_part, encode_parts = fmt.direct, fmt.encode_part, fmt.encode_parts
    copy_payload, input_scale = copy_part(fmt.token_size, read_only=direct), scale_of(build.input_scale)

    @device_fn
    def ids_of(batch, m):
        """The cleaned id at the k of this lane. m: the token's first message."""
        return i32(batch.experts[m + lane_id()]) if lane_id() < top_k else i32(-1)

    @device_fn
    def encode(call, batch):
        """Encodes the payloads of a batch. If there are more warps than rows, warps share a row.

        If there are many more, only warps without a token to claim for encode, while the others claim.
        """
        claiming = i32(0) if 2 * batch.n > n_warps() else i32(batch.n)
        warps = i32(n_warps() - claiming)
        n_parts = parts_of_each(batch.n, warps, encode_parts)
        unit = i32(warp_id() - claiming)
        while unit >= 0 and unit < batch.n * n_parts:
            i, part = split(unit, n_parts)
            token = i32(batch.first + i * batch.stride)
            src = call.input_tokens + u64(token) * u64(row_bytes)
            encode_part(src, call.send_buf_p + u64(token) * u64(msg.n_bytes), input_scale(call), part, n_parts, lane_id())
            unit = i32(unit + warps)

    @by_warps
    def stage(i, call, batch):
        token = i32(batch.first + i * batch.stride)
        staged = call.send_buf_p + u64(token) * u64(msg.n_bytes)
        if direct:
            copy_payload(staged, call.input_tokens + u64(token) * u64(row_bytes), 0, 1, lane_id())
        msg.store_trailer(staged, token, ids_of(batch, i32(i * top_k)))

    @device_fn
    def carries(expert):
        first, is_lowest, k = i32(expert - expert % local), expert >= 0, i32(0)
        while shares and k < top_k:
            other = i32(shfl_idx(expert, k))
            if other >= first and other < expert:       # of the same rank
                is_lowest = False
            k = i32(k + 1)
        return is_lowest

    @device_fn
    def store_trailers(call, batch, m, token, place):
        """Stores the trailers of all messages of m's token to its rank. A lane stores a vector of one of them."""
        of_token, dst_rank = i32(m - m % top_k), i32(batch.experts[m] // local)
        lane, expert, first = i32(lane_id()), ids_of(batch, of_token), i32(0)
        carrier = u32((place - to.recv_buf(call, dst_rank)) // u64(msg.n_bytes) + u64(1))   # 1 + its row in recv_buf
        while first < top_k * msg.n_vectors:
            k = i32((first + lane) // msg.n_vectors)
            i = i32(first + lane - k * msg.n_vectors)
            there, its_expert, reference = u64(0), i32(-1), u32(0)
            if k < top_k:
                there, its_expert = u64(batch.places[of_token + k]), i32(batch.experts[of_token + k])
            if there != place:
                reference = carrier
            q = msg.vector(i, token, reference, expert)
            if there != u64(0) and its_expert // local == dst_rank:
                msg.store_vector(there, i, q)
            first = i32(first + LANES)

    @device_fn
    def send(call, batch, m, part, n_parts):
        token, place = i32(batch.first + m // top_k * batch.stride), u64(batch.places[m])
        dst_rank = i32(batch.experts[m] // local)
        staged = u64(call.send_buf_p + u64(token) * u64(msg.n_bytes))
        if not to.is_far(call, dst_rank):
            payload = call.input_tokens + u64(token) * u64(row_bytes) if direct else staged
            copy_payload(place, payload, part, n_parts, lane_id())
            if part == 0:
                if shares:
                    store_trailers(call, batch, m, token, place)
                else:
                    msg.store_trailer(place, token, ids_of(batch, i32(m - m % top_k)))
        elif part == 0:
            to.put(place, staged, msg.n_bytes, dst_rank)

    @device_fn
    def finish(call, batch, m):
        """Each lane adds the part to `finished` of one expert."""
        of_lane = i32(m - m % top_k + lane_id())
        if lane_id() < top_k and (shares or of_lane == m):
            expert = i32(batch.experts[of_lane])
            if batch.places[of_lane] != u64(0) and expert // local == batch.experts[m] // local:
                finish_one(call, expert, 1)

    return namespace("payloads", encode=encode, stage=stage, carries=carries, send=send, finish=finish)
