"""Sums rows in float32 in ascending order: a token's over its ranks, or, before a push, over its local experts.

A sum is rounded once; with several p2p worlds, each world's sum first. A warp adds rows vector by vector: every lane
its own vectors of all rows. Each lane holds the address of one row.
"""

from epmoe.device import (add_rn, ballot, device_fn, f32, f32_as_u32, i32, lane_id, load16, load_i32, load_u32,
                          store16, store_u32, syncwarp, u32, u32_as_f32, u64, warp_broadcast_u64)

from .. import elements
from ..bits import adding_four, but_lowest, each_of_four, four, lowest, split
from ..params import VECTOR, in_turn, tuple_of, word_in
from . import call as calls
from . import layout, mailbox
from .copy import parts
from .shape import arrays, p

MOST = 32               # rows: one a lane


@device_fn
def at_vector(vector, end):
    """Lanes past the end load the last vector again and store nothing, so that all lanes stay together."""
    return u64(VECTOR) * u64(min(vector, i32(end - 1)))


@device_fn
def gather(addresses, kept, n, lane):
    """Appends the nonzero addresses to the n in `kept`, one a lane -> (kept, n). n also counts those past MOST."""
    syncwarp()                                  # see the end of expand._expert_rows
    left = u32(ballot(addresses != u64(0)))
    while left != u32(0):
        address = u64(warp_broadcast_u64(addresses, lowest(left)))
        if lane == n:
            kept = address
        n, left = i32(n + 1), but_lowest(left)
    return kept, n


def _storing(numbers, at_once, sums_at, store16):
    """Device function (given, to, first, end, lane): a warp stores the sums of vectors [first, end), rounded, at `to`.

    sums_at(given, vector, end) -> the sums of a lane's `at_once` vectors, the first and every 32nd from there on. All
    their loads come before the stores.
    """
    pack = numbers.pack

    def storing(j):
        @device_fn
        def store(sums, to, vector, end):
            q, vector = pack(sums[j]), i32(vector + 32 * j)
            if vector < end:
                store16(to + u64(VECTOR) * u64(vector), q[0], q[1], q[2], q[3])
            return sums

        return store

    store_all = in_turn(at_once, storing)

    @device_fn
    def sum_vectors(given, to, first, end, lane):
        vector, stop = i32(first + lane), i32(end + lane)
        while vector < stop:
            store_all(sums_at(given, vector, end), to, vector, end)
            vector = i32(vector + 32 * at_once)

    return sum_vectors


def _one_by_one(sum_at, at_once=1):
    """sums_at for _storing. sum_at(given, at) -> the sum of the vectors `at` bytes after the beginnings of rows."""
    return tuple_of(at_once, lambda j: device_fn(
        lambda given, vector, end: sum_at(given, at_vector(i32(vector + 32 * j), end))))


def sum_of_rows(dtype, most, store16=store16, often_more=False):
    """Device function sum_rows(addresses, n, to, first, end, lane), called by a warp. dtype: "bf16", "fp16" or "fp32".

    It sums vectors [first, end) of the rows in the first n lanes, in lane order from +0.0, and stores them in the row
    at `to` by `store16`. Each n up to `most` has a loop of its own, with up to eight loads in flight. often_more: more
    rows are common, so they, too, get eight instead of four. This takes registers that other kernels do not have
    (benchmarks/notes/rows.md).
    """
    numbers = elements.make(dtype)
    zero_sums, add = numbers.zeros, numbers.add

    load_four = each_of_four(device_fn(lambda row, at: load16(row + at)))
    add_up_to_four = adding_four(device_fn(lambda sums, n, i, term: add(sums, term) if i < n else sums))
    # the addresses in four lanes; past the last lane that has one, that lane's again
    four_of = four(device_fn(lambda given, lane: u64(warp_broadcast_u64(given[0], i32(min(lane, given[1]))))))

    @device_fn
    def sums_of_many(given, vector, end):
        (addresses, n), i, sums, second = given, i32(0), zero_sums(), zero_sums()
        while i < n:
            rows = four_of((addresses, i32(n - 1)), i, 1)
            terms = load_four(rows, at_vector(vector, end))
            if often_more:
                terms_of_second = load_four(rows, at_vector(i32(vector + 32), end))
                second = add_up_to_four(second, n, i, 1, terms_of_second)
            sums, i = add_up_to_four(sums, n, i, 1, terms), i32(i + 4)
        return sums, second

    def one_more(rows_of, sum_at, n):
        """The functions for n rows from those for n - 1: addresses in the first lanes, the sum of a lane's vector."""
        return (device_fn(lambda addresses: rows_of(addresses) + (u64(warp_broadcast_u64(addresses, i32(n - 1))),)),
                device_fn(lambda rows, at: add(sum_at(rows, at), load16(rows[n - 1] + at))))

    def with_loop(n, rows_of, sum_at, sum_others):
        """sum_rows with a loop for n rows; sum_others sums other numbers of them."""
        at_once = 4 if n <= 2 else 2 if n <= 4 else 1
        sum_n = _storing(numbers, at_once, _one_by_one(sum_at, at_once), store16)

        @device_fn
        def sum_rows(addresses, n_rows, to, first, end, lane):
            if n_rows == n:
                sum_n(rows_of(addresses), to, first, end, lane)
            else:
                sum_others(addresses, n_rows, to, first, end, lane)

        return sum_rows

    sum_many = _storing(numbers, 2 if often_more else 1, sums_of_many, store16)
    sum_rows = device_fn(lambda addresses, n, to, first, end, lane: sum_many((addresses, n), to, first, end, lane))
    of_n = device_fn(lambda addresses: ()), device_fn(lambda rows, at: zero_sums())
    for n in range(1, most + 1):
        of_n = one_more(*of_n, n)
        sum_rows = with_loop(n, *of_n, sum_rows)
    return sum_rows


def sum_of_experts(shape, store16=store16):
    """Device function sum_row(params, row, to, first, end, lane): vectors [first, end) of the sum over local experts.

    It sums in float32 from +0.0 over ascending experts, rounds once and stores at `to`. It does not read experts
    without a row of this token.
    """
    numbers, most = elements.make(shape.dtype), shape.tuning.loops_of_experts
    sum_rows = sum_of_rows(shape.dtype, most, store16, often_more=True)
    zero_sums, add, n_local, row_bytes = numbers.zeros, numbers.add, shape.num_local_experts, shape.row_bytes

    @device_fn
    def experts_from(params, row, first, lane):
        """Address of the row of expert first + lane, 0 if it has none. All lanes load, to be together at the ballot."""
        expert, is_one = i32(min(i32(first + lane), i32(n_local - 1))), first + lane < n_local
        expert_row = i32(load_i32(word_in(params[p.expert_row], row, n_local, expert)))
        return params[p.x] + u64(expert_row) * u64(row_bytes) if is_one and expert_row >= 0 else u64(0)

    @device_fn
    def sum_at(given, at):
        """For more rows than lanes: looks the experts' rows up again for every vector."""
        (params, row, lane), of_rank, expert = given, zero_sums(), i32(0)
        while expert < n_local:
            addresses = experts_from(params, row, expert, lane)
            syncwarp()                          # as in gather()
            left = u32(ballot(addresses != u64(0)))
            while left != u32(0):
                of_rank = add(of_rank, load16(u64(warp_broadcast_u64(addresses, lowest(left))) + at))
                left = but_lowest(left)
            expert = i32(expert + 32)
        return of_rank

    sum_many = _storing(numbers, 1, _one_by_one(sum_at), store16)

    @device_fn
    def sum_row(params, row, to, first, end, lane):
        rows, n, expert = u64(0), i32(0), i32(0)
        while expert < n_local:                   # two windows of experts in flight
            a, b = experts_from(params, row, expert, lane), experts_from(params, row, i32(expert + 32), lane)
            rows, n = gather(a, rows, n, lane)
            rows, n = gather(b, rows, n, lane)
            expert = i32(expert + 64)
        if n <= MOST:
            sum_rows(rows, n, to, first, end, lane)
        else:
            sum_many((params, row, lane), to, first, end, lane)

    return sum_row


def _by_world(shape):
    """Device function sum_row(addresses, to, first, end, lane): sums and rounds each p2p world, then their sums."""
    numbers, ranks, world_size = elements.make(shape.dtype), shape.n_ranks, shape.p2p_world_size
    zero_sums, add, pack = numbers.zeros, numbers.add, numbers.pack

    @device_fn
    def of_world(addresses, at, first_rank, end):
        sums, rank = zero_sums(), i32(first_rank)
        while rank < end:
            row = u64(warp_broadcast_u64(addresses, rank))
            if row != u64(0):
                sums = add(sums, load16(row + at))
            rank = i32(rank + 1)
        return pack(sums)

    @device_fn
    def sum_at(addresses, at):
        total, rank = zero_sums(), i32(0)
        while rank < ranks:
            total = add(total, of_world(addresses, at, rank, i32(rank + world_size)))
            rank = i32(rank + world_size)
        return total

    return _storing(numbers, 1, _one_by_one(sum_at), store16)


def sum_over_ranks(shape):
    """Device function sum_row(addresses, to, first, end, lane): stores vectors [first, end) of the sum over ranks.

    to: where. addresses: lane r has the address of rank r's row, 0 for none; it reads no rows that do not exist.
    """
    if shape.by_world:
        return _by_world(shape)
    sum_rows = sum_of_rows(shape.dtype, min(shape.n_ranks, shape.tuning.loops_of_ranks))

    @device_fn
    def sum_row(addresses, to, first, end, lane):
        rows, n = gather(addresses, u64(0), i32(0), lane)
        sum_rows(rows, n, to, first, end, lane)

    return sum_row


def adding_rows(ranks, add, n, stays):
    """Device function (total, (call, rows, own), rank, 1, values): of n ranks, adds those that have the row.

    rows: lane r has rank r's row, 0 for none. own: the value for this rank's own row, if that stays in place (stays).
    add(total, value) -> total.
    """

    @device_fn
    def add_row(total, given, rank, value):
        call, rows, own = given
        if rank < ranks:
            if warp_broadcast_u64(rows, rank) != u64(0):
                total = add(total, own if stays and rank == call.my_rank else value)
        return total

    return adding_four(add_row, n)


def of_probs(shape, take, n, stays):
    """Device function (call, rows, token, own_row, lane) -> whether all arrived: a warp writes out_probs of a token.

    Unless expert-major, it sums each k over the token's ranks, ascending, from +0.0. In expert-major it copies each
    expert's prob from the expert's rank, and writes zero for ranks that the token did not go to. stays: as in
    adding_rows. own_row: number of this rank's row in probs. rows: what `take` reads. take(call, rows, rank, i) ->
    (whether they arrived, prob i, as bits, of n ranks from `rank` on).
    """
    ranks, n_local, n_meta, num_experts = shape.n_ranks, shape.num_local_experts, shape.n_meta, shape.num_experts
    add_rows = adding_rows(ranks, device_fn(lambda total, prob: add_rn(total, u32_as_f32(prob))), n, stays)

    @device_fn
    def sum_probs(call, rows, token, own_row, lane):
        total, rank, ok, own = f32(0), i32(0), True, u32(0)
        if stays and own_row >= 0 and lane < n_meta:
            own = u32(load_u32(word_in(call.params[p.probs], own_row, n_meta, lane)))
        while ok and rank < ranks:
            ok, probs = take(call, rows, rank, lane)
            total = add_rows(total, (call, rows, own), rank, 1, probs)
            rank = i32(rank + n)
        if ok and lane < n_meta:
            store_u32(word_in(call.params[p.out_probs], token, n_meta, lane), f32_as_u32(total))
        return ok

    @device_fn
    def store_prob(out, given, rank, prob):
        token, expert = given
        if rank < ranks and expert < n_local:
            store_u32(word_in(out, token, num_experts, rank * n_local + expert), prob)
        return out

    store_probs = adding_four(store_prob, n)

    @device_fn
    def collect_probs(call, rows, token, own_row, lane):
        rank, ok = i32(0), True
        while ok and rank < ranks:
            expert = i32(lane)
            while ok and expert - lane < n_local:
                ok, probs = take(call, rows, rank, expert)
                if ok:
                    store_probs(call.params[p.out_probs], (token, expert), rank, 1, probs)
                expert = i32(expert + 32)
            rank = i32(rank + n)
        return ok

    return collect_probs if shape.expert_major else sum_probs


def make(shape, flags):
    """Device function reduce(call, announced) -> whether all rows that this warp awaited came.

    It writes out [T, H], and out_probs if probs come back. Warps claim parts of tokens, and sum each when its rows have
    come. flags: of copy.py.
    """
    ranks, row_bytes, n_meta, has_probs = shape.n_ranks, shape.row_bytes, shape.n_meta, shape.has_probs
    mail, claim, spans, stays = (mailbox.reading(ranks), calls.claims(mailbox.NEXT_TO_RECEIVE), parts(shape.n_vectors),
                                 not shape.expert_major)
    sum_row, row_of = sum_over_ranks(shape), layout.row_of(ranks)

    @device_fn
    def load_prob(call, addresses, rank, i):
        """`take` of of_probs, for one rank: no wait, since reduce() has waited; 0 if there is no row."""
        there = u64(warp_broadcast_u64(addresses, rank))
        return True, (u32(load_u32(there + u64(4) * u64(i))) if there != u64(0) and i < n_meta else u32(0),)

    reduce_probs = of_probs(shape, load_prob, 1, False)

    @device_fn
    def reduce(call, announced):
        params, lane, n_parts, ok = call.params, i32(lane_id()), flags.n_parts(announced), True
        is_own = stays and lane == call.my_rank
        rows_at = mail.array_at(params, announced, arrays.rows, call.my_rank)
        probs_at = mail.array_at(params, announced, arrays.row_probs, call.my_rank)
        first_row, (_, before) = mail.mine_before(announced, call.my_rank), mail.received(announced, call.my_rank)
        if is_own:                              # they lie in x, in the order received
            rows_at, probs_at, first_row = params[p.x], params[p.probs], before
        unit = claim(call, lane)
        while ok and unit < call.num_tokens * n_parts:
            following = claim(call, lane)
            (token, part), awaited, at_row, at_probs = split(unit, n_parts), i32(-1), u64(0), u64(0)
            row = i32(row_of(params[p.row_of], token, lane))
            if row >= 0:
                row = i32(first_row + row)
                at_row = u64(rows_at + u64(row) * u64(row_bytes))
                at_probs = u64(probs_at + u64(4) * u64(row) * u64(n_meta))
                if not is_own:
                    awaited = row
            ok = flags.wait_for(call, awaited, part, lane)
            if ok:
                a, b = spans.span(part, n_parts)
                sum_row(at_row, params[p.out] + u64(token) * u64(row_bytes), a, b, lane)
                if has_probs and part == 0:
                    reduce_probs(call, at_probs, token, i32(-1), lane)
            unit = i32(following)
        return ok

    return reduce
