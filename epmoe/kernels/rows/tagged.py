"""Tagged rows: few rows travel in 8-byte words, 4 bytes of data and the number of the call, and need no signal.

Every word is stored relaxed at system scope by its source and polled relaxed by its receiver until it names this call.
By the PTX memory model an aligned 8-byte access is single-copy atomic: who sees the call's number sees the data beside
it. So neither is anything ordered between words, nor does a release wait for acknowledgements, and what a row's words
hold is read out of registers alone. For twice the bytes, that saves the way of a flag and of what it waits for.

The words lie in the pool, for each parity of calls and each source rank, where nothing else is ever written, and no
call's number comes twice; so what an earlier call left is never taken for this one's. Call e writes those of its parity
without asking, as windows.py explains.
"""

from types import SimpleNamespace

from epmoe.device import (SIM, all_lanes, device_fn, ffs, i32, lane_id, ld_relaxed_sys_u64, load_u64,
                          st_relaxed_sys_u64, u32, u64, warp_broadcast_u64)

from . import control, takes, waits
from .row_copy import VECTOR, rotated
from .status import FOR_WINDOW

WORD = 8                            # bytes
A_RUN = 32 * VECTOR // 4 * WORD     # bytes of the words of 32 vectors: first those of the vectors' first 4 bytes
A_QUARTER = A_RUN // 4


def suit(shape):
    """Whether a kernel's rows may travel so, if they are few: as they are, to be stored or added up as they come."""
    by_world = 1 < shape.p2p_world_size < shape.n_ranks
    return not (shape.expert_major or shape.expands or shape.encode or by_world)


def tags_for(shape, num_tokens):
    """RowsShape.tags of a kernel for a rank's tokens; with many this much more code would cost time.

    Not so in the simulator, whose ranks share a kernel, so that few and many tokens may meet.
    """
    return control.TAGGED_ROWS if suit(shape) and (SIM or num_tokens <= control.TAGGED_ROWS) else 0


def words_with(shape):
    """Words of what goes with a row: of slots, of probs, of scales; in this order, behind the row."""
    slots = shape.top_k * shape.has_meta
    return slots, shape.top_k * shape.has_probs, shape.scale_words


def _bytes_of_row(shape):
    return -(-(_bytes_of_vectors(shape) + WORD * sum(words_with(shape))) // 256) * 256


def _bytes_of_vectors(shape):
    return -(-shape.row_bytes // (32 * VECTOR)) * A_RUN


def bytes_for(shape):
    """Bytes of the words of one parity for the calls of a kernel."""
    return shape.n_ranks * control.TAGGED_ROWS * _bytes_of_row(shape) if suit(shape) else 0


def _of_vectors():
    """For _taking: the words of vectors, and the vectors."""
    @device_fn
    def look(at, known, tag):
        a, b, c, d = u64(tag), u64(tag), u64(tag), u64(tag)
        if at != u64(0):
            a, b = u64(ld_relaxed_sys_u64(at)), u64(ld_relaxed_sys_u64(at + u64(A_QUARTER)))
            c, d = u64(ld_relaxed_sys_u64(at + u64(2 * A_QUARTER))), u64(ld_relaxed_sys_u64(at + u64(3 * A_QUARTER)))
        return a, b, c, d

    @device_fn
    def is_late(w, tag):
        return u64(u64(u64(w[0] ^ tag) | u64(w[1] ^ tag)) | u64(u64(w[2] ^ tag) | u64(w[3] ^ tag))) >> u64(32) != u64(0)

    @device_fn
    def value_of(w):
        return u32(w[0]), u32(w[1]), u32(w[2]), u32(w[3])

    @device_fn
    def empty(at, tag):
        return u64(0), u64(0), u64(0), u64(0)

    return value_of, empty, look, is_late


def _of_words():
    """For _taking: single words, and their data."""
    @device_fn
    def look(at, known, tag):
        w = u64(tag)
        if at != u64(0):
            w = u64(ld_relaxed_sys_u64(at))
        return w

    @device_fn
    def is_late(w, tag):
        return u64(w ^ tag) >> u64(32) != u64(0)

    @device_fn
    def value_of(w):
        return u32(w)

    @device_fn
    def empty(at, tag):
        return u64(0)

    return value_of, empty, look, is_late


def _taking(block, phase, value_of, *of_words):
    """Device function take(params, epoch, source, step, p, q, r, s) -> (whether they came, four): as of takes.py."""
    wait = takes.of_four(block, phase, *of_words)

    @device_fn
    def take(params, epoch, source, step, p, q, r, s):
        ok, _, a, b, c, d = wait(params, epoch, source, step, u64(0), p, q, r, s)
        return ok, value_of(a), value_of(b), value_of(c), value_of(d)

    return take


def all_few(shape, few, *, told):
    """Device function (notes) -> whether no rank has more than `few` tokens: shape.tags, or shape.lamport.

    As they have told in this call, or as the call's handle knows them. All ranks see the same, and every rank that has
    so few has a kernel for it.
    """
    n_ranks = shape.n_ranks
    n_words = control.experts_at(n_ranks)
    first, step = (control.TOKENS, n_words) if told else (n_ranks * n_words, 1)

    @device_fn
    def all_have_few(notes):
        lane, n = i32(lane_id()), i32(0)
        if lane < n_ranks:
            n = i32(notes[first + lane * step])
        return all_lanes(n <= few) != 0

    return all_have_few


def make(shape, block, phase):
    """Device functions for one kernel.

    rows_at(place(params, rank, source), epoch): where a rank has the words of a source's rows. row_at(rows, row): of
    one of them. vector_at(row, vector), word_at(row, i): of a row's words the first one of a vector, the i-th of what
    goes with it. put(at, number, epoch): a word. put_batch(batch, rows, mask, start, base, end, lane, epoch): as
    store_batch of row_copy.py, in words. take, take_words: _taking() of vectors and of single words. take_word(params,
    epoch, source, at): a thread; a word of this call, 0 if it does not come.
    """
    row_bytes, behind = _bytes_of_row(shape), _bytes_of_vectors(shape)
    of_source = control.TAGGED_ROWS * row_bytes
    p_pools, p_words, p_timeout = block.offset("pool_ptrs"), block.offset("words"), block.offset("timeout_ns")
    p_tagged, p_bytes = block.offset("tagged_at"), block.offset("tagged_bytes")

    @device_fn
    def place(params, rank, source):
        """What can be looked up before the call is known: (address in calls of parity 0, bytes to the other)."""
        pool = u64(load_u64(params + u64(p_pools) + u64(8) * u64(rank)))
        at = u64(u64(load_u64(params + u64(p_tagged))) + u64(source) * u64(of_source))
        return u64(pool + at), u64(load_u64(params + u64(p_bytes)))

    @device_fn
    def rows_at(place, epoch):
        return u64(place[0] + (u64(epoch) & u64(1)) * place[1])

    @device_fn
    def row_at(rows, row):
        return u64(u64(rows) + u64(row) * u64(row_bytes))

    @device_fn
    def vector_at(row, vector):
        return u64(row + u64(A_RUN) * u64(u32(vector) >> u32(5)) + u64(WORD) * u64(u32(vector) & u32(31)))

    @device_fn
    def word_at(row, i):
        return u64(row + u64(behind) + u64(WORD) * u64(i))

    @device_fn
    def put(at, number, epoch):
        st_relaxed_sys_u64(at, waits.told(epoch, number))

    @device_fn
    def put_vector(at, q, epoch):
        put(at, q[0], epoch)
        put(at + u64(A_QUARTER), q[1], epoch)
        put(at + u64(2 * A_QUARTER), q[2], epoch)
        put(at + u64(3 * A_QUARTER), q[3], epoch)

    @device_fn
    def put_batch(batch, rows, mask, start, base, end, lane, epoch):
        n, at, left = i32((end - base - lane + 31) >> 5), vector_at(u64(0), i32(base + lane)), rotated(mask, start)
        while left != u32(0):
            to = u64(u64(warp_broadcast_u64(rows, i32((ffs(left) - 1 + start) & 31))) + at)
            if n > 0:
                put_vector(to, batch[0], epoch)
            if n > 1:
                put_vector(to + u64(A_RUN), batch[1], epoch)
            if n > 2:
                put_vector(to + u64(2 * A_RUN), batch[2], epoch)
            if n > 3:
                put_vector(to + u64(3 * A_RUN), batch[3], epoch)
            left = u32(left & u32(left - u32(1)))

    take, take_words = _taking(block, phase, *_of_vectors()), _taking(block, phase, *_of_words())

    @device_fn
    def take_word(params, epoch, source, at):
        status = u64(u64(load_u64(params + u64(p_words))) + u64(control.STATUS))
        return waits.wait_for_tagged_word(at, u64(ld_relaxed_sys_u64(at)), epoch, status,
                                          u64(load_u64(params + u64(p_timeout))), phase, FOR_WINDOW, source)

    return SimpleNamespace(place=place, rows_at=rows_at, row_at=row_at, vector_at=vector_at, word_at=word_at, put=put,
                           put_batch=put_batch, take=take, take_words=take_words, take_word=take_word)
