"""Bits by rank: which of up to 128 tokens go to a rank, and so the number of each one's row among those for it."""

from epmoe.device import device_fn, i32, lane_id, popc, u32

from . import control, numbering

A_WORD = -(-control.LAMPORT_ROWS // 4)  # tokens whose bits are in one of four words


def four_words(shape):
    """Device function (masks, num_tokens) -> in lane r four u32, in turn a bit for each token that goes to rank r.

    masks: shared array, of the ranks that a token goes to.
    """
    ranks = shape.n_ranks

    @device_fn
    def word(masks, first, num_tokens):
        lane, mask, mine, rank = i32(lane_id()), u32(0), u32(0), i32(0)
        if lane < A_WORD and first + lane < num_tokens:
            mask = u32(masks[first + lane])
        while rank < ranks:
            go = numbering.go_to(mask, rank)
            if lane == rank:
                mine = go
            rank = i32(rank + 1)
        return mine

    @device_fn
    def words(masks, num_tokens):
        return (word(masks, i32(0), num_tokens), word(masks, i32(A_WORD), num_tokens),
                word(masks, i32(2 * A_WORD), num_tokens), word(masks, i32(3 * A_WORD), num_tokens))

    return words


@device_fn
def in_four_words(bits, token, lane):
    """The number of the token's row among those for rank `lane`, -1 for none. bits: of four_words()."""
    a, b, c, d = bits
    word, before, row = a, i32(0), i32(-1)
    if token >= A_WORD:
        word, before = b, i32(popc(a))
    if token >= 2 * A_WORD:
        word, before = c, i32(before + popc(b))
    if token >= 3 * A_WORD:
        word, before = d, i32(before + popc(c))
    at = u32(u32(token) % u32(A_WORD))
    if u32(word >> at) & u32(1) != u32(0):
        row = i32(before + popc(u32(word & u32(u32(u32(1) << at) - u32(1)))))
    return row
