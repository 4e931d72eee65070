"""The message, `payload | src_info | topk_info`, each part padded to cfg.alignment; and which expert ids are valid.

payload: the token as the token format encodes it. src_info: int32, the token's row in input_tokens of its rank.
topk_info: the token's ids, uint16 for each k, 65535 for -1. Padding bytes are 0.
"""

from types import ModuleType

from epmoe import layout
from epmoe.device import (address_of, block_dim, device_fn, i32, lane_id, load16, load_i32, load_u16, n_warps, store16,
                          store_u32, thread_idx, u32, u64, warp_id, warp_sum_i32)

from .. import elements, formats
from ..ids import NO_EXPERT
from ..params import LANES
from ..status import BAD_IDS, REPEATED_IDS, record_bad_id
from .counters import namespace

INPUT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def ids(cfg) -> ModuleType:
    """Namespace "ids": device functions that read topk_ids, int32 [num_tokens, top_k].

    clean(topk_ids, t, k): the id; -1 if it is outside [0, n_experts) or if the token has it at a smaller k already.
        Dispatch and combine both read ids through it, so they agree without a copy.
    count(topk_ids, num_tokens, expert, lane): a warp counts the tokens for which `clean` gives the expert.
    record(topk_ids, t, k, status): an id that `clean` refused is recorded in the status words, unless it is -1.
    """
    n_experts, top_k = cfg.n_experts, cfg.top_k

    @device_fn
    def clean(topk_ids, t, k):
        expert = i32(topk_ids[t, k])
        if expert < 0 or expert >= n_experts:
            return i32(NO_EXPERT)
        j = i32(0)
        while j < k:
            if topk_ids[t, j] == expert:
                return i32(NO_EXPERT)
            j = i32(j + 1)
        return expert

    @device_fn
    def count(topk_ids, num_tokens, expert, lane):
        found = i32(0)
        t = i32(lane)
        while t < num_tokens:
            k = i32(0)
            while k < top_k and topk_ids[t, k] != expert:
                k = i32(k + 1)
            if k < top_k:
                found = i32(found + 1)
            t = i32(t + LANES)
        return i32(warp_sum_i32(found))

    @device_fn
    def record(topk_ids, t, k, status):
        expert = i32(topk_ids[t, k])
        if expert != NO_EXPERT and clean(topk_ids, t, k) == NO_EXPERT:
            is_repeated = expert >= 0 and expert < n_experts
            record_bad_id(status, REPEATED_IDS if is_repeated else BAD_IDS, t, k, expert)

    return namespace("ids", clean=clean, count=count, record=record)


def make(cfg, input_type="bf16") -> ModuleType:
    """Namespace "message". input_type: "bf16", or with the bf16 format "fp16" or "fp32", rounded once to nearest even.

    n_bytes: size of a message. at(buffer, i): address of message i of a buffer.
    encode(place, input_tokens, topk_ids, t, input_scale): a block writes the message of token t at `place`.
    token(place), k_of(place, expert): t and k of the message at `place`, for the owner of `expert`.
    """
    fmt, parts, clean = formats.of(cfg), layout.message(cfg), ids(cfg).clean
    encode_part, converted, top_k = fmt.encode_part, input_type != "bf16", cfg.top_k
    convert, row_bytes = _convert_row(cfg.hidden, parts.token_size, input_type), cfg.hidden * INPUT_BYTES[input_type]
    src_info_at, topk_info_at, msg_bytes = parts.src_info_offset, parts.topk_info_offset, parts.msg_bytes
    n_trailer_words, first_id_word = (msg_bytes - src_info_at) // 4, (topk_info_at - src_info_at) // 4

    @device_fn
    def at(buffer, i):
        return u64(buffer) + u64(msg_bytes) * u64(i)

    @device_fn
    def two_ids(topk_ids, t, k):
        """A word of topk_info: the ids at k and k + 1, 0 past top_k."""
        word = u32(0)
        if k < top_k:
            word = u32(clean(topk_ids, t, k)) & u32(0xFFFF)
        if k + 1 < top_k:
            word = u32(word | u32((u32(clean(topk_ids, t, i32(k + 1))) & u32(0xFFFF)) << u32(16)))
        return u32(word)

    @device_fn
    def encode(place, input_tokens, topk_ids, t, input_scale):
        row = u64(address_of(input_tokens)) + u64(row_bytes) * u64(t)
        if converted:
            convert(row, place)
        else:
            encode_part(row, place, input_scale, warp_id(), n_warps(), lane_id())
        i = i32(thread_idx())
        while i < n_trailer_words:
            word = u32(0)
            if i == 0:
                word = u32(t)
            elif i >= first_id_word:
                word = two_ids(topk_ids, t, i32(2 * (i - first_id_word)))
            store_u32(place + u64(src_info_at + 4 * i), word)
            i = i32(i + block_dim())

    @device_fn
    def token(place):
        return i32(load_i32(place + u64(src_info_at)))

    @device_fn
    def k_of(place, expert):
        k = i32(0)
        while k < top_k and i32(load_u16(place + u64(topk_info_at + 2 * k))) != expert:
            k = i32(k + 1)
        return k

    return namespace("message", n_bytes=msg_bytes, at=at, encode=encode, token=token, k_of=k_of)


def _convert_row(hidden: int, token_size: int, input_type: str):
    """Device function (row, place): a block rounds `hidden` numbers at `row` to bf16, eight a thread at a time."""
    n_vectors, n_places = hidden // 8, token_size // 16
    unpack, pack = elements.make(input_type).unpack, elements.make("bf16").pack

    @device_fn
    def eight_of_fp16(row, i):
        return unpack(load16(row + u64(16 * i)))

    @device_fn
    def eight_of_fp32(row, i):
        return unpack(load16(row + u64(32 * i))) + unpack(load16(row + u64(32 * i + 16)))

    eight = eight_of_fp32 if input_type == "fp32" else eight_of_fp16

    @device_fn
    def convert(row, place):
        i = i32(thread_idx())
        while i < n_places:
            q = u32(0), u32(0), u32(0), u32(0)
            if i < n_vectors:
                q = pack(eight(row, i))
            store16(place + u64(16 * i), q[0], q[1], q[2], q[3])
            i = i32(i + block_dim())

    return convert
