"""The dispatch message `payload | src_info | topk_info`, its place in recv_buf, and its trailer: all but the payload.

The second word of src_info is 0, padding, if the message has its payload, as in the specification. If the payload is in
another message of the same token to the same rank, the word refers to that message: it is 1 + its index among all
places [local_expert, src_rank, slot] of recv_buf.

Packed signals: if a rank has at most 8 tokens, words of recv_count describe its messages, which then have no
trailers. A packed signal holds how many messages go to the expert, of which tokens, and k of each. Its bits, from the
lowest: count (4) | a bit for each token (8) | k of tokens 0 to 2 (5 each) | unused (5) | k of tokens 3 to 7 (5 each) |
DESCRIBED. Messages are in the order of their tokens. The payload of token t, for all of its experts, is in row [local
expert 0, src_rank, t] of recv_buf.
"""

from functools import cache

from epmoe import layout
from epmoe.device import device_fn, i32, lane_id, load16, load_u16, shfl_idx, store16, u32, u64
from epmoe.layout import DESCRIBED

from ..bits import but_lowest, lowest
from ..params import VECTOR, namespace

FIRST_K, K_BITS, FIRST_HIGH = 12, 5, 3      # of a packed signal; k of tokens from FIRST_HIGH on is in the upper half


def shares_payloads(cfg) -> bool:
    """Whether a token's payload is sent to a rank once, for all its experts there; not under use_shmem or skip_a2a."""
    return not cfg.use_shmem and not cfg.skip_a2a


@cache
def make(cfg):
    """Namespace "message" of device functions. place: the address of a message.

    n_bytes: of a message. at(recv_buf, segment, slot): its place.
    n_vectors: 16-byte vectors of a trailer, at most 32: one a lane.
    vector(i, token, reference, expert): vector i of a trailer, which may be another one in each lane, by a warp.
        expert: the cleaned id at the k of this lane, -1 from top_k on. reference: the second word of src_info.
    store_vector(place, i, q): vector i of the message's trailer.
    store_trailer(place, token, expert): a warp stores the trailer of a message with a payload of its own.
    load_src_info(place) -> (token, reference). load_id(place) -> the id at the k of this lane; it does not wait for the
        load, so other loads can follow at once.
    """
    sizes, top_k, slots = layout.message(cfg), cfg.top_k, cfg.max_tokens_per_rank
    n_bytes, token_size, src_info, topk_info = (sizes.msg_bytes, sizes.token_size, sizes.src_info_offset,
                                                sizes.topk_info_offset)
    n_vectors, src_vectors = (n_bytes - token_size) // VECTOR, (topk_info - src_info) // VECTOR

    @device_fn
    def at(recv_buf, segment, slot):
        return u64(recv_buf + (u64(segment) * u64(slots) + u64(slot)) * u64(n_bytes))

    @device_fn
    def two_ids(id16, k):
        """Two ids of topk_info as one word, from the lanes that hold them."""
        low, high = u32(shfl_idx(id16, i32(k & 31))), u32(shfl_idx(id16, i32((k + 1) & 31)))
        # past the ids, and in src_info, padding is zero
        return u32(low | u32(high << u32(16))) if k >= 0 and k < top_k else u32(0)

    @device_fn
    def vector(i, token, reference, expert):
        id16 = u32(u32(expert) & u32(0xFFFF)) if lane_id() < top_k else u32(0)      # -1 travels as 65535
        k = i32((i - src_vectors) * 8)
        a, b = two_ids(id16, k), two_ids(id16, k + 2)
        c, d = two_ids(id16, k + 4), two_ids(id16, k + 6)
        if i == 0:
            a, b = u32(token), u32(reference)
        return a, b, c, d

    @device_fn
    def store_vector(place, i, q):
        store16(place + u64(token_size) + u64(VECTOR) * u64(i), q[0], q[1], q[2], q[3])

    @device_fn
    def store_trailer(place, token, expert):
        lane = i32(lane_id())
        q = vector(lane, token, u32(0), expert)
        if lane < n_vectors:
            store_vector(place, lane, q)

    @device_fn
    def load_src_info(place):
        words = load16(place + u64(src_info))
        return i32(words[0]), u32(words[1])

    @device_fn
    def load_id(place):
        return i32(load_u16(place + u64(topk_info) + u64(2) * u64(lane_id()))) if lane_id() < top_k else i32(-1)

    return namespace("message", n_bytes=n_bytes, at=at, n_vectors=n_vectors, vector=vector, store_vector=store_vector,
                     store_trailer=store_trailer, load_src_info=load_src_info, load_id=load_id)


@device_fn
def bits_of(token, k):
    """(lower, upper half): the bits that a token with the expert at k adds to the expert's word."""
    low, high = i32(1 + i32(16 << token)), i32(0)
    if token < FIRST_HIGH:
        low = i32(low + i32(k << i32(FIRST_K + K_BITS * token)))
    else:
        high = i32(k << i32(K_BITS * (token - FIRST_HIGH)))
    return low, high


@device_fn
def word_of(low, high):
    """The word, from the sums of both halves; 0, the plain signal, if nothing goes to the expert."""
    return u64(u64(DESCRIBED) + (u64(high) << u64(32)) + u64(low)) if low != 0 else u64(0)


@device_fn
def count_of(word):
    """The number of messages, from any word that holds it: announced, plain or packed."""
    is_packed = (word & u64(DESCRIBED)) != u64(0)
    return i32(u32(word & u64(15))) if is_packed else i32(u32(word))     # without ANNOUNCED


@device_fn
def message_of(word, slot):
    """(token, k) of the message in that slot of the segment."""
    tokens, i = u32((word >> u64(4)) & u64(255)), i32(0)
    while i < slot:
        tokens, i = but_lowest(tokens), i32(i + 1)
    token = lowest(tokens)
    at = i32(FIRST_K + K_BITS * token)
    if token >= FIRST_HIGH:
        at = i32(at + K_BITS)
    return token, i32(u32((word >> u64(at)) & u64(31)))
