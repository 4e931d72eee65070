"""Sends Lamport rows (lamport.py) before any rank has announced anything, and stores arriving rows in their final
place.

Some blocks send, and others receive, because polls of a multiprocessor queue behind its own stores. A warp sends a part
of a row, or its metadata. The receiving blocks copy this rank's own rows while the first rows of other ranks are under
way.
"""

from types import SimpleNamespace

from epmoe.device import (ballot, block_idx, device_fn, ffs, grid_dim, i32, lane_id, n_warps,
                          st_relaxed_sys_u64, store16, store16_relaxed_sys, store_u64, u32, u64, warp_broadcast_i32,
                          warp_broadcast_u64, warp_id)
from epmoe.layout import ABSENT

from . import lamport, lamport_words, peers, row_flags
from .lamport import PART
from .lamport_words import NOTHING
from .row_copy import VECTOR, copy_to_lanes
from .substitutes import substitute, with_words

TENTHS_SENDING = 3      # of the blocks but the leader block


def _blocks():
    """Device functions (sends, senders, receives, receivers): whether this block does so, and how many do."""
    tenths = TENTHS_SENDING

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
        """(this block's number among those that receive, how many there are)."""
        first = senders()
        if first == grid_dim() - 1:             # a single block does both
            first = i32(0)
        return i32(block_idx() - first), i32(grid_dim() - 1 - first)

    return sends, senders, receives, receivers


def make(shape, block, phase, number):
    """Device functions for one kernel; of no block that is the leader block.

    number: device function (known, token, lane) -> the token's row among those for rank `lane`, -1 for none;
    unprepared(): in the stead of prepare(), for others. prepare(params, num_tokens, my_rank, x) -> what a warp sends,
    or copies, first, on its way to its registers. send(params, epoch, num_tokens, my_rank, x, known, prepared): this
    warp's share of this rank's tokens. receive(params, epoch, num_tokens, my_rank, x, known, notes, has_room,
    prepared): this warp's share of what comes, stored as notes' counts say, if there is room. erase(params, epoch,
    num_tokens, my_rank, known, prepared): what nobody is going to receive.
    """
    ranks, row_bytes, words = shape.n_ranks, shape.row_bytes, lamport.make(shape, block, phase)
    place_of, rows_at, row_at, vector_at = words.place, words.rows_at, words.row_at, words.vector_at
    word_at, part_at, put, take_part = words.word_at, words.part_at, words.put, words.take_part
    n_vectors, n_parts, n_all = row_bytes // VECTOR, lamport.n_parts_of(shape), sum(lamport_words.words_with(shape))
    units, n_others = n_parts + int(n_all > 0), max(ranks - 1, 1)
    load_batch, store_away, _ = copy_to_lanes(read_only=True, store=store16_relaxed_sys)
    _, store_batch, _ = copy_to_lanes(read_only=True)
    look, send_more, receive_more = lamport_words.more(shape, block, words)
    (_, _, _, received, _), home = peers.sums(ranks), lamport_words.home_of(block)
    sends, senders, receives, receivers = _blocks()

    @device_fn
    def at_vector(row, vector, end):
        """Where a row has the vector, 0 for one behind the end."""
        place = u64(0)
        if vector < end:
            place = vector_at(row, vector)
        return place

    @device_fn
    def span(part):
        return i32(part * PART), i32(min(i32(part * PART + PART), n_vectors))

    @device_fn
    def first_unit():
        """(first unit of work of this warp, distance to its next one) of a block that sends, or receives only."""
        me, blocks = i32(block_idx()), senders()
        if not sends():
            me, blocks = receivers()
        return i32(warp_id() * blocks + me), i32(n_warps() * blocks)

    @device_fn
    def load_part(x, token, part, lane):
        a, b = span(part)
        return load_batch(u64(x) + u64(token) * u64(row_bytes), a, b, lane)

    @device_fn
    def unprepared():
        none = u32(0), u32(0), u32(0), u32(0)
        return (u64(0), u64(0)), (i32(-1), u32(0)), (none, none, none, none)

    @device_fn
    def prepare(params, num_tokens, my_rank, x):
        lane, (unit, _), (place, seen, batch) = i32(lane_id()), first_unit(), unprepared()
        token = i32(u32(unit) // u32(units))
        part = i32(unit - token * units)
        if token < num_tokens and block_idx() < grid_dim() - 1:
            if part < n_parts:
                batch = load_part(x, token, part, lane)
            elif sends():
                seen = look(params, token, lane)
        if lane < ranks:
            place = place_of(params, lane, my_rank)
        return place, seen, batch

    @device_fn
    def send_part(batch, part, mask, start, to, lane, epoch):
        (a, b), instead = span(part), substitute(batch)
        if instead != u32(ABSENT):
            batch = with_words(batch, u32(ABSENT), instead)
        if u32(u32(mask >> u32(lane)) & u32(1)) != u32(0):
            put(part_at(to, part), instead, epoch)
        store_away(batch, to, mask, start, a, b, lane)

    @device_fn
    def send(params, epoch, num_tokens, my_rank, x, known, prepared):
        place, seen, batch = prepared
        lane, (unit, step), start, is_first = i32(lane_id()), first_unit(), i32((my_rank + 1) & 31), True
        rows, others = rows_at(place, epoch), u32(~u32(u32(1) << u32(my_rank)))
        while sends() and unit < num_tokens * units:
            token = i32(u32(unit) // u32(units))
            part, row = i32(unit - token * units), number(known, token, lane)
            mask, to = u32(ballot(row >= 0)), row_at(rows, row)
            if part < n_parts:
                if not is_first:
                    batch = load_part(x, token, part, lane)
                send_part(batch, part, u32(mask & others), start, to, lane, epoch)
            else:
                if not is_first:
                    seen = look(params, token, lane)
                send_more(params, token, seen, mask, to, epoch, lane)
            unit, is_first = i32(unit + step), False

    @device_fn
    def erase(params, epoch, num_tokens, my_rank, known, prepared):
        lane, (unit, step), rows = i32(lane_id()), first_unit(), rows_at(prepared[0], epoch)
        gone = u32(ABSENT)
        while sends() and unit < num_tokens * units:
            token = i32(u32(unit) // u32(units))
            part, row = i32(unit - token * units), number(known, token, lane)
            left, to = u32(ballot(row >= 0)), row_at(rows, row)
            while left != u32(0):
                there, i = u64(warp_broadcast_u64(to, i32(ffs(left) - 1))), i32(lane)
                if part < n_parts:
                    a, b = span(part)
                    while a + i < b:
                        store16(vector_at(there, i32(a + i)), gone, gone, gone, gone)
                        i = i32(i + 32)
                    if lane == 0:
                        store_u64(part_at(there, part), u64(NOTHING))
                else:
                    while i < n_all:
                        store_u64(word_at(there, i), u64(NOTHING))
                        i = i32(i + 32)
                left = u32(left & u32(left - u32(1)))
            unit = i32(unit + step)

    @device_fn
    def take(params, epoch, source, at, part, lane):
        """(whether a part arrived, its batch as sent), by a warp."""
        (a, b), word = span(part), part_at(at, part)
        one = i32(a + lane)
        ok, instead, e, f, g, h = take_part(
            params, epoch, source, i32(0), word, at_vector(at, one, b), at_vector(at, i32(one + 32), b),
            at_vector(at, i32(one + 64), b), at_vector(at, i32(one + 96), b))
        batch = e, f, g, h
        if ok and lane == 0:                    # all lanes have seen it
            st_relaxed_sys_u64(word, u64(NOTHING))
        if instead != u32(ABSENT):
            batch = with_words(batch, instead, u32(ABSENT))
        return ok, batch

    @device_fn
    def unit_of_others(my_rank, unit):
        """(part, number among the rows from a rank, that rank): of all ranks the first rows first, as they are sent."""
        turn = i32(u32(unit) // u32(units))
        among = i32(u32(turn) // u32(n_others))
        source = i32(my_rank + 1 + turn - among * n_others)
        if source >= ranks:
            source = i32(source - ranks)
        return i32(unit - turn * units), among, source

    @device_fn
    def receive(params, epoch, num_tokens, my_rank, x, known, notes, has_room, prepared):
        _, _, batch = prepared
        lane, ends, rows, is_first = i32(lane_id()), received(notes, my_rank), u64(0), not sends()
        before, to, (me, blocks) = peers.of_lane_before(ends), home(params, my_rank, 0), receivers()
        if lane < ranks:
            rows = rows_at(place_of(params, my_rank, lane), epoch)
        here, n_own, ok = i32(ends - before), i32(num_tokens * units), receives()
        if lane == my_rank:
            here = i32(0)
        n_units = i32(n_own + row_flags.largest(here) * n_others * units)
        unit, step = i32(warp_id() * blocks + me), i32(n_warps() * blocks)
        while ok and unit < n_units:
            token = i32(u32(unit) // u32(units))
            part, source, among, n = i32(unit - token * units), i32(my_rank), i32(0), i32(0)
            if unit < n_own:
                among = i32(warp_broadcast_i32(number(known, token, lane), my_rank))
                n = i32(among + 1)
            else:
                part, among, source = unit_of_others(my_rank, i32(unit - n_own))
                n = i32(warp_broadcast_i32(here, source))
            if among >= 0 and among < n:
                at = row_at(warp_broadcast_u64(rows, source), among)
                row = i32(warp_broadcast_i32(before, source) + among)
                if part == n_parts:
                    ok = receive_more(params, epoch, my_rank, source, at, row, lane, has_room)
                else:
                    if source != my_rank:
                        ok, batch = take(params, epoch, source, at, part, lane)
                    elif not is_first:
                        batch = load_part(x, token, part, lane)
                    a, b = span(part)
                    if ok and has_room:
                        store_batch(batch, to + u64(row) * u64(row_bytes), u32(1), i32(0), a, b, lane)
            unit, is_first = i32(unit + step), False
        return ok

    return SimpleNamespace(unprepared=unprepared, prepare=prepare, send=send, receive=receive, erase=erase)
