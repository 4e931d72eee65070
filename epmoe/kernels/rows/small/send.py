"""Sends Lamport rows before any rank has announced anything, and stores arriving rows in their final place.

Some blocks send and others receive, because a multiprocessor's polls queue behind its own stores; by expert all do
both. A warp sends a part of a row, or its metadata. The receiving blocks copy this rank's own rows while the first rows
of other ranks are under way. Metadata, and rows that are encoded on the way, go through this rank's own window, too.
"""

from epmoe.device import (ballot, block_dim, block_idx, device_fn, f32_as_u32, grid_dim, i32, lane_id, n_warps, popc,
                          prefetch, store16, store16_relaxed_sys, store_i32, store_u64, thread_idx, u32, u64,
                          warp_broadcast_i32, warp_broadcast_u64, warp_id, warp_max_i32)
from epmoe.layout import ABSENT

from ...bits import adding_four, around, below, but_lowest, divided, four, has, lowest, split
from ...formats.row_copy import no_vectors
from ...params import by_warps
from ...prefetch import LINE
from ..copy import copying
from ..send import A_SCALE, encoding
from ..shape import namespace, p
from ..wait import ROWS_DISPATCH
from . import lamport
from .lamport import NOTHING, escape_for, put, put_back, with_words

no_batch = no_vectors(4)


def _blocks(shape):
    """Namespace of device functions that tell which blocks, other than the leader block, send and which receive.

    By expert each does both, and so does a single one. receivers() -> (this block's number among them, how many).
    """
    tenths = shape.tuning.expert_send_tenths if shape.expert_major else shape.tuning.lamport_send_tenths

    senders = device_fn(lambda: i32(max(1, divided(i32((grid_dim() - 1) * tenths), i32(10)))))
    sends = device_fn(lambda: block_idx() < senders())
    receives = device_fn(lambda: not sends() or senders() == grid_dim() - 1)

    @device_fn
    def receivers():
        first = i32(0) if senders() == grid_dim() - 1 else senders()
        return i32(block_idx() - first), i32(grid_dim() - 1 - first)

    return namespace("blocks", senders=senders, sends=sends, receives=receives, receivers=receivers)


def _parts(shape):
    """Namespace of device functions for a part of a row, called by a warp. batch: as from rows.load.

    load(call, token, part, lane) -> batch of an input row; if rows are encoded, it only prefetches it into L2.
    send(call, token, batch, part, mask, to, lane): to the row at `to` of each lane in `mask`. erase(row_at, part,
    lane). take(call, src_rank, row_at, part, lane) -> (whether it came, batch as sent, this lane's scale if encoded).
    """
    src_bytes, n_vectors, encodes = shape.src_bytes, shape.n_vectors, shape.encode
    at, taking, a_part = lamport.addresses(shape), lamport.taking(ROWS_DISPATCH), lamport.vectors_of_part(shape)
    (n_ids, n_probs, _), a_vector = lamport.words_with(shape), src_bytes // n_vectors
    rows, to_peers = copying(read_only=True), copying(read_only=True, store=store16_relaxed_sys)
    scales_at = n_ids + n_probs             # among the words of metadata
    span = device_fn(lambda part: (i32(part * a_part), i32(min(i32(part * a_part + a_part), n_vectors))))

    @device_fn
    def load(call, token, part, lane):
        (a, b), src = span(part), call.params[p.x] + u64(token) * u64(src_bytes)
        return rows.load(src, a, b, lane)

    @device_fn
    def fetch(call, token, part, lane):
        (a, b), src = span(part), call.params[p.x] + u64(token) * u64(src_bytes)
        i = i32(a_vector * a + LINE * lane)
        while i < a_vector * b:
            prefetch(src + u64(i))
            i = i32(i + 32 * LINE)
        return no_batch()

    @device_fn
    def send(call, token, batch, part, mask, to, lane):
        others = u32(mask & u32(~u32(u32(1) << u32(call.my_rank))))
        (a, b), escape, start = span(part), escape_for(batch), i32((call.my_rank + 1) & 31)
        if escape != u32(ABSENT):
            batch = with_words(batch, (u32(ABSENT), escape))
        if has(others, lane):
            put(at.part(to, part), escape, call.epoch)
        to_peers.store(batch, to, others, start, a, b, lane)

    if encodes:
        encode = encoding(shape, store16_relaxed_sys, device_fn(
            lambda row_at, i, scale, epoch: put(at.word(row_at, i32(scales_at + i)), f32_as_u32(scale), epoch)))

    @device_fn
    def send_encoded(call, token, batch, part, mask, to, lane):
        src, start = call.params[p.x] + u64(token) * u64(src_bytes), i32((call.my_rank + 1) & 31)
        encode(src, to, mask, start, span(part), lane, call.epoch)

    # addresses of a row's four vectors, 0 past its end; given: (row_at, end)
    vectors_at = four(device_fn(lambda given, vector: at.vector(given[0], vector) if vector < given[1] else u64(0)))

    @device_fn
    def word_with(row_at, part, lane):
        """Address of the part's escape, or of this lane's scale; 0 for none."""
        a, b = span(part)
        if encodes:
            return at.word(row_at, i32(scales_at + a // A_SCALE + lane)) if A_SCALE * lane < b - a else u64(0)
        return at.part(row_at, part)

    @device_fn
    def erase(row_at, part, lane):
        gone, (a, b), i = u32(ABSENT), span(part), i32(lane)
        while a + i < b:
            store16(at.vector(row_at, i32(a + i)), gone, gone, gone, gone)
            i = i32(i + 32)
        word = word_with(row_at, part, lane)
        if word != u64(0) and (encodes or lane == 0):
            store_u64(word, u64(NOTHING))

    @device_fn
    def take(call, src_rank, row_at, part, lane):
        (a, b), word = span(part), word_with(row_at, part, lane)
        ok, data, batch = taking.vectors(call, src_rank, i32(0), word, vectors_at((row_at, b), i32(a + lane), 32))
        if ok and (encodes or lane == 0):       # all lanes have seen an escape
            put_back(word, u64(NOTHING))
        if not encodes and data != u32(ABSENT):
            batch = with_words(batch, (data, u32(ABSENT)))
        return ok, batch, data

    return namespace("parts", span=span, load=fetch if encodes else load, send=send_encoded if encodes else send,
                     erase=erase, take=take)


def make(shape, tokens, into):
    """Namespace of device functions for blocks other than the leader block.

    prepare(call) -> prepared: before the call's number is known, a warp begins to load its first work. prepared:
    (at.of() this rank's window at rank `lane`, tokens.load() of the unit's token, the unit's part of a row). send(call,
    known, prepared): sends this warp's share of this rank's tokens. erase(call, known, prepared): resets the words that
    it has sent. receive(call, known, announced, prepared) -> whether all came: stores its share of arriving rows.

    tokens, into: namespaces of device functions, for rows (dispatch.py) or for rows by expert (by_expert.py). `known`
    is for them only: the numbers of this rank's rows, or Places. tokens.load(params, token, part, lane, is_wanted) ->
    seen, the lane's part of the token's routing. tokens.row(known, token, seen, lane) -> the token's row in the window
    at rank `lane`, -1 for none. tokens.send(call, token, seen, mask, to, lane): sends its metadata to the rows at `to`
    of each lane in `mask`. into.arriving(call, announced) -> (how many rows of src_rank r's window may hold a token,
    number of rows before them), in lane r. into.own_row(call, known, token, lane), into.row_of(known, src_rank, row) ->
    a row of a window, -1 if this rank does not get it. into.store(call, known, found, batch, span, scale, lane): stores
    a part. found: (src_rank, row of the window, row among all arriving rows). into.receive(call, known, found, row_at,
    lane) -> whether the row's metadata came; stores it.
    """
    encodes, n_parts, (*n_words, n_scales) = shape.encode, lamport.n_parts_of(shape), lamport.words_with(shape)
    n_apart = sum(n_words) + (0 if encodes else n_scales)   # words that do not go with a part
    ranks, at, blocks, parts_of_row = shape.n_ranks, lamport.addresses(shape), _blocks(shape), _parts(shape)
    units_of_row, n_others = n_parts + int(shape.expert_major or n_apart > 0), ranks if encodes else max(ranks - 1, 1)

    @device_fn
    def first_unit():
        """(this warp's first unit of work, distance to its next one), for a block that sends or only receives."""
        me, workers = (i32(block_idx()), blocks.senders()) if blocks.sends() else blocks.receivers()
        return i32(warp_id() * workers + me), i32(n_warps() * workers)

    @device_fn
    def prepare(call):
        lane, (unit, _) = i32(lane_id()), first_unit()
        (token, part), batch = split(unit, units_of_row), no_batch()
        is_mine = token < call.num_tokens and block_idx() < grid_dim() - 1
        if is_mine and part < n_parts:
            batch = parts_of_row.load(call, token, part, lane)
        seen = tokens.load(call.params, token, part, lane, is_mine and blocks.sends())
        window = at.of(call.params, lane, call.my_rank) if lane < ranks else (u64(0), u64(0))
        return window, seen, batch

    @device_fn
    def erase_unit(mask, to, part, lane):
        left = u32(mask)
        while left != u32(0):
            there, i = u64(warp_broadcast_u64(to, lowest(left))), i32(lane)
            if part < n_parts:
                parts_of_row.erase(there, part, lane)
            else:
                while i < n_apart:
                    store_u64(at.word(there, i), u64(NOTHING))
                    i = i32(i + 32)
            left = but_lowest(left)

    @device_fn
    def walk(call, known, prepared, erases):
        lane, (unit, step), is_prepared, (window, seen, batch) = i32(lane_id()), first_unit(), not erases, prepared
        windows = at.rows(window, call.epoch)
        while blocks.sends() and unit < call.num_tokens * units_of_row:
            token, part = split(unit, units_of_row)
            if not is_prepared:
                seen = tokens.load(call.params, token, part, lane, True)
            row = tokens.row(known, token, seen, lane)
            mask, to = u32(ballot(row >= 0)), at.row(windows, row)
            if erases:
                erase_unit(mask, to, part, lane)
            elif part < n_parts:
                if not is_prepared:
                    batch = parts_of_row.load(call, token, part, lane)
                parts_of_row.send(call, token, batch, part, mask, to, lane)
            else:
                tokens.send(call, token, seen, mask, to, lane)
            unit, is_prepared = i32(unit + step), False

    @device_fn
    def row_of_unit(call, known, arriving, unit, n_own, lane):
        """(part, src_rank, row of its window or -1). Own rows come first, then others in the order of sending."""
        if unit < n_own:
            token, part = split(unit, units_of_row)
            return part, i32(call.my_rank), i32(into.own_row(call, known, token, lane))
        turn, part = split(i32(unit - n_own), units_of_row)
        one, step = split(turn, n_others)
        src_rank = around(i32(call.my_rank + 1 + step), ranks)
        comes = one < warp_broadcast_i32(arriving, src_rank)
        return part, src_rank, i32(into.row_of(known, src_rank, one)) if comes else i32(-1)

    @device_fn
    def receive(call, known, announced, prepared):
        lane, is_prepared, (_, _, batch), scale = i32(lane_id()), not blocks.sends(), prepared, u32(0)
        (arriving, before), (me, workers), n_own = into.arriving(call, announced), blocks.receivers(), i32(0)
        windows = at.rows(at.of(call.params, call.my_rank, lane), call.epoch) if lane < ranks else u64(0)
        if not encodes:
            n_own, arriving = i32(call.num_tokens * units_of_row), i32(0) if lane == call.my_rank else arriving
        n_units, ok = i32(n_own + warp_max_i32(arriving) * n_others * units_of_row), blocks.receives()
        unit, step = i32(warp_id() * workers + me), i32(n_warps() * workers)
        while ok and unit < n_units:
            part, src_rank, row = row_of_unit(call, known, arriving, unit, n_own, lane)
            if row >= 0:
                row_at = at.row(warp_broadcast_u64(windows, src_rank), row)
                found = src_rank, row, i32(warp_broadcast_i32(before, src_rank) + row)
                if part == n_parts:
                    ok = into.receive(call, known, found, row_at, lane)
                else:
                    if unit >= n_own:
                        ok, batch, scale = parts_of_row.take(call, src_rank, row_at, part, lane)
                    elif not is_prepared:
                        batch = parts_of_row.load(call, split(unit, units_of_row)[0], part, lane)
                    if ok:
                        into.store(call, known, found, batch, parts_of_row.span(part), scale, lane)
            unit, is_prepared = i32(unit + step), False
        return ok

    send = device_fn(lambda call, known, prepared: walk(call, known, prepared, False))
    erase = device_fn(lambda call, known, prepared: walk(call, known, prepared, True))
    return namespace("rows", prepare=prepare, send=send, receive=receive, erase=erase)


def numbering(shape, mask_of_token):
    """(number, record): device functions of a block. numbers [token, rank], shared: a token's row for a rank, or -1.

    mask_of_token(known, token): mask of its ranks. number(n_ranks, call, known, numbers, totals): numbers all tokens, a
    warp a rank; totals[rank]: number of rows. record(call, numbers, tokens): stores tokens [first, end) in the handle.
    """
    ranks = shape.n_ranks

    @device_fn
    def mask_at(given, token):
        call, known = given
        mask = u32(mask_of_token(known, i32(min(token, i32(call.num_tokens - 1)))))
        return mask if token < call.num_tokens else u32(0)

    @device_fn
    def number_lanes(total, given, token, mask):
        """Numbers one token in each lane. total: rows of the tokens before. Returns the total including these."""
        call, numbers, rank = given
        goes = u32(ballot(has(mask, rank)))
        if token < call.num_tokens:
            row = i32(total + popc(u32(goes & below(i32(lane_id())))))
            numbers[token * ranks + rank] = row if has(mask, rank) else i32(-1)
        return i32(total + popc(goes))

    masks_at, number_four = four(mask_at), adding_four(number_lanes)

    @by_warps
    def number_rows(rank, call, known, numbers, totals):
        token, total = i32(lane_id()), i32(0)
        while token - lane_id() < call.num_tokens:      # four tokens of a lane in flight
            total = number_four(total, (call, numbers, rank), token, 32, masks_at((call, known), token, 32))
            token = i32(token + 128)
        if lane_id() == 0:
            totals[rank] = total

    @device_fn
    def record(call, numbers, tokens):
        i = i32(tokens[0] * ranks + thread_idx())
        while i < tokens[1] * ranks:
            store_i32(call.params[p.row_of] + u64(4) * u64(i), i32(numbers[i]))
            i = i32(i + block_dim())

    return number_rows, record
