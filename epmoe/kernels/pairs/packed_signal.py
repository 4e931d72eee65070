"""Packed signals: a recv_count word that describes up to MOST_TOKENS messages, which then need no trailers.

If a rank has at most MOST_TOKENS tokens, a word of DESCRIBED tells how many go to the expert, which ones, and k of
each. Its bits, from the lowest: count (4) | a bit for each token (8) | k of tokens 0 to 2 (5 each) | unused (5) | k of
tokens 3 to 7 (5 each) | DESCRIBED. Messages are in the order of their tokens. The payload of token t, for all of its
experts, is in row [local expert 0, src_rank, t] of recv_buf.
"""

from epmoe.device import device_fn, ffs, i32, u32, u64
from epmoe.layout import DESCRIBED

MOST_TOKENS = 8
FIRST_K, K_BITS, FIRST_HIGH = 12, 5, 3      # k of tokens from FIRST_HIGH on is in the upper half


@device_fn
def share_of(token, k):
    """(lower, upper half): the bits that a token with the expert at k adds to the expert's word."""
    low, high = i32(1 + i32(16 << token)), i32(0)
    if token < FIRST_HIGH:
        low = i32(low + i32(k << i32(FIRST_K + K_BITS * token)))
    else:
        high = i32(k << i32(K_BITS * (token - FIRST_HIGH)))
    return low, high


@device_fn
def word_of(low, high):
    """The word, from the sums of both halves; 0, the plain signal, if nothing goes to the expert."""
    word = u64(0)
    if low != 0:
        word = u64(u64(DESCRIBED) + (u64(high) << u64(32)) + u64(low))
    return word


@device_fn
def count_of(word):
    """The number of messages, from any word that holds it."""
    count = i32(u32(word))          # without ANNOUNCED
    if (word & u64(DESCRIBED)) != u64(0):
        count = i32(u32(word & u64(15)))
    return count


@device_fn
def message_of(word, slot):
    """(token, k) of the message in that slot of the segment."""
    tokens, i = i32(u32((word >> u64(4)) & u64(255))), i32(0)
    while i < slot:
        tokens = i32(tokens & (tokens - 1))
        i = i32(i + 1)
    token = i32(i32(ffs(u32(tokens))) - 1)
    at = i32(FIRST_K + K_BITS * token)
    if token >= FIRST_HIGH:
        at = i32(at + K_BITS)
    return token, i32(u32((word >> u64(at)) & u64(31)))
