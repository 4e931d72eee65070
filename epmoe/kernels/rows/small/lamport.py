"""Lamport rows: rows of small batches, without flags; each 32-bit word is its own ready flag.

How this works is in epmoe/kernels/lamport.py: the thread that stores or sums a row polls its vectors in a window.

A row's metadata (ids, probs, scales) follows it, in words with 4 bytes of data and the number of the call. A thread
polls them until they have this call's number. By the PTX memory model an aligned 8-byte access is single-copy atomic: a
thread that sees the call's number sees the data with it. After a word has been taken it is reset to NOTHING.

A rank has a window for each parity of calls and each src_rank. It holds the src_rank's rows one after another; in an
expert-major dispatch, a row for each of its tokens. A thread that has taken something restores ABSENT. So when call e
begins to write the words of its parity, all are ABSENT, without a check: the writer knows from call e - 1 that every
rank had begun that call, after everything in call e - 2. If no rank will take data that was sent, its sender restores
ABSENT.

A payload word equal to ABSENT would look like a word that has not arrived. In a row that is summed, NAN replaces it. In
a row that must arrive bit-exact, each part has a word that names an escape for ABSENT: a number that does not occur in
this part. Encoded values are never ABSENT: a NaN is 0x7F.
"""

from epmoe.device import (SIM, any_lane, device_fn, globaltimer, i32, ld_relaxed_sys_u64, load16_relaxed_sys,
                          st_relaxed_sys_u64, store16_relaxed_sys, u32, u64)
from epmoe.layout import ABSENT

from ... import stamps
from ...bits import any_of_four, each_of_four
from ...lamport import is_absent
from ...params import VECTOR
from ...wait import POLLS_PER_LOOK, gives_up
from ...status import record_expired
from .. import announce, mailbox, wait
from .. import call as calls
from ..copy import BATCH
from ..send import STEP
from ..shape import NO_LIMIT, memory_of, namespace, p

WORD = 8                # bytes
NOTHING = 2**64 - 1     # a word that has not arrived
BLOCKS_A_TOKEN = 4      # of a launch, for each token of a small batch, if it has so many


def tokens_for(shape, n_blocks):
    """The most tokens of a rank that go in Lamport rows; 0 if sums are by world, or if memory is too small for any."""
    tuning, ranks = shape.tuning, shape.n_ranks
    most = min(tuning.most_small(ranks, n_blocks), tuning.lamport_bytes // (ranks * _bytes_of_row(shape)))
    if shape.expert_major and shape.has_meta:   # two words of each expert for 32 tokens, a number of each rank for one
        most = min(most, 4 * tuning.shared_bytes // (shape.num_experts + 16 * ranks))
    return most if most >= tuning.lamport_tokens and not shape.by_world else 0


def bytes_for(shape):
    """Size in bytes of the windows of one parity for the calls of a kernel; 0 if it has no Lamport rows."""
    return shape.n_ranks * tokens_for(shape, NO_LIMIT) * _bytes_of_row(shape)


def rows_for(shape, num_tokens, n_blocks):
    """RowsShape.lamport of a kernel for a rank with num_tokens. The simulator's ranks share a kernel."""
    most = tokens_for(shape, n_blocks)
    return most if SIM or num_tokens <= most else 0


def blocks_for(num_tokens, most_tokens, lamport):
    """The number of blocks that may have work. most_tokens: that any rank may have sent. lamport: of the shape."""
    return BLOCKS_A_TOKEN * min(most_tokens, lamport) if num_tokens <= lamport else num_tokens


def vectors_of_part(shape):
    """The most vectors in a part of a row. A part has one escape for ABSENT, or, if encoded, scales."""
    return 2 * STEP if shape.encode else BATCH


def n_parts_of(shape):
    """Number of parts of a row."""
    return -(-shape.n_vectors // vectors_of_part(shape))


def words_with(shape):
    """Numbers of words of a row's metadata: ids, probs, scales. They follow the row in this order."""
    return shape.top_k * shape.has_meta, shape.n_meta * shape.has_probs, shape.scale_words


def _bytes_of_row(shape):
    words = n_parts_of(shape) + sum(words_with(shape))
    return -(-(VECTOR * shape.n_vectors + WORD * words) // 256) * 256


def addresses(shape):
    """Namespace of device functions: the addresses of a src_rank's rows at a rank, and of their contents.

    of(params, rank, src_rank) -> (address in calls of parity 0, bytes from there to the address in parity 1), which
    need no call's number. rows(of, epoch): address of the rows. row(rows, row): address of one row. In a row:
    vector(row, i), word(row, i) the i-th word of its metadata, part(row, i) the word of a part.
    """
    row_bytes, parts_at, memory = _bytes_of_row(shape), VECTOR * shape.n_vectors, memory_of(shape.n_ranks)
    words_at, of_src_rank = parts_at + WORD * n_parts_of(shape), shape.lamport * row_bytes

    @device_fn
    def of(params, rank, src_rank):
        at = u64(params[p.lamport_at] + u64(src_rank) * u64(of_src_rank))
        return u64(memory.pool(params, rank) + at), params[p.lamport_bytes]

    return namespace(
        "at", of=of, rows=device_fn(lambda of, epoch: u64(of[0] + (u64(epoch) & u64(1)) * of[1])),
        row=device_fn(lambda rows, row: u64(u64(rows) + u64(row) * u64(row_bytes))),
        vector=device_fn(lambda row, i: u64(row + u64(VECTOR) * u64(i))),
        part=device_fn(lambda row, i: u64(row + u64(parts_at) + u64(WORD) * u64(i))),
        word=device_fn(lambda row, i: u64(row + u64(words_at) + u64(WORD) * u64(i))))


@device_fn
def put(at, number, epoch):
    """Stores a tagged word: a number and the number of the call."""
    st_relaxed_sys_u64(at, wait.tagged(epoch, number))


@device_fn
def _no_vector(at, tag):
    """The state of a vector before the first poll: nothing has arrived; without an address, nothing is expected."""
    w = u32(ABSENT) if at != u64(0) else u32(0)
    return w, w, w, w


_poll_vector = device_fn(lambda at, q, tag: load16_relaxed_sys(at) if is_absent(q) else q)
_vector_is_late = device_fn(lambda q, tag: is_absent(q))


@device_fn
def _put_vector_back(at, w):
    if at != u64(0):
        store16_relaxed_sys(at, u32(w), u32(w), u32(w), u32(w))


_no_word = device_fn(lambda at, tag: u64(0))
_poll_word = device_fn(lambda at, known, tag: u64(ld_relaxed_sys_u64(at)) if at != u64(0) else u64(tag))
_word_is_late = device_fn(lambda w, tag: u64(w ^ tag) >> u64(32) != u64(0))


@device_fn
def put_back(at, nothing):
    """Resets a word to NOTHING, if there is an address."""
    if at != u64(0):
        st_relaxed_sys_u64(at, u64(nothing))


def _taking_four(phase, empty, poll, is_late, put_back, nothing):
    """Device function take(call, src_rank, step, word, at) -> (whether all arrived, data of word, the four values).

    Called by a whole warp. Each lane polls its own four addresses `at` (0 for none), loading all at once, and then
    stores `nothing` there. word: address of one more word of the call that all lanes wait for and leave in place; 0 for
    none. src_rank: the rank that writes to the first address; the rank of each further address is `step` higher.
    empty(address, tag): the value before the first poll. poll(address, known, tag): the value there now. is_late(known,
    tag): whether it has not come; never true without an address. tag: this call's number, as u64 above 32 zeros.
    put_back(address, nothing).
    """
    empty_four, any_late, put_all_back = each_of_four(empty), any_of_four(is_late), each_of_four(put_back)

    @device_fn
    def first_late(seen, tag):
        after_a = i32(1) if is_late(seen[1], tag) else i32(2) if is_late(seen[2], tag) else i32(3)
        return i32(0) if is_late(seen[0], tag) else after_a

    @device_fn
    def take(call, src_rank, step, word, at):
        tag, ok, are_late, polls, since = u64(u64(call.epoch) << u64(32)), True, True, 0, u64(0)
        seen, w = empty_four(at, tag), u64(tag)
        while ok and are_late:
            if word != u64(0):
                w = u64(ld_relaxed_sys_u64(word))
            a, b, c, d = seen
            seen = poll(at[0], a, tag), poll(at[1], b, tag), poll(at[2], c, tag), poll(at[3], d, tag)
            are_late = any_late(seen, tag) or u32(w >> u64(32)) != u32(call.epoch)
            polls += 1
            if are_late and polls % POLLS_PER_LOOK == 0:
                if since == u64(0):
                    since = u64(globaltimer())
                elif gives_up(wait.status_of(call.params), since, call.params[p.timeout_ns]):
                    late = i32(src_rank + step * first_late(seen, tag))
                    record_expired(wait.status_of(call.params), phase, wait.FOR_WINDOW, late, i32(call.epoch), -1)
                    ok = False
        ok = any_lane(not ok) == 0
        if ok:
            put_all_back(at, nothing)
        return ok, u32(w), seen

    return take


def taking(phase):
    """Namespace of device functions that take what arrives: vectors of rows, words of put(); see _taking_four."""
    take_vectors = _taking_four(phase, _no_vector, _poll_vector, _vector_is_late, _put_vector_back, ABSENT)
    take_four_words = _taking_four(phase, _no_word, _poll_word, _word_is_late, put_back, NOTHING)

    @device_fn
    def take_words(call, src_rank, step, at):
        ok, _, (a, b, c, d) = take_four_words(call, src_rank, step, u64(0), at)
        return ok, (u32(a), u32(b), u32(c), u32(d))

    return namespace("take", vectors=take_vectors, words=take_words)


def call_with_handle(shape, phase, mark, prepare, work):
    """`small` for announce.beginning, which calls its `prepare`.

    Every block but the leader block calls work(call, announced, prepared). The leader block ends the call when all
    ranks and all blocks have begun it. `work` waits for no announcement, since the counts are known.
    """
    may_end, (_, end_call) = announce.closing(shape, phase, "without_counts"), calls.begin_and_end(shape.n_ranks)

    @device_fn
    def work_or_end(call, announced, prepared):
        calls.signal_begun(call)
        if not calls.is_leader():
            work(call, announced, prepared)
        elif may_end(call, announced):
            end_call(call)
        mark(call.params, stamps.LEFT)

    fits = mailbox.all_small(shape.n_ranks, shape.lamport, announced=False)
    return namespace("small", prepare=prepare, fits=fits, rest=work_or_end)


# with_words(batch, (old, new)): a batch in which word `new` replaces each word `old`
with_words = each_of_four(each_of_four(device_fn(lambda word, of: of[1] if word == of[0] else word)))
_has_word = any_of_four(any_of_four(device_fn(lambda word, wanted: word == wanted)))


@device_fn
def escape_for(batch):
    """The escape for ABSENT in a part of a row that a warp holds; ABSENT if the part does not contain it.

    The part has 512 words. So among 512 candidates at least one does not occur, as at least one word is ABSENT.
    """
    word = u32(ABSENT)
    if any_lane(_has_word(batch, word)):
        word = u32(ABSENT - 1)
        while any_lane(_has_word(batch, word)):
            word = u32(word - u32(1))
    return word
