"""Sending tagged rows (tagged.py) before anybody has told anything, and storing those that come where they are to stay.
"""

from types import SimpleNamespace

from epmoe.device import (any_lane, ballot, block_dim, block_idx, device_fn, ffs, grid_dim, i32, lane_id, load_i32,
                          load_u32, load_u64, n_warps, popc, shared_add_i32, store_u32, store_u64,
                          syncthreads_or, thread_idx, u32, u64, warp_broadcast_i32, warp_broadcast_u64, warp_id)

from . import companions, control, peers, roles, tagged
from .companions import MINUS_ONE
from .row_copy import BATCH, VECTOR, copy_to_lanes, parts

NOBODY = 2**31 - 1      # as a unit of work: none


def in_bits(ranks):
    """Device function (bits, token, lane) -> number of the token's row among those for rank `lane`, -1 for none.

    bits: in lane r, as u64, a bit for each token that goes to rank r.
    """
    @device_fn
    def number(bits, token, lane):
        mine, row = u32(bits), i32(-1)
        if u32(mine >> u32(token)) & u32(1) != u32(0):
            row = i32(popc(u32(mine & u32(u32(u32(1) << u32(token)) - u32(1)))))
        return row

    return number


def in_handle(ranks):
    """Device function (row_of, token, lane): the same, out of a handle's array at this address."""
    @device_fn
    def number(row_of, token, lane):
        row = i32(-1)
        if lane < ranks:
            row = i32(load_i32(u64(row_of) + u64(4) * u64(token * ranks + lane)))
        return row

    return number


def more(shape, block, words):
    """Device functions (look, send, receive) for what goes with a row.

    send(params, token, seen, mask, to, epoch, lane): to the words of a row at each rank of `mask`, in whose lane `to`
    has their address. receive(params, epoch, my_rank, source, at, row, lane, has_room): whether it came; it is stored
    with the row, if there is room.
    """
    (n_slots, n_probs, n_scales), (look, _) = tagged.words_with(shape), companions.make(shape, block)
    local, n_all, p_scales = shape.n_local_experts, n_slots + n_probs + n_scales, block.offset("scales")
    home, word_at, put, take_word = home_of(block), words.word_at, words.put, words.take_word

    @device_fn
    def send(params, token, seen, mask, to, epoch, lane):
        expert, prob = seen
        owner, local_expert, left = i32(-1), u32(0xFFFFFFFF), u32(mask)
        if expert >= 0:
            owner, local_expert = i32(u32(expert) // u32(local)), u32(u32(expert) % u32(local))
        scales = u64(0)
        if n_scales > 0:
            scales = u64(load_u64(params + u64(p_scales))) + u64(4) * u64(token) * u64(n_scales)
        while left != u32(0):
            rank = i32(ffs(left) - 1)
            there = u64(warp_broadcast_u64(to, rank))
            if lane < n_slots:
                value, here = u32(0xFFFFFFFF), u32(0)
                if owner == rank:
                    value, here = local_expert, prob
                put(word_at(there, lane), value, epoch)
                if n_probs > 0:
                    put(word_at(there, i32(n_slots + lane)), here, epoch)
            i = i32(lane)
            while i < n_scales:
                put(word_at(there, i32(n_slots + n_probs + i)), load_u32(scales + u64(4) * u64(i)), epoch)
                i = i32(i + 32)
            left = u32(left & u32(left - u32(1)))

    @device_fn
    def keep(params, my_rank, row, i, data):
        """Stores what the i-th word of a row says."""
        if i < n_slots:
            value = u64(data)
            if data == u32(0xFFFFFFFF):
                value = u64(MINUS_ONE)
            store_u64(home(params, my_rank, 1) + u64(8) * (u64(row) * u64(n_slots) + u64(i)), value)
        elif i < n_slots + n_probs:
            store_u32(home(params, my_rank, 2) + u64(4) * (u64(row) * u64(n_probs) + u64(i - n_slots)), data)
        else:
            k = u64(i - n_slots - n_probs)
            store_u32(home(params, my_rank, 3) + u64(4) * (u64(row) * u64(n_scales) + k), data)

    @device_fn
    def receive(params, epoch, my_rank, source, at, row, lane, has_room):
        ok, i = True, i32(lane)
        while i < n_all:
            word = u64(take_word(params, epoch, source, word_at(at, i)))
            ok, data = ok and word != u64(0), u32(word)
            if has_room:
                keep(params, my_rank, row, i, data)
            i = i32(i + 32)
        return any_lane(not ok) == 0

    return look, send, receive


def or_none(vector_at):
    """Device function (row, vector, end) -> where a row has the vector, 0 for one behind the end."""
    @device_fn
    def at(row, vector, end):
        place = u64(0)
        if vector < end:
            place = vector_at(row, vector)
        return place

    return at


def home_of(block):
    """Device function (params, my_rank, index): address of this rank's array `index` of the call."""
    p_pools, p_places = block.offset("pool_ptrs"), block.offset("places")

    @device_fn
    def home(params, my_rank, index):
        pool = u64(load_u64(params + u64(p_pools) + u64(8) * u64(my_rank)))
        return u64(pool + u64(load_u64(params + u64(p_places) + u64(8) * u64(index))))

    return home


def make(shape, block, phase, number, *, is_looked_up):
    """Device functions for one kernel; number: in_bits or in_handle, `known` what that takes; is_looked_up: in memory.

    prepare(params, num_tokens, my_rank, x, known) -> what a warp sends first, on its way to its registers; bits are not
    needed. send(params, epoch,
    num_tokens, my_rank, x, known, prepared): this warp's share of this rank's tokens; of no warp of the clerk, nor of
    the last warp of a block. receive(params, epoch, my_rank, notes): this warp's share of the rows that come, stored as
    notes' counts say; of all blocks but the clerk; whether they came. count_slots(params, epoch, my_rank, notes,
    experts): of the clerk; adds the slots of each local expert in the rows that come to a shared array.
    """
    ranks, row_bytes, words = shape.n_ranks, shape.row_bytes, tagged.make(shape, block, phase)
    place_of, rows_at, row_at, vector_at = words.place, words.rows_at, words.row_at, words.vector_at
    word_at, put_batch, take, take_word = words.word_at, words.put_batch, words.take, words.take_word
    at_vector = or_none(vector_at)
    n_vectors, n_apart = row_bytes // VECTOR, int(sum(tagged.words_with(shape)) > 0)
    count_parts, part_span = parts(n_vectors)
    load_batch, store_batch, _ = copy_to_lanes(read_only=True)
    look, send_more, receive_more = more(shape, block, words)
    _, _, _, received, _ = peers.sums(ranks)
    home, n_slots, n_words = home_of(block), shape.top_k * shape.has_meta, control.experts_at(ranks)

    @device_fn
    def parts_of(n_rows, warps):
        return count_parts(n_rows, i32(warps - n_apart * n_rows))

    @device_fn
    def share(num_tokens):
        """(first unit of work of this warp, how many warps share, parts of a row)."""
        of_block, blocks = i32(max(1, i32(n_warps() - 1))), i32(grid_dim() - 1)
        unit, warps = i32(warp_id() * blocks + block_idx()), i32(of_block * blocks)
        if roles.is_clerk() or warp_id() >= of_block:
            unit = i32(NOBODY)
        return unit, warps, parts_of(num_tokens, warps)

    @device_fn
    def prepare(params, num_tokens, my_rank, x, known):
        lane, (unit, _, n_parts), none = i32(lane_id()), share(num_tokens), u32(0)
        units, row, seen = i32(n_parts + n_apart), i32(-1), (i32(-1), u32(0))
        batch, place = ((none, none, none, none), (none, none, none, none), (none, none, none, none),
                        (none, none, none, none)), (u64(0), u64(0))
        token = i32(u32(unit) // u32(units))
        if token < num_tokens:
            part = i32(unit - token * units)
            a, b = part_span(part, n_parts)     # none behind the last part
            if a < b:
                batch = load_batch(u64(x) + u64(token) * u64(row_bytes), a, b, lane)
            if n_apart > 0 and part == n_parts:
                seen = look(params, token, lane)
            if is_looked_up:
                row = number(known, token, lane)
        if lane < ranks:
            place = place_of(params, lane, my_rank)
        return place, row, seen, batch

    @device_fn
    def send(params, epoch, num_tokens, my_rank, x, known, prepared):
        place, row, seen, batch = prepared
        lane, (unit, warps, n_parts), start = i32(lane_id()), share(num_tokens), i32((my_rank + 1) & 31)
        units, rows, is_first = i32(n_parts + n_apart), rows_at(place, epoch), True
        while unit < num_tokens * units:
            token = i32(u32(unit) // u32(units))
            part = i32(unit - token * units)
            if not (is_looked_up and is_first):
                row = number(known, token, lane)
            mask, to = u32(ballot(row >= 0)), row_at(rows, row)
            a, b = part_span(part, n_parts)
            while a < b:
                if not is_first:
                    batch = load_batch(u64(x) + u64(token) * u64(row_bytes), a, b, lane)
                put_batch(batch, to, mask, start, a, b, lane, epoch)
                a, is_first = i32(a + BATCH), False
            if n_apart > 0 and part == n_parts:
                if not is_first:
                    seen = look(params, token, lane)
                send_more(params, token, seen, mask, to, epoch, lane)
            unit, is_first = i32(unit + warps), False

    @device_fn
    def receive(params, epoch, my_rank, notes):
        lane, ends, rows, x = i32(lane_id()), received(notes, my_rank), u64(0), home(params, my_rank, 0)
        before = peers.of_lane_before(ends)
        if lane < ranks:
            rows = rows_at(place_of(params, my_rank, lane), epoch)
        n_rows, blocks = i32(warp_broadcast_i32(ends, i32(ranks - 1))), i32(grid_dim() - 1)
        unit, warps, ok = i32(warp_id() * blocks + block_idx()), i32(n_warps() * blocks), True
        n_parts = parts_of(n_rows, warps)
        units = i32(n_parts + n_apart)
        while ok and unit < n_rows * units:
            row = i32(u32(unit) // u32(units))
            part, source = i32(unit - row * units), i32(ffs(u32(ballot(lane < ranks and ends > row))) - 1)
            at = row_at(warp_broadcast_u64(rows, source), i32(row - warp_broadcast_i32(before, source)))
            a, b = part_span(part, n_parts)
            while ok and a < b:
                one = i32(a + lane)
                ok, e, f, g, h = take(
                    params, epoch, source, i32(0), at_vector(at, one, b), at_vector(at, i32(one + 32), b),
                    at_vector(at, i32(one + 64), b), at_vector(at, i32(one + 96), b))
                if ok:
                    store_batch((e, f, g, h), x + u64(row) * u64(row_bytes), u32(1), i32(0), a, b, lane)
                a = i32(a + BATCH)
            if n_apart > 0 and part == n_parts:
                ok = receive_more(params, epoch, my_rank, source, at, row, lane, True)
            unit = i32(unit + warps)
        return ok

    @device_fn
    def count_slots(params, epoch, my_rank, notes, experts):
        ok, source, before = True, i32(0), i32(0)
        while source < ranks:
            n, i = i32(notes[source * n_words + control.COUNTS + my_rank]), i32(thread_idx() - before)
            rows = rows_at(place_of(params, my_rank, source), epoch)
            while i < 0:                        # sources one behind another over the threads
                i = i32(i + block_dim())
            while ok and i < n * n_slots:
                row = i32(u32(i) // u32(n_slots))
                word = u64(take_word(params, epoch, source,
                                           word_at(row_at(rows, row), i32(i - row * n_slots))))
                ok, i = word != u64(0), i32(i + block_dim())
                if ok and i32(u32(word)) >= 0:
                    shared_add_i32(experts, i32(u32(word)), i32(1))
            source, before = i32(source + 1), i32(before + n * n_slots)
        return not syncthreads_or(not ok)

    return SimpleNamespace(prepare=prepare, send=send, receive=receive, count_slots=count_slots)
