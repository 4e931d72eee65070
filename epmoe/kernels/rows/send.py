"""Sends rows: a warp reads a token, or a part of one, once and stores it at every rank that it goes to.

The rows of a src_rank are together at the receiver, in the order of its tokens, after those of lower ranks. So every
row is written to its final place. Its metadata goes with it: the token's ids (or numbers for local experts), probs and
scales, as its dst_rank sees them.
"""

from types import SimpleNamespace
from typing import NamedTuple

from epmoe.device import (ballot, device_fn, f32, i32, lane_id, load_i32, load_u32, n_warps, popc, prefetch, store16,
                          store_f32, store_i32, store_u32, store_u64, syncthreads_or, u32, u64, warp_broadcast_i32,
                          warp_broadcast_u64, warp_id)

from .. import ids
from ..bits import below, but_lowest, divided_up, has, in_fours, lowest, split
from ..formats import blockwise_fp8
from ..formats.row_encoder import encode_parts, encode_row
from ..params import word_in
from ..prefetch import LINE
from . import call as calls
from . import layout, mailbox
from .copy import copying, fewest_parts, parts, rotated
from .shape import arrays, namespace, p

STEP, A_SCALE = 32, 8   # vectors of encoded values that are made in one step, and that have a scale in common


def expert_masks(num_local_experts):
    """Number of u32 words that hold a bit for each local expert."""
    return -(-num_local_experts // 32)


def expands_own_from_input(shape):
    """Whether rows of a rank to itself stay in the input and are expanded from there."""
    return shape.expert_major and not shape.encode


def loading_choices(shape):
    """Device function load(params, token, lane) -> (expert, prob), choice k = `lane` of a token; called by a warp.

    expert: -1 past the last k, for an id of no expert or one that the token has at a smaller k, or if rows have no ids.
    """
    top_k, has_probs, of_ids = shape.top_k, shape.has_probs, ids.make(shape.num_experts, shape.top_k, shape.id_bytes)
    has_choices = shape.has_meta and not shape.expert_major

    @device_fn
    def load(params, token, lane):
        if not has_choices:
            return i32(-1), u32(0)
        seen, at = of_ids.load(params[p.ids], token, lane), word_in(params[p.probs], token, top_k, lane)
        prob = u32(load_u32(at)) if has_probs and lane < top_k else u32(0)
        return of_ids.clean(seen, i32(0), lane), prob

    return load


def sending_choices(shape, into):
    """Device function send(params, token, seen, mask, where, lane): sends a token's choices and scales to its ranks.

    mask: its ranks. seen: from load(). into: namespace. of(where, rank) -> to, its row there. choice(to, k,
    local_expert, prob), scale(to, i, word) store there. local_expert: -1 if the expert is on another rank.
    """
    n_ids, n_local, n_scales = shape.top_k * shape.has_meta, shape.num_local_experts, shape.scale_words
    has_any = n_ids + n_scales > 0

    @device_fn
    def send(params, token, seen, mask, where, lane):
        expert, prob = seen
        dst_rank, local_expert, left = i32(-1), i32(-1), u32(mask) if has_any else u32(0)
        if expert >= 0:
            dst_rank, local_expert = i32(u32(expert) // u32(n_local)), i32(u32(expert) % u32(n_local))
        scales = params[p.scales] + u64(4) * u64(token) * u64(n_scales)
        while left != u32(0):
            rank, i = lowest(left), i32(lane)
            to, is_there = into.of(where, rank), dst_rank == rank
            if n_ids > 0 and lane < n_ids:
                into.choice(to, lane, local_expert if is_there else i32(-1), prob if is_there else u32(0))
            while n_scales > 0 and i < n_scales:
                into.scale(to, i, load_u32(scales + u64(4) * u64(i)))
                i = i32(i + 32)
            left = but_lowest(left)

    return send


def _into_arrays(shape):
    """`into` for sending_choices. where: (number of the row, addresses of ids, probs and scales), at rank `lane`."""
    top_k, n_scales, has_probs = shape.top_k, shape.scale_words, shape.has_probs

    @device_fn
    def of(where, rank):
        to_row, (ids_at, probs_at, scales_at) = u64(warp_broadcast_i32(where[0], rank)), where[1]
        return (u64(warp_broadcast_u64(ids_at, rank)) + u64(8 * top_k) * to_row,
                u64(warp_broadcast_u64(probs_at, rank)) + u64(4 * top_k) * to_row,
                u64(warp_broadcast_u64(scales_at, rank)) + u64(4 * n_scales) * to_row)

    @device_fn
    def choice(to, k, local_expert, prob):
        store_u64(to[0] + u64(8) * u64(k), u64(local_expert))
        if has_probs:
            store_u32(to[1] + u64(4) * u64(k), prob)

    return namespace("into", of=of, choice=choice,
                     scale=device_fn(lambda to, i, word: store_u32(to[2] + u64(4) * u64(i), word)))


def _sending_experts(shape):
    """Device function (params, token, mask, row, at, lane): sends a token's numbers by expert to the ranks of `mask`.

    Each rank gets a bit for each local expert that the token goes to. For these experts, in ascending order, it gets
    the token's number among this rank's rows for it, and its prob. at: of numbers, probs, masks at rank `lane`.
    """
    ranks, n_local, num_experts, has_probs = shape.n_ranks, shape.num_local_experts, shape.num_experts, shape.has_probs
    n_masks = expert_masks(n_local)

    @device_fn
    def load_window(given, window):
        """(number, prob) of expert `lane` in a window of 32 experts of a rank; number -1: it does not get the token."""
        (params, token, _, _, _, lane), (rank, word) = given, split(window, n_masks)
        expert, number, prob = i32(32 * word + lane), i32(-1), u32(0)
        if expert < n_local and rank < ranks:
            number = i32(load_i32(word_in(params[p.row_of_expert], token, num_experts, rank * n_local + expert)))
            if has_probs:
                prob = u32(load_u32(word_in(params[p.probs], token, num_experts, rank * n_local + expert)))
        return number, prob

    @device_fn
    def send_window(sent, given, window, loaded):
        """sent: for how many experts of this rank the earlier windows had a number. Returns it with this window's."""
        (_, _, mask, row, at, lane), (rank, word), (number, prob) = given, split(window, n_masks), loaded
        sent = i32(0) if word == 0 else sent
        if window < ranks * n_masks:
            to_row, present = u64(warp_broadcast_i32(row, rank)), u32(ballot(number >= 0))
            to_numbers, to_probs = u64(warp_broadcast_u64(at[0], rank)), u64(warp_broadcast_u64(at[1], rank))
            to_masks, index = u64(warp_broadcast_u64(at[2], rank)), i32(sent + popc(u32(present & below(lane))))
            if number >= 0:
                store_i32(word_in(to_numbers, to_row, n_local, index), number)
                if has_probs:
                    store_u32(word_in(to_probs, to_row, n_local, index), prob)
            if lane == 0 and has(mask, rank):
                store_u32(word_in(to_masks, to_row, n_masks, word), present)
            sent = i32(sent + popc(present))
        return sent

    send_windows, n_windows = in_fours(load_window, send_window), ranks * n_masks
    return device_fn(lambda params, token, mask, row, at, lane: send_windows(
        i32(0), (params, token, mask, row, at, lane), i32(0), 1, i32(n_windows)))


def sending_metadata(shape):
    """Namespace of device functions, called by a warp.

    addresses(params, announced, lane) -> addresses of ids, probs, scales (masks) at rank `lane`; 0 if there are none.
    send(params, token, mask, row, at, lane): sends a token's metadata to the ranks of `mask`. row: in lane r the row's
    number at rank r. at: from addresses().
    """
    ranks, mail, expert_major = shape.n_ranks, mailbox.reading(shape.n_ranks), shape.expert_major
    has_meta, has_probs = shape.has_meta, shape.has_meta and shape.has_probs
    has_more, load_choices = shape.scale_words > 0 or expert_major, loading_choices(shape)
    send_choices, send_experts = sending_choices(shape, _into_arrays(shape)), _sending_experts(shape)

    @device_fn
    def addresses(params, announced, lane):
        is_rank = lane < ranks
        return (mail.array_at(params, announced, arrays.row_ids, lane) if has_meta and is_rank else u64(0),
                mail.array_at(params, announced, arrays.row_probs, lane) if has_probs and is_rank else u64(0),
                mail.array_at(params, announced, arrays.row_scales, lane) if has_more and is_rank else u64(0))

    @device_fn
    def send(params, token, mask, row, at, lane):
        if has_meta and expert_major:
            send_experts(params, token, mask, row, at, lane)
        elif not expert_major:
            send_choices(params, token, load_choices(params, token, lane), mask, (row, at), lane)

    return namespace("metadata", addresses=addresses, send=send)


class Work(NamedTuple):
    """The work of a block's or a rank's warps: the tokens [first, end), each in n_parts parts.

    A unit is at_once parts of a token's row, or its metadata. `own`: the token with which this warp begins, -1 for
    none. It sends its first n_own units. The other n_shared units of each token are for all warps.
    """

    first: int
    end: int
    n_parts: int
    n_shared: int
    own: int
    n_own: int


def fp8_format(hidden):
    """The blockwise FP8 token format for rows of `hidden` elements. In expert-major, values and scales share a row."""
    return blockwise_fp8.make(SimpleNamespace(hidden=hidden, alignment=16))


def encoding(shape, store, store_scale):
    """Device function (src, to, mask, start, span, lane, epoch): a warp encodes the vectors [span) of a row.

    It runs whole steps of the encoder. Encoded vectors go from registers to the rows at `to` of each lane in `mask`,
    beginning with lane `start`, by `store`. Their scales are stored by store_scale(row_at, i, scale, epoch).
    """
    value_bytes, scale_of, codes_of = shape.value_bytes, blockwise_fp8.scale_of, blockwise_fp8.codes_of

    @device_fn
    def put(rows, chunk, there, ab, absmax, input_scale, lane):
        (scale, factor), (to, left, start, epoch) = scale_of(absmax, input_scale), rows
        codes = codes_of(ab, factor)
        while left != u32(0):
            at = u64(warp_broadcast_u64(to, i32((lowest(left) + start) & 31)))
            if there:
                store(at + u64(16 * chunk), codes[0], codes[1], codes[2], codes[3])
                if lane & (A_SCALE - 1) == 0:
                    store_scale(at, i32(chunk >> 3), scale, epoch)
            left = but_lowest(left)

    encode_part = encode_row(value_bytes, blockwise_fp8.GROUP, put, device_fn(lambda rows, lane: None))
    n_steps = encode_parts(value_bytes)

    @device_fn
    def encode(src, to, mask, start, span, lane, epoch):
        rows, step = (to, rotated(mask, start), start, epoch), i32(span[0] // STEP)
        while mask != u32(0) and STEP * step < span[1]:
            encode_part(src, rows, f32(1), step, n_steps, lane)
            step = i32(step + 1)

    return encode


def make(shape, flags=None, numbered=None):
    """Device function send(call, announced) -> whether no wait expired; for all warps of a sending block.

    If some rank has no room to receive, nothing is sent. If there are more tokens than blocks that send, warps of all
    blocks claim parts of tokens, as some reach the links sooner than others. flags: of copy.py, if rows are expanded
    while they arrive; then only some warps of a block send. numbered: layout.counter() if this launch numbers the
    tokens. While the other blocks number theirs, a warp may send parts of a token of its own block.
    """
    ranks, row_bytes, src_bytes, encodes = shape.n_ranks, shape.row_bytes, shape.src_bytes, shape.encode
    mail, spans = mailbox.reading(ranks), parts(shape.n_vectors)
    tokens, claim = layout.sharing(shape), calls.claims(mailbox.NEXT_TO_SEND)
    raises, is_numbered_now, fewest = flags is not None, numbered is not None, fewest_parts(shape)
    metadata, own_stays = sending_metadata(shape), expands_own_from_input(shape)
    # 1: metadata is a unit of its own after the row's parts; 0: there is none, or it is sent with part 0
    n_apart = int((shape.has_meta or shape.scale_words > 0) and not shape.expert_major)
    rows, a_vector = copying(read_only=True), shape.src_bytes // shape.n_vectors    # bytes that become a vector
    probs_bytes = 4 * shape.top_k * shape.has_probs
    value_bytes, row_of, send_tenths = shape.value_bytes, layout.row_of(ranks), shape.sending.tenths
    at_once = shape.sending.at_once if raises else 1        # parts that a warp sends before it raises their flags

    if encodes:
        encode = encoding(shape, store16, device_fn(
            lambda row_at, i, scale, epoch: store_f32(row_at + u64(value_bytes) + u64(4 * i), scale)))

    @device_fn
    def work_of(call, announced):
        """This warp's Work."""
        (first, end), warps = tokens.of_block(call.num_tokens), i32(n_warps())
        if tokens.are_claimed(call.num_tokens):
            first, end, warps = i32(0), i32(call.num_tokens), i32(n_warps() * calls.num_senders())
        n_tokens = i32(end - first)
        if raises:
            n_parts = flags.n_parts(announced)
        else:
            n_parts = i32(max(fewest, spans.count(n_tokens, i32(warps - n_apart * n_tokens))))
        own, n_own, n_units = i32(-1), i32(0), i32(divided_up(n_parts, at_once) + n_apart)
        if is_numbered_now and tokens.begin_with_own(call.num_tokens):
            (mine, mine_end), n_own = tokens.of_block(call.num_tokens), i32(n_units // 2)
            own = i32(mine + warp_id()) if mine + warp_id() < mine_end else i32(-1)
        return Work(first, end, n_parts, i32(n_units - n_own), own, n_own)

    @device_fn
    def first_unit(call, work, n_units, lane):
        """n_units if this warp does not send. Units -n_own to -1 are the first of the warp's own token."""
        if not tokens.are_claimed(call.num_tokens):
            return i32(warp_id())
        if raises and 10 * warp_id() >= send_tenths * n_warps():
            return i32(n_units)
        return claim(call, lane) if work.own < 0 or work.n_own == 0 else i32(-work.n_own)

    @device_fn
    def part_of(work, unit):
        """(token, first part) of a unit. Units from 0 on are those left of each token, token by token."""
        if unit < 0:
            return work.own, i32(at_once * (unit + work.n_own))
        turn, left = split(unit, work.n_shared)
        return i32(work.first + turn), i32(at_once * (work.n_own + left))

    @device_fn
    def span_of(part, n_parts):
        """The vectors of a unit that begins with this part; none past the last part."""
        return spans.span(part, n_parts)[0], spans.span(i32(part + at_once - 1), n_parts)[1]

    @device_fn
    def prefetch_unit(params, token, part, n_parts, lane):
        """Prefetches a unit into L2."""
        a, b = span_of(part, n_parts)
        row, at = params[p.x] + u64(token) * u64(src_bytes), i32(a_vector * a + LINE * lane)
        while at < a_vector * b:
            prefetch(row + u64(at))
            at = i32(at + 32 * LINE)
        if probs_bytes > 0 and part == n_parts * n_apart and lane == 0:
            prefetch(params[p.probs] + u64(token) * u64(probs_bytes))

    @device_fn
    def send(call, announced):
        if not mail.has_room(announced):
            return True
        lane, first_row, start = i32(lane_id()), mail.before_me(announced, call.my_rank), i32((call.my_rank + 1) & 31)
        rows_at = mail.array_at(call.params, announced, arrays.rows, lane) if lane < ranks else u64(0)
        metadata_at = metadata.addresses(call.params, announced, lane)
        work, ok = work_of(call, announced), True
        are_numbered = not (is_numbered_now and tokens.are_claimed(call.num_tokens))
        if is_numbered_now and work.n_own == 0 and not are_numbered:
            ok = warp_id() != 0 or numbered.wait_for(call, lane)
            ok, are_numbered = not syncthreads_or(not ok), True     # what one thread acquired, all read
        n_units, metadata_part = i32((work.end - work.first) * work.n_shared), i32(work.n_parts * n_apart)
        unit = first_unit(call, work, n_units, lane)
        while ok and unit < n_units:
            following = i32(unit + n_warps())
            if tokens.are_claimed(call.num_tokens):
                following = claim(call, lane) if unit >= -1 else i32(unit + 1)   # -1: its last own unit
            if is_numbered_now and unit >= 0 and not are_numbered:
                ok, are_numbered = numbered.wait_for(call, lane), True
            token, part = part_of(work, unit)
            row = row_of(call.params[p.row_of], token, lane) if ok else i32(-1)
            mask, row = u32(ballot(row >= 0)), i32(first_row + row)
            src, to = call.params[p.x] + u64(token) * u64(src_bytes), rows_at + u64(row) * u64(row_bytes)
            a, b = span_of(part, work.n_parts)
            if following < n_units:
                next_token, next_part = part_of(work, following)
                prefetch_unit(call.params, next_token, next_part, work.n_parts, lane)
            if encodes:
                encode(src, to, mask, start, (a, b), lane, call.epoch)
            else:
                others = u32(mask & ~(u32(1) << u32(call.my_rank))) if own_stays else mask
                rows.copy(src, to, others, start, a, b, lane)
            if part == metadata_part:
                metadata.send(call.params, token, mask, row, metadata_at, lane)
            if raises:
                flags.raise_parts(call, mask, row, part, work.n_parts, lane)
            unit = i32(following)
        return ok

    return send
