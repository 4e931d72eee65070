"""The unit that one warp of combine sends: a piece of a row, to the place in the row's src_info."""

from typing import NamedTuple

from epmoe import layout
from epmoe.device import device_fn, i32, load16_stream, load_u64, n_warps, store16, syncwarp, u32, u64

from . import lamport, transport
from .division import divided
from .formats.row_copy import LANES, copy_part, most_parts

VECTOR = 16         # bytes
HELD = 7            # vectors that a lane holds at a time


class RowPieces(NamedTuple):
    """Device functions; an entry is one of region A: (local expert, src_rank).

    cut(n_rows) -> (n_parts, vectors of a part): how a block that has so many rows cuts each: a piece for every warp.
    ask(rows, src_infos, row, first, end, lane) -> (src_info, vectors from `first` on): on their way to a warp.
    send(params, rows, asked, row, entry, at_row, part, first, end, my_rank, lane): a warp writes vectors first to
        end - 1 of a row, as far as there are, to their place; the row is the entry's at_row-th; asked: what `ask` gave.
    signal(params, entry, my_rank, count): one thread writes the entry's count into the word of recv_count of the rank
        that its rows go to; covers all that this thread has written, or acquired from others.
    signals: whether signals are needed; else each word of a row is its own ready flag for its receiver.
    """

    cut: callable
    ask: callable
    send: callable
    signal: callable
    signals: bool


def make(cfg, block, without_signals=False) -> RowPieces:
    """The functions for one parameter block. without_signals: as in lamport.py."""
    to, bytes_a_row = transport.make(cfg, block), layout.combine_msg_bytes(cfg)
    recv_buf, crosses, is_far, put, complete, tell_count = (to.recv_buf, to.crosses, to.is_far, to.put, to.complete,
                                                            to.signal)
    store = lamport.store_row if without_signals else store16
    place_of, most, n_vectors = _placing(cfg), most_parts(bytes_a_row), bytes_a_row // VECTOR
    stage, (load_held, deliver) = copy_part(bytes_a_row, read_only=True), _carrying(n_vectors, store)
    ranks, tokens_per_rank, keeps_own = cfg.n_src_ranks, cfg.max_tokens_per_rank, cfg.skip_a2a
    p_send = block.index("send_buf_p")

    @device_fn
    def cut(n_rows):
        n_parts = i32(max(i32(1), min(i32(most), divided(n_warps(), i32(max(i32(1), n_rows))))))
        return n_parts, i32(divided(i32(most + n_parts - 1), n_parts) * LANES)

    @device_fn
    def ask(rows, src_infos, row, first, end, lane):
        return (u64(load_u64(src_infos + u64(8) * u64(row))),
                load_held(rows + u64(row) * u64(bytes_a_row), first, end, lane))

    @device_fn
    def rank_of(entry, my_rank):
        rank = i32(u32(entry) % u32(ranks))
        if keeps_own:
            rank = i32(my_rank)
        return rank

    @device_fn
    def near_place(params, pair, src, entry, at_row, part, my_rank, lane):
        """Where a row goes, as its src_info says; 0 if there is no such place, or if it is far: then it has gone."""
        rank = rank_of(entry, my_rank)
        place = place_of(recv_buf(params, rank, my_rank), i32(u32(pair)), i32(u32(pair >> u64(32))))
        if crosses:
            if place != u64(0) and is_far(rank, my_rank):
                if part == 0:   # out of send_buf, where the entry has a row for each token
                    staged = (params[p_send]
                              + u64(entry * tokens_per_rank + at_row) * u64(bytes_a_row))
                    stage(staged, src, 0, 1, lane)
                    syncwarp()  # the row by all lanes, before the network reads it
                    put(place, staged, bytes_a_row, rank)
                    complete()
                place = u64(0)
        return place

    @device_fn
    def send(params, rows, asked, row, entry, at_row, part, first, end, my_rank, lane):
        (pair, held), src = asked, rows + u64(row) * u64(bytes_a_row)
        place = near_place(params, pair, src, entry, at_row, part, my_rank, lane)
        if place != u64(0):
            deliver(place, src, first, i32(min(end, n_vectors)), lane, held)

    @device_fn
    def signal(params, entry, my_rank, count):
        index = i32(entry - i32(u32(entry) % u32(ranks)))
        if not keeps_own:
            index = i32(index + my_rank)
        tell_count(params, rank_of(entry, my_rank), my_rank, index, count)

    return RowPieces(cut, ask, send, signal, not without_signals)


def _placing(cfg):
    """Device function (recv_buf, token, k) -> the address of place [token, k]; 0 if there is no such place.

    What src_info says is another rank's memory: a wrong pair must not become a wild write there.
    """
    bytes_a_row, top_k, tokens_per_rank = layout.combine_msg_bytes(cfg), cfg.top_k, cfg.max_tokens_per_rank

    @device_fn
    def place_of(recv_buf, token, k):
        place = u64(0)
        if token >= 0 and token < tokens_per_rank and k >= 0 and k < top_k:
            place = recv_buf + u64(token * top_k + k) * u64(bytes_a_row)
        return place

    return place_of


def _carrying(n_vectors, store_vector):
    """(ask, deliver): a warp copies vectors of a row, in two halves, between which it can find out where they go.

    ask(src, first, end, lane) -> a lane's vectors first + lane and more at distances of 32, as many as it holds at a
    time; deliver(place, src, first, end, lane, held) stores them and copies the rest. The loads are of a kind that the
    compiler leaves where they are: those of the read-only path it puts behind the question whether there is a place.
    """
    @device_fn
    def load(src, i, last):
        # Past the end the last vector is read again and not stored: no branch comes between the loads.
        return load16_stream(src + u64(VECTOR) * u64(min(i, last)))

    @device_fn
    def ask(src, first, end, lane):
        last, i, none = i32(min(end, n_vectors) - 1), i32(first + lane), (u32(0), u32(0), u32(0), u32(0))
        a, b, c, d, e, f, g = load(src, i, last), none, none, none, none, none, none
        if first + LANES < end:
            b, c, d = load(src, i32(i + 32), last), load(src, i32(i + 64), last), load(src, i32(i + 96), last)
            e, f, g = load(src, i32(i + 128), last), load(src, i32(i + 160), last), load(src, i32(i + 192), last)
        return a, b, c, d, e, f, g

    @device_fn
    def store(place, i, end, q):
        if i < end:
            store_vector(place + u64(VECTOR) * u64(i), q[0], q[1], q[2], q[3])

    @device_fn
    def store_held(place, i, end, held):
        store(place, i, end, held[0])
        store(place, i32(i + 32), end, held[1])
        store(place, i32(i + 64), end, held[2])
        store(place, i32(i + 96), end, held[3])
        store(place, i32(i + 128), end, held[4])
        store(place, i32(i + 160), end, held[5])
        store(place, i32(i + 192), end, held[6])

    @device_fn
    def deliver(place, src, first, end, lane, held):
        store_held(place, i32(first + lane), end, held)
        first = i32(first + HELD * LANES)
        while first < end:
            store_held(place, i32(first + lane), end, ask(src, first, end, lane))
            first = i32(first + HELD * LANES)

    return ask, deliver
