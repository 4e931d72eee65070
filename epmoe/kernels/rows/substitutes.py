"""Escapes payload words equal to the sentinel ABSENT in Lamport rows (lamport.py), so rows arrive bit-exact."""

from epmoe.device import any_lane, device_fn, u32
from epmoe.layout import ABSENT

from ..lamport import is_absent


@device_fn
def _replaced(q, old, new):
    a, b, c, d = q
    if a == old:
        a = new
    if b == old:
        b = new
    if c == old:
        c = new
    if d == old:
        d = new
    return a, b, c, d


@device_fn
def with_words(batch, old, new):
    """A batch with one word replaced by another."""
    return (_replaced(batch[0], old, new), _replaced(batch[1], old, new), _replaced(batch[2], old, new),
            _replaced(batch[3], old, new))


@device_fn
def _has(q, word):
    return q[0] == word or q[1] == word or q[2] == word or q[3] == word


@device_fn
def substitute(batch):
    """The escape for ABSENT in a part of a row that a warp holds; ABSENT if the part does not contain it.

    The part has 512 words, so one of as many candidates is not among those that are not ABSENT.
    """
    word = u32(ABSENT)
    if any_lane(is_absent(batch[0]) or is_absent(batch[1]) or is_absent(batch[2]) or is_absent(batch[3])):
        word = u32(ABSENT - 1)
        while any_lane(_has(batch[0], word) or _has(batch[1], word) or _has(batch[2], word) or _has(batch[3], word)):
            word = u32(word - u32(1))
    return word
