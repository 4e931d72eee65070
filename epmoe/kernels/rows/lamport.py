"""Lamport rows: rows of up to 128 tokens without flags; each 32-bit word is its own ready flag.

As in epmoe/kernels/lamport.py, a 32-bit word of a window is the sentinel ABSENT, all ones, until it is written. Rows
are stored relaxed at system scope. The thread that stores or sums a row polls its vectors until none of their words is
ABSENT. A row's metadata follows it (lamport_words.py). So no release waits for acknowledgements, and no flag follows
the rows.

A rank has windows for each parity of calls and each src_rank. A thread that has taken something restores ABSENT. So
when call e begins to write the words of its parity, without asking, all are ABSENT: the writer knows from call e - 1
that every rank had begun that call, after everything in call e - 2. If data was sent that no rank will take, its sender
restores ABSENT.

A payload word equal to ABSENT would look like a word that has not arrived. In a row that is summed it is replaced by
NAN, since the bits of a NaN result are unspecified. In a row that must arrive bit-exact, each PART has a word that
names an escape for ABSENT: a number that does not occur in this part.
"""

from types import SimpleNamespace

from epmoe.device import (SIM, device_fn, load16_relaxed_sys, store16_relaxed_sys, u32,
                          u64)
from epmoe.layout import ABSENT

from .. import lamport
from ..lamport import is_absent
from ..params import in_context
from . import control, lamport_words, takes
from .lamport_words import WORD, words_with
from .row_copy import BATCH, VECTOR, copy_to_lanes

PART = BATCH            # vectors of a row that have a substitute for ABSENT in common
MOST_BYTES = 64 << 20   # of the windows of one parity


def suit(shape):
    """Whether the rows of a kernel may travel so, if they are few: as they are, to be stored or summed as they come."""
    by_world = 1 < shape.p2p_world_size < shape.n_ranks
    return not (shape.expert_major or shape.expands or shape.encode or by_world) and _bytes_of(shape) <= MOST_BYTES


def rows_for(shape, num_tokens):
    """RowsShape.lamport of a kernel for a rank's tokens; the simulator's ranks share a kernel."""
    return control.LAMPORT_ROWS if suit(shape) and (SIM or num_tokens <= control.LAMPORT_ROWS) else 0


def n_parts_of(shape):
    """Parts of a row."""
    return -(-shape.row_bytes // (PART * VECTOR))


def _bytes_of_row(shape):
    return -(-(shape.row_bytes + WORD * (n_parts_of(shape) + sum(words_with(shape)))) // 256) * 256


def _bytes_of(shape):
    return shape.n_ranks * control.LAMPORT_ROWS * _bytes_of_row(shape)


def bytes_for(shape):
    """Bytes of the windows of one parity for the calls of a kernel."""
    return _bytes_of(shape) if suit(shape) else 0


@device_fn
def _empty(at, tag):
    """The state of a vector before the first poll: nothing has arrived; without an address, nothing is expected."""
    w = u32(0)
    if at != u64(0):
        w = u32(ABSENT)
    return w, w, w, w


@device_fn
def _look(at, q, tag):
    if is_absent(q):
        q = load16_relaxed_sys(at)
    return q


@device_fn
def _is_late(q, tag):
    return is_absent(q)


@device_fn
def _put_back(at):
    if at != u64(0):
        store16_relaxed_sys(at, u32(ABSENT), u32(ABSENT), u32(ABSENT), u32(ABSENT))


def _taking(block, phase):
    """Device function take_part: that of takes.py, of vectors, which puts ABSENT back; the word is left there."""
    wait = takes.of_four(block, phase, _empty, _look, _is_late)

    @device_fn
    def take_part(params, epoch, source, step, word, p, q, r, s):
        ok, data, a, b, c, d = wait(params, epoch, source, step, word, p, q, r, s)
        if ok:
            _put_back(p)
            _put_back(q)
            _put_back(r)
            _put_back(s)
        return ok, data, a, b, c, d

    return take_part


def make(shape, block, phase):
    """Device functions for one kernel.

    place(params, rank, source), rows_at(place, epoch), row_at(rows, row): where a rank has a source's rows, and one of
    them. vector_at(row, vector), word_at(row, i), part_at(row, part): of a row's window a vector, the i-th word of what
    goes with it, the word of a part. put(at, number, epoch): a word. put_batch: a batch of a row that is added up.
    take(params, epoch, source, step, p, q, r, s): vectors, and take_part: as _taking() says. take_words, take_word: of
    lamport_words.py.
    """
    row_bytes, parts_at = _bytes_of_row(shape), shape.row_bytes
    words_at, of_source = parts_at + WORD * n_parts_of(shape), control.LAMPORT_ROWS * row_bytes
    pool_of, p_at, p_bytes = in_context(block, "pool_ptrs"), block.index("lamport_at"), block.index("lamport_bytes")
    words, take_part = lamport_words.make(block, phase), _taking(block, phase)
    _, store_batch, _ = copy_to_lanes(read_only=True, store=lamport.store_row)

    @device_fn
    def place(params, rank, source):
        """What can be looked up before the call is known: (address in calls of parity 0, bytes to the other)."""
        pool = pool_of(params, rank)
        at = u64(params[p_at] + u64(source) * u64(of_source))
        return u64(pool + at), params[p_bytes]

    @device_fn
    def rows_at(place, epoch):
        return u64(place[0] + (u64(epoch) & u64(1)) * place[1])

    @device_fn
    def row_at(rows, row):
        return u64(u64(rows) + u64(row) * u64(row_bytes))

    @device_fn
    def vector_at(row, vector):
        return u64(row + u64(VECTOR) * u64(vector))

    @device_fn
    def part_at(row, part):
        return u64(row + u64(parts_at) + u64(WORD) * u64(part))

    @device_fn
    def word_at(row, i):
        return u64(row + u64(words_at) + u64(WORD) * u64(i))

    @device_fn
    def put_batch(batch, rows, mask, start, base, end, lane, epoch):
        store_batch(batch, rows, mask, start, base, end, lane)

    @device_fn
    def take(params, epoch, source, step, p, q, r, s):
        ok, _, a, b, c, d = take_part(params, epoch, source, step, u64(0), p, q, r, s)
        return ok, a, b, c, d

    return SimpleNamespace(place=place, rows_at=rows_at, row_at=row_at, vector_at=vector_at, word_at=word_at,
                           part_at=part_at, put=words.put, put_batch=put_batch, take=take, take_part=take_part,
                           take_words=words.take_words, take_word=words.take_word)
