"""The unit that one warp sends: a piece of a payload, and with the first piece the trailers that belong to it.

Plain: each message has its own payload. Shared: a payload goes to a rank once, in the token's message to its lowest
expert there. The trailers of the token's other messages to that rank refer to it. A piece of a shared payload
counts as finished for each of these messages, so the signal of any expert covers the payloads that its messages
refer to.
"""

from typing import NamedTuple

from epmoe import layout
from epmoe.device import device_fn, i32, n_warps, shfl_idx, store16, syncwarp, u32, u64

from . import formats, message, transport
from .division import divided
from .formats.row_copy import copy_part, most_parts

BF16_BYTES = 2
LANES = 32


class Pieces(NamedTuple):
    """Device functions, and the most payloads that a token has.

    payloads: of a token, at most.
    count(n_tokens) -> into how many pieces a payload is cut, by blocks that have at most so many tokens: as many as
        give every warp one. More would not pay: each piece costs its warp a round trip to the peer.
    carries(expert): of the cleaned ids of a token, one a lane, those whose messages have a payload.
    send(params, token, m, part, n_parts, counts, my_rank, places, experts, lane): a warp writes a piece of message m of
        a batch, which has a payload, and if `counts` counts it as finished. places, experts: of the batch's messages,
        top_k a token; place 0 where nothing is sent.
    store_trailer(message_at, token, at_slot, experts, lane): that of a message with a payload of its own.
    store_trailers(params, place, token, m, my_rank, places, experts, lane): those of all messages of the token to the
        rank of message m, which lies at `place` and carries the payload.
    """

    payloads: int
    count: callable
    carries: callable
    send: callable
    store_trailer: callable
    store_trailers: callable


def staged_at(block, msg_bytes):
    """Device function (params, token) -> address of the token's message, or only its payload, in send_buf."""
    p_send = block.index("send_buf_p")

    @device_fn
    def staged(params, token):
        return params[p_send] + u64(token) * u64(msg_bytes)

    return staged


def make(cfg, block, finish, shares) -> Pieces:
    """The functions for one parameter block. finish: the signaller's. shares: whether payloads are shared."""
    fmt, sizes, to = formats.of(cfg), layout.message(cfg), transport.make(cfg, block)
    recv_buf, crosses, is_far, put, complete = to.recv_buf, to.crosses, to.is_far, to.put, to.complete
    n_vectors, vector = message.make(cfg)[:2]
    direct, staged = fmt.direct, staged_at(block, sizes.msg_bytes)
    copy_payload, most = copy_part(sizes.token_size, read_only=direct), most_parts(sizes.token_size)
    top_k, local = cfg.top_k, cfg.n_local_experts
    row_bytes, msg_bytes, token_size = cfg.hidden * BF16_BYTES, sizes.msg_bytes, sizes.token_size
    payloads = min(top_k, cfg.n_src_ranks) if shares else top_k         # of a token, at most
    p_tokens = block.index("input_tokens")

    @device_fn
    def count(n_tokens):
        return i32(max(1, min(most, divided(n_warps(), i32(n_tokens * payloads)))))

    @device_fn
    def carries_always(expert):
        return expert >= 0

    @device_fn
    def carries_if_lowest(expert):
        first, is_lowest, slot = i32(expert - expert % local), expert >= 0, i32(0)
        while slot < top_k:
            other = i32(shfl_idx(expert, slot))
            if other >= first and other < expert:       # of the same rank
                is_lowest = False
            slot = i32(slot + 1)
        return is_lowest

    @device_fn
    def store_trailer(message_at, token, at_slot, experts, lane):
        expert = i32(-1)
        if lane < top_k:
            expert = i32(experts[at_slot + lane])
        a, b, c, d = vector(token, u32(0), expert, lane)
        if lane < n_vectors:
            store16(message_at + u64(token_size) + u64(16) * u64(lane), a, b, c, d)

    @device_fn
    def store_trailers(params, place, token, m, my_rank, places, experts, lane):
        """Side by side: as many at a time as there are lanes for their vectors."""
        at_slot, owner = i32(m - m % top_k), i32(experts[m] // local)
        expert = i32(-1)
        if lane < top_k:
            expert = i32(experts[at_slot + lane])
        carrier = u32((place - recv_buf(params, owner, my_rank)) // u64(msg_bytes) + u64(1))
        first = i32(0)
        while first < top_k * n_vectors:
            slot = i32((first + lane) // n_vectors)
            i = i32(first + lane - slot * n_vectors)
            there, target, reference = u64(0), i32(-1), u32(0)
            if slot < top_k:
                there, target = u64(places[at_slot + slot]), i32(experts[at_slot + slot])
            if there != place:
                reference = carrier
            a, b, c, d = vector(token, reference, expert, i)
            if there != u64(0) and target // local == owner:
                store16(there + u64(token_size) + u64(16) * u64(i), a, b, c, d)
            first = i32(first + LANES)

    @device_fn
    def source_of(params, token):
        """The address of a token's payload before it is sent."""
        src = params[p_tokens] + u64(token) * u64(row_bytes)
        if not direct:
            src = staged(params, token)
        return src

    @device_fn
    def send_plain(params, token, m, part, n_parts, counts, my_rank, places, experts, lane):
        expert, place = i32(experts[m]), u64(places[m])
        is_near = True
        if crosses:
            is_near = not is_far(i32(expert // local), my_rank)
        if is_near:
            copy_payload(place, source_of(params, token), part, n_parts, lane)
            if part == 0:
                store_trailer(place, token, i32(m - m % top_k), experts, lane)
        elif part == 0:
            put(place, staged(params, token), msg_bytes, i32(expert // local))
            complete()
        syncwarp()                      # the piece by all lanes, before lane 0 releases it
        if counts and lane == 0:
            finish(params, expert, my_rank, 1)

    @device_fn
    def send_shared(params, token, m, part, n_parts, counts, my_rank, places, experts, lane):
        place, at_slot = u64(places[m]), i32(m - m % top_k)
        copy_payload(place, source_of(params, token), part, n_parts, lane)
        if part == 0:
            store_trailers(params, place, token, m, my_rank, places, experts, lane)
        syncwarp()                      # the piece by all lanes, before each of them releases it to one expert
        if counts and lane < top_k:
            expert = i32(experts[at_slot + lane])
            if places[at_slot + lane] != u64(0) and expert // local == experts[m] // local:
                finish(params, expert, my_rank, 1)

    if shares:
        return Pieces(payloads, count, carries_if_lowest, send_shared, store_trailer, store_trailers)
    return Pieces(payloads, count, carries_always, send_plain, store_trailer, store_trailers)
