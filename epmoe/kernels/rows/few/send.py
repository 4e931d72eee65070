"""Sends Lamport rows (lamport.py) before any rank has announced anything, and stores arriving rows in their final
place.

Some blocks send, and others receive, because polls of a multiprocessor queue behind its own stores. A warp sends a part
of a row, or its metadata. The receiving blocks copy this rank's own rows while the first rows of other ranks are under
way.
"""

from typing import NamedTuple

from epmoe.device import (any_lane, ballot, block_idx, device_fn, grid_dim, i32, lane_id, load_u32, n_warps,
                          st_relaxed_sys_u64, store16, store16_relaxed_sys, store_u32, store_u64, u32, u64,
                          warp_broadcast_i32, warp_broadcast_u64, warp_id)
from epmoe.layout import ABSENT

from ...params import chosen
from .. import mailbox
from ..bits import around, but_lowest, has, largest, lowest, of_lane_before, split
from ..copy import copying
from ..send import MINUS_ONE, looking_at_slots
from ..shape import BLOCK, memory_of, namespace, p
from ..wait import ROWS_DISPATCH
from . import lamport
from .lamport import NOTHING, PART, escape_for, put, with_words

NO_ID = 0xFFFFFFFF      # -1, as 4 bytes


class First(NamedTuple):
    """What a warp sends, or copies, first, on its way to its registers. place: of its rows at rank `lane`.

    seen: its token's expert and prob in slot `lane`. batch: its part of a row.
    """

    place: tuple
    seen: tuple
    batch: tuple


def _blocks(shape):
    """Device functions: which of the blocks but the leader block send, and which receive: namespace.

    A single block does both. receivers() -> (this block's number among those that receive, how many there are).
    """
    tenths = shape.tuning.lamport_send_tenths

    @device_fn
    def senders():
        return i32(max(1, i32(u32(i32((grid_dim() - 1) * tenths)) // u32(10))))

    @device_fn
    def sends():
        return block_idx() < senders()

    @device_fn
    def receives():
        return not sends() or senders() == grid_dim() - 1

    @device_fn
    def receivers():
        first = senders()
        if first == grid_dim() - 1:
            first = i32(0)
        return i32(block_idx() - first), i32(grid_dim() - 1 - first)

    return namespace("blocks", senders=senders, sends=sends, receives=receives, receivers=receivers)


def _homes(shape):
    """Device function (call, index): address of this rank's array `index` of the call."""
    memory, place_of = memory_of(shape.n_ranks), chosen(BLOCK, "places")

    @device_fn
    def home(call, index):
        return u64(memory.pool(call.params, call.my_rank) + place_of(call.params, index))

    return home


def _metadata(shape):
    """Device functions for a row's metadata: namespace.

    send(call, token, seen, mask, to, lane): to the words of a row at each rank of `mask`, in whose lane `to` has their
    address. receive(call, src_rank, row_at, row, lane, has_room): whether it came; it is stored with the row, if there is
    room.
    """
    (n_slots, n_probs, n_scales), n_local, home = lamport.words_with(shape), shape.n_local_experts, _homes(shape)
    n_all, at, take = n_slots + n_probs + n_scales, lamport.places(shape), lamport.taking(ROWS_DISPATCH)

    @device_fn
    def send(call, token, seen, mask, to, lane):
        expert, prob = seen
        expert_rank, local_expert, left = i32(-1), u32(NO_ID), u32(mask)
        if expert >= 0:
            expert_rank, local_expert = i32(u32(expert) // u32(n_local)), u32(u32(expert) % u32(n_local))
        scales = call.params[p.scales] + u64(4) * u64(token) * u64(n_scales)
        while left != u32(0):
            rank = lowest(left)
            there = u64(warp_broadcast_u64(to, rank))
            if lane < n_slots:
                value, here = u32(NO_ID), u32(0)
                if expert_rank == rank:
                    value, here = local_expert, prob
                put(at.word(there, lane), value, call.epoch)
                if n_probs > 0:
                    put(at.word(there, i32(n_slots + lane)), here, call.epoch)
            i = i32(lane)
            while i < n_scales:
                put(at.word(there, i32(n_slots + n_probs + i)), load_u32(scales + u64(4) * u64(i)), call.epoch)
                i = i32(i + 32)
            left = but_lowest(left)

    @device_fn
    def keep(call, row, i, data):
        """Stores the data of a row's i-th word."""
        if i < n_slots:
            value = u64(data)
            if data == u32(NO_ID):
                value = u64(MINUS_ONE)
            store_u64(home(call, 1) + u64(8) * (u64(row) * u64(n_slots) + u64(i)), value)
        elif i < n_slots + n_probs:
            store_u32(home(call, 2) + u64(4) * (u64(row) * u64(n_probs) + u64(i - n_slots)), data)
        else:
            k = u64(i - n_slots - n_probs)
            store_u32(home(call, 3) + u64(4) * (u64(row) * u64(n_scales) + k), data)

    @device_fn
    def receive(call, src_rank, row_at, row, lane, has_room):
        ok, i = True, i32(lane)
        while i < n_all:
            word = u64(take.word(call, src_rank, at.word(row_at, i)))
            ok, data = ok and word != u64(0), u32(word)
            if has_room:
                keep(call, row, i, data)
            i = i32(i + 32)
        return any_lane(not ok) == 0

    return namespace("more", send=send, receive=receive)


def make(shape, number):
    """Device functions of blocks other than the leader block: namespace. first: First.

    number: device function (known, token, lane) -> the token's row among those for rank `lane`, -1 for none.
    prepare(call) -> First, before the call is known. send(call, known, first): this warp's share of this rank's tokens.
    receive(call, known, notes, has_room, first): this warp's share of what comes, stored as notes' counts say, if there
    is room. erase(call, known, first): what nobody is going to receive.
    """
    ranks, row_bytes, n_vectors = shape.n_ranks, shape.row_bytes, shape.n_vectors
    at, take, mail, home = (lamport.places(shape), lamport.taking(ROWS_DISPATCH), mailbox.reading(ranks), _homes(shape))
    n_parts, n_all = lamport.n_parts_of(shape), sum(lamport.words_with(shape))
    units, n_others = n_parts + int(n_all > 0), max(ranks - 1, 1)
    rows, away = copying(read_only=True), copying(read_only=True, store=store16_relaxed_sys)
    look, more, blocks = looking_at_slots(shape), _metadata(shape), _blocks(shape)

    @device_fn
    def span(part):
        return i32(part * PART), i32(min(i32(part * PART + PART), n_vectors))

    @device_fn
    def first_unit():
        """(first unit of work of this warp, distance to its next one) of a block that sends, or receives only."""
        me, workers = i32(block_idx()), blocks.senders()
        if not blocks.sends():
            me, workers = blocks.receivers()
        return i32(warp_id() * workers + me), i32(n_warps() * workers)

    @device_fn
    def load_part(call, token, part, lane):
        a, b = span(part)
        return rows.load(call.params[p.x] + u64(token) * u64(row_bytes), a, b, lane)

    @device_fn
    def prepare(call):
        lane, (unit, _), none = i32(lane_id()), first_unit(), (u32(0), u32(0), u32(0), u32(0))
        place, seen, batch = (u64(0), u64(0)), (i32(-1), u32(0)), (none, none, none, none)
        token, part = split(unit, units)
        if token < call.num_tokens and block_idx() < grid_dim() - 1:
            if part < n_parts:
                batch = load_part(call, token, part, lane)
            elif blocks.sends():
                seen = look(call.params, token, lane)
        if lane < ranks:
            place = at.of(call.params, lane, call.my_rank)
        return First(place, seen, batch)

    @device_fn
    def send_part(call, batch, part, mask, to, lane):
        (a, b), escape, start = span(part), escape_for(batch), i32((call.my_rank + 1) & 31)
        if escape != u32(ABSENT):
            batch = with_words(batch, u32(ABSENT), escape)
        if has(mask, lane):
            put(at.part(to, part), escape, call.epoch)
        away.store(batch, to, mask, start, a, b, lane)

    @device_fn
    def send(call, known, first):
        lane, (unit, step), is_first, batch, seen = i32(lane_id()), first_unit(), True, first.batch, first.seen
        windows, others = at.rows(first.place, call.epoch), u32(~u32(u32(1) << u32(call.my_rank)))
        while blocks.sends() and unit < call.num_tokens * units:
            token, part = split(unit, units)
            row = number(known, token, lane)
            mask, to = u32(ballot(row >= 0)), at.row(windows, row)
            if part < n_parts:
                if not is_first:
                    batch = load_part(call, token, part, lane)
                send_part(call, batch, part, u32(mask & others), to, lane)
            else:
                if not is_first:
                    seen = look(call.params, token, lane)
                more.send(call, token, seen, mask, to, lane)
            unit, is_first = i32(unit + step), False

    @device_fn
    def erase_part(there, part, lane):
        gone, (a, b), i = u32(ABSENT), span(part), i32(lane)
        while a + i < b:
            store16(at.vector(there, i32(a + i)), gone, gone, gone, gone)
            i = i32(i + 32)
        if lane == 0:
            store_u64(at.part(there, part), u64(NOTHING))

    @device_fn
    def erase(call, known, first):
        lane, (unit, step), windows = i32(lane_id()), first_unit(), at.rows(first.place, call.epoch)
        while blocks.sends() and unit < call.num_tokens * units:
            token, part = split(unit, units)
            row = number(known, token, lane)
            left, to = u32(ballot(row >= 0)), at.row(windows, row)
            while left != u32(0):
                there, i = u64(warp_broadcast_u64(to, lowest(left))), i32(lane)
                if part < n_parts:
                    erase_part(there, part, lane)
                else:
                    while i < n_all:
                        store_u64(at.word(there, i), u64(NOTHING))
                        i = i32(i + 32)
                left = but_lowest(left)
            unit = i32(unit + step)

    @device_fn
    def vector_at(row, vector, end):
        """Where a row has the vector, 0 for one behind the end."""
        place = u64(0)
        if vector < end:
            place = at.vector(row, vector)
        return place

    @device_fn
    def take_part(call, src_rank, row_at, part, lane):
        """(whether a part arrived, its batch as sent), by a warp."""
        (a, b), word = span(part), at.part(row_at, part)
        one = i32(a + lane)
        ok, escape, batch = take.vectors(
            call, src_rank, i32(0), word, (vector_at(row_at, one, b), vector_at(row_at, i32(one + 32), b),
                                         vector_at(row_at, i32(one + 64), b), vector_at(row_at, i32(one + 96), b)))
        if ok and lane == 0:                    # all lanes have seen it
            st_relaxed_sys_u64(word, u64(NOTHING))
        if escape != u32(ABSENT):
            batch = with_words(batch, escape, u32(ABSENT))
        return ok, batch

    @device_fn
    def unit_of_others(my_rank, unit):
        """(part, number among the rows from a rank, that rank): of all ranks the first rows first, as they are sent."""
        turn, part = split(unit, units)
        among, step = split(turn, n_others)
        return part, among, around(i32(my_rank + 1 + step), ranks)

    @device_fn
    def receive(call, known, notes, has_room, first):
        lane, ends, windows, is_first = i32(lane_id()), mail.received(notes, call.my_rank), u64(0), not blocks.sends()
        before, to, (me, workers), batch = of_lane_before(ends), home(call, 0), blocks.receivers(), first.batch
        if lane < ranks:
            windows = at.rows(at.of(call.params, call.my_rank, lane), call.epoch)
        here, n_own, ok = i32(ends - before), i32(call.num_tokens * units), blocks.receives()
        if lane == call.my_rank:
            here = i32(0)
        n_units = i32(n_own + largest(here) * n_others * units)
        unit, step = i32(warp_id() * workers + me), i32(n_warps() * workers)
        while ok and unit < n_units:
            (token, part), src_rank, among, n = split(unit, units), i32(call.my_rank), i32(0), i32(0)
            if unit < n_own:
                among = i32(warp_broadcast_i32(number(known, token, lane), call.my_rank))
                n = i32(among + 1)
            else:
                part, among, src_rank = unit_of_others(call.my_rank, i32(unit - n_own))
                n = i32(warp_broadcast_i32(here, src_rank))
            if among >= 0 and among < n:
                row_at = at.row(warp_broadcast_u64(windows, src_rank), among)
                row = i32(warp_broadcast_i32(before, src_rank) + among)
                if part == n_parts:
                    ok = more.receive(call, src_rank, row_at, row, lane, has_room)
                else:
                    if src_rank != call.my_rank:
                        ok, batch = take_part(call, src_rank, row_at, part, lane)
                    elif not is_first:
                        batch = load_part(call, token, part, lane)
                    a, b = span(part)
                    if ok and has_room:
                        rows.store(batch, to + u64(row) * u64(row_bytes), u32(1), i32(0), a, b, lane)
            unit, is_first = i32(unit + step), False
        return ok

    return namespace("rows", prepare=prepare, send=send, receive=receive, erase=erase)
