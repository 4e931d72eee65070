"""The trailer of a dispatch message: `src_info | topk_info`, the token's number and its experts.

If a message's payload is in another message of the same token to the same rank, the second word of src_info, otherwise
padding, says so: 1 + the row of that message in recv_buf [local_expert, src_rank, slot]. It is 0 if the message has its
payload, as in the specification.
"""

from typing import NamedTuple

from epmoe import layout
from epmoe.device import ballot, device_fn, ffs, i32, lane_id, load16, load_u16, shfl_idx, u32, u64

VECTOR = 16     # bytes of one access


class Trailer(NamedTuple):
    """Device functions of a warp for the bytes behind the payload.

    n_vectors: 16-byte vectors of src_info and topk_info together, padding included (at most 32: one a lane).
    vector(token, reference, expert, i): vector i of the trailer, which may be another one in each lane, as 4 u32;
        `expert` is the cleaned id in the slot of this lane, -1 behind the last slot.
    load_source(message) -> (token, reference), and load_id(message, lane) -> the id in slot `lane`, which is not looked
        at, so that other loads can follow at once.
    slot_of(id, expert): the slot of that global expert id, from what all lanes loaded; -1 if it is not among the ids.
    """

    n_vectors: int
    vector: callable
    load_source: callable
    load_id: callable
    slot_of: callable


def make(cfg) -> Trailer:
    """The trailer for cfg.top_k ids and cfg.alignment."""
    sizes = layout.message(cfg)
    top_k = cfg.top_k
    n_vectors = (sizes.msg_bytes - sizes.token_size) // VECTOR
    src_vectors = (sizes.topk_info_offset - sizes.src_info_offset) // VECTOR
    src_info, topk_info = sizes.src_info_offset, sizes.topk_info_offset

    @device_fn
    def two_ids(id16, slot):
        """Two ids of topk_info as one word, from the lanes that hold them."""
        low, high = u32(shfl_idx(id16, i32(slot & 31))), u32(shfl_idx(id16, i32((slot + 1) & 31)))
        pair = u32(0)
        if slot >= 0 and slot < top_k:      # behind the ids, and in src_info, there is padding: zero
            pair = u32(low | u32(high << u32(16)))
        return pair

    @device_fn
    def vector(token, reference, expert, i):
        id16 = u32(0)
        if lane_id() < top_k:
            id16 = u32(u32(expert) & u32(0xFFFF))       # -1 travels as 65535
        slot = i32((i - src_vectors) * 8)
        a, b = two_ids(id16, slot), two_ids(id16, slot + 2)
        c, d = two_ids(id16, slot + 4), two_ids(id16, slot + 6)
        if i == 0:
            a, b = u32(token), u32(reference)
        return a, b, c, d

    @device_fn
    def load_source(message):
        words = load16(message + u64(src_info))
        return i32(words[0]), u32(words[1])

    @device_fn
    def load_id(message, lane):
        id16 = i32(-1)
        if lane < top_k:
            id16 = i32(load_u16(message + u64(topk_info) + u64(2) * u64(lane)))
        return id16

    @device_fn
    def slot_of(id16, expert):
        return i32(i32(ffs(ballot(id16 == expert))) - 1)

    return Trailer(n_vectors, vector, load_source, load_id, slot_of)
