"""Whether objects are referred to by more than they were: what compiled code, too, can look at.

Memory of a result is written again only when nobody refers to the result any more. CPython keeps the number of
references to an object at its beginning; read there, those of ten objects take as long as one sys.getrefcount().
"""

import ctypes
from functools import cache
from sys import getrefcount

_count_at = ctypes.c_int32.from_address  # its lower half, in which it would not overflow


class References:
    """How often some objects are referred to, each at least once by this; address: of words for compiled code."""

    __slots__ = ("address", "counts", "_objects", "_words")

    def __init__(self, objects, counts=None):
        """objects: a list, which is kept. counts: how often each may be referred to; left out, as often as now."""
        self._objects = objects
        addresses = list(map(id, objects))
        self.counts = counts or [_count_at(address).value for address in addresses]
        pairs = [word for pair in zip(addresses, self.counts) for word in pair]
        self._words = (ctypes.c_int64 * (1 + len(pairs)))(len(addresses), *pairs)
        self.address = ctypes.addressof(self._words)


@cache
def are_counted():
    """Whether this Python keeps the number of references where CPython does (without free threading)."""
    (one,) = some = [object()]
    before = getrefcount(one), _count_at(id(one)).value
    some *= 3
    return (getrefcount(one), _count_at(id(one)).value) == (before[0] + 2, before[1] + 2)
