"""Topk ids as the kernels use them: lane k of a warp holds a token's k-th id; an invalid id becomes -1."""

from epmoe.device import device_fn, i32, load_i32, load_u64, match_any, u32, u64

from .bits import below
from .params import namespace
from .status import BAD_IDS, REPEATED_IDS, record_bad_id

NO_EXPERT = -1
LARGEST = 2**31 - 1


@device_fn
def narrow(wide):
    """Converts the bits of an int64 to int32. A number that does not fit becomes the nearest one that does."""
    value = i32(LARGEST)
    if wide < u64(2**31) or wide >= u64(2**64 - 2**31):
        value = i32(wide)
    elif wide >= u64(2**63):
        value = i32(-LARGEST)
    return value


def make(n_experts, top_k, id_bytes=4):
    """Namespace "ids" of device functions over topk_ids [num_tokens, top_k] of int32 or int64, id_bytes 4 or 8.

    read(topk_ids, i): id i of the list of all tokens' ids, as int32; one that does not fit becomes the nearest that
    does. load(topk_ids, token, lane): the id at k = lane; -1 for lanes past top_k.
    clean(value, group, lane) -> the id, or -1 if it is outside [0, n_experts) or a lower lane of the group has it, too.
        A group is the lanes of one token; a warp may hold several.
    record(value, cleaned, token, lane, status): counts the ids, not the tokens, that `clean` refused, except -1 itself.
    load, clean and record are for a whole warp.
    """
    @device_fn
    def read(topk_ids, i):
        at = topk_ids + u64(id_bytes) * u64(i)
        if id_bytes == 8:
            return narrow(u64(load_u64(at)))
        return i32(load_i32(at))

    @device_fn
    def load(topk_ids, token, lane):
        return i32(read(topk_ids, token * top_k + lane)) if lane < top_k else i32(NO_EXPERT)

    @device_fn
    def clean(value, group, lane):
        inside = value >= 0 and value < n_experts
        same = u32(match_any(i32(value * 32 + group) if inside else i32(-1 - lane)))
        earlier = u32(same & below(lane))
        return i32(value) if inside and earlier == u32(0) else i32(NO_EXPERT)

    @device_fn
    def record(value, cleaned, token, lane, status):
        if value != cleaned and value != NO_EXPERT:
            if value >= 0 and value < n_experts:
                record_bad_id(status, REPEATED_IDS, token, lane, value)
            else:
                record_bad_id(status, BAD_IDS, token, lane, value)

    return namespace("ids", read=read, load=load, clean=clean, record=record)
