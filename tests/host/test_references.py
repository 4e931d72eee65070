"""Whether somebody refers to an object is read where CPython counts it."""

import ctypes

from epmoe.host.references import References, are_counted


def read(references):
    """[(how often it may be referred to, how often it is)] as compiled code finds them."""
    n, *words = (ctypes.c_int64 * 5).from_address(references.address)
    assert n == 2
    return [(words[i + 1], ctypes.c_int32.from_address(words[i]).value) for i in (0, 2)]


def test_an_object_that_is_held_is_told_from_one_that_is_not():
    assert are_counted()
    references = References([{}, {}])
    assert [may == is_now for may, is_now in read(references)] == [True, True]
    held = references._objects[1]
    assert [may - is_now for may, is_now in read(references)] == [0, -1]
    del held
    assert [may - is_now for may, is_now in read(references)] == [0, 0]


def test_counts_that_are_told_hold_whoever_refers_to_the_objects_then():
    held = [{}, {}]
    references = References([held[0], held[1]], [1, 2])
    assert [may - is_now for may, is_now in read(references)] == [-1, 0]
