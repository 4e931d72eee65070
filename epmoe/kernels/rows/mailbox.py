"""The control memory of a rank: mailboxes that peers write (symmetric), and the words of its own blocks.

The symmetric part is laid out alike on all ranks: a mailbox for the announcement of each src_rank, and a counter of its
blocks that have sent all their rows. A word of an announcement holds a number in its low half and the number of the
call (the epoch) in its high half, so it is its own ready flag. Epochs only grow, so nothing has to be reset. Mailboxes
and counters exist twice, for even and odd epochs. A rank ends call e only after every rank has begun it, as its leader
block has seen all announcements of e. It begins e+1 only after its own launch of e has ended. So no rank still reads
the announcements of e when those of e+2 are written. And no rank still adds to the counters of e-1 when they are
cleared, by every rank in call e, before e+1.

A block keeps the numbers of announcements, or those in the handle, in a shared array, `announced`.
"""

from functools import cache
from typing import NamedTuple

from epmoe.device import all_lanes, device_fn, i32, lane_id, u32, u64, warp_inclusive_sum_i32, warp_sum_i32

from .shape import MAX_PLACES, memory_of, namespace

# Words for a rank's own blocks: byte offsets
EPOCH = 0               # u64: the last call that ended
BEGUN = 8               # i32: blocks that have begun this call
NEXT_TO_RECEIVE = 16    # 2 i32: units of work that warps have claimed to expand (combine: reduce), by parity
RECORDED = 24           # i32: the last call for which it is recorded where experts' rows begin
NEXT_TO_SEND = 32       # 2 i32: units of work that warps have claimed to send, by parity
NUMBERED = 40           # 2 i32: blocks that have numbered their tokens, by parity
BY_PARITY = (NEXT_TO_RECEIVE, NEXT_TO_SEND, NUMBERED)   # cleared in the call that has the other parity
STATUS = 64             # 16 i32: as in epmoe/kernels/status.py
WORDS_BYTES = 128

# Words of an announcement
PLACES = 0                          # where in the writer's pool its arrays begin, in units of PLACE_BYTES
CAPACITY = MAX_PLACES               # rows that it has room for
NUM_TOKENS = CAPACITY + 1           # its tokens
BLOCKS = CAPACITY + 2               # its blocks that send
COUNTS = CAPACITY + 3               # for each rank: rows that it sends there; then words by expert of the reader
PLACE_BYTES = 256

MOST_PARTS = 8          # of a row; each has a flag


class Control(NamedTuple):
    """Byte offsets in the symmetric control memory of a world, and its size."""

    n_ranks: int
    arrived: int
    mailboxes: int
    mailbox_bytes: int
    nbytes: int

    def mailbox(self, parity, src_rank):
        """Byte offset of the mailbox of a src_rank."""
        return self.mailboxes + (parity * self.n_ranks + src_rank) * self.mailbox_bytes


def experts_at(n_ranks: int) -> int:
    """The first word of an announcement's counts of tokens, by local expert of the reader."""
    return COUNTS + n_ranks


def bits_at(n_ranks: int, num_local_experts: int) -> int:
    """The first word of an announcement's bits by token, [word, local expert] (small/places.py)."""
    return experts_at(n_ranks) + num_local_experts


def numbers_announced(n_ranks: int) -> int:
    """Length of `announced`: all announcements without counts by expert, then each rank's tokens out of the handle."""
    return n_ranks * experts_at(n_ranks) + n_ranks


def control(n_ranks: int, num_local_experts: int, words_of_bits: int) -> Control:
    """The control memory for at most num_local_experts a rank. words_of_bits: for an expert's bits of a small batch."""
    mailbox_bytes = 8 * (bits_at(n_ranks, num_local_experts) + words_of_bits * num_local_experts)
    mailboxes = -(-2 * 4 * n_ranks // 256) * 256
    return Control(n_ranks, 0, mailboxes, mailbox_bytes, mailboxes + 2 * n_ranks * mailbox_bytes)


@cache
def reading(n_ranks):
    """Namespace of device functions that read `announced`.

    count(announced, src_rank, dst_rank): rows from one rank to another. tokens, blocks(announced, rank): of a rank.
    array_at(params, announced, index, rank): address of array `index` of a rank. most_tokens(announced): the most of a
    rank. has_room(announced): whether every rank has room, the same on all ranks; if one has none, no rank sends.

    (announced, my_rank) -> numbers of rows, for rank r in lane r, 0 in lanes past the ranks. With n(src, dst) the rows
    that src dispatched to dst: before_me: sum of n(q, r) over q < my_rank. arriving(announced): over all q.
    mine_before: sum of n(my_rank, q) over q < r. received: (n(r, my_rank), sum of n(q, my_rank) over q < r).
    returned_before_me: sum of n(r, q) over q < my_rank.
    """
    n_words, memory = experts_at(n_ranks), memory_of(n_ranks)

    count = device_fn(lambda announced, src_rank, dst_rank: i32(announced[src_rank * n_words + COUNTS + dst_rank]))
    tokens = device_fn(lambda announced, rank: i32(announced[rank * n_words + NUM_TOKENS]))
    blocks = device_fn(lambda announced, rank: i32(announced[rank * n_words + BLOCKS]))

    @device_fn
    def array_at(params, announced, index, rank):
        offset = u64(PLACE_BYTES) * u64(u32(announced[rank * n_words + PLACES + i32(index)]))
        return u64(memory.pool(params, rank) + offset)

    @device_fn
    def most_tokens(announced):
        n, rank = i32(0), i32(0)
        while rank < n_ranks:
            n, rank = i32(max(n, tokens(announced, rank))), i32(rank + 1)
        return n

    @device_fn
    def sum_of(announced, at, step, n):
        """In lanes that stand for a rank: the sum of n words from `at` on, `step` apart."""
        total, i = i32(0), i32(0)
        while lane_id() < n_ranks and i < n:
            total, i = i32(total + announced[at + step * i]), i32(i + 1)
        return total

    before_me = device_fn(lambda announced, my_rank: sum_of(announced, i32(COUNTS + lane_id()), n_words, my_rank))
    returned_before_me = device_fn(lambda announced, my_rank:
                                   sum_of(announced, i32(lane_id() * n_words + COUNTS), 1, my_rank))
    arriving = device_fn(lambda announced: before_me(announced, i32(n_ranks)))

    @device_fn
    def mine_before(announced, my_rank):
        n = count(announced, my_rank, i32(lane_id())) if lane_id() < n_ranks else i32(0)
        return i32(warp_inclusive_sum_i32(n) - n)

    @device_fn
    def received(announced, my_rank):
        n = count(announced, i32(lane_id()), my_rank) if lane_id() < n_ranks else i32(0)
        return n, i32(warp_inclusive_sum_i32(n) - n)

    @device_fn
    def has_room(announced):
        capacity = i32(announced[lane_id() * n_words + CAPACITY]) if lane_id() < n_ranks else i32(0)
        return all_lanes(arriving(announced) <= capacity) != 0

    return namespace("mail", count=count, tokens=tokens, blocks=blocks, array_at=array_at, most_tokens=most_tokens,
                     before_me=before_me, arriving=arriving, mine_before=mine_before, received=received,
                     returned_before_me=returned_before_me, has_room=has_room)


def all_small(n_ranks, most, *, announced):
    """Device function (announced) -> whether no rank has more than `most` (shape.lamport) tokens.

    announced: True to use the numbers announced in this call; then every rank must also have room for all tokens. False
    for those in the call's handle. All ranks get the same answer. If it is yes, each has a kernel with this path.
    """
    n_words, asks_room = experts_at(n_ranks), announced
    first, step = (NUM_TOKENS, n_words) if announced else (n_ranks * n_words, 1)

    @device_fn
    def is_small(announced):
        rank = i32(min(lane_id(), n_ranks - 1))
        n = i32(announced[first + rank * step])
        if not asks_room:
            return all_lanes(n <= most) != 0
        total = i32(warp_sum_i32(n if lane_id() < n_ranks else i32(0)))
        return all_lanes(n <= most and total <= i32(announced[rank * n_words + CAPACITY])) != 0

    return is_small
