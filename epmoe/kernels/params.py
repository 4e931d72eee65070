"""A kernel's parameters: words that are passed by value, and a context in device memory that is written once.

A kernel's first argument, params, is a tuple of uint64: the addresses and numbers of one call, each at its index.
Values that are looked up by rank, the peers' addresses, are in the context. The context's address is one of these
words. This module also has tools for writing kernels: namespaces of device functions, and loops over a few registers
that are unrolled when a kernel is made (tuple_of, in_turn: step j is a device function of its own).
"""

import struct
from collections import namedtuple
from types import ModuleType

import numpy as np

from epmoe.device import block_dim, device_fn, i32, lane_id, load_u64, n_warps, thread_idx, u64, warp_id
from epmoe_ref.errors import EPValueError

LANES = 32          # of a warp
VECTOR = 16         # bytes of a load or store
BF16_BYTES = 2
CACHED = 128        # compiled kernels of one kind that are kept


class ParameterBlock:
    """The index of each named field among a kernel's words.

    fields: (name, number of words) in order. A float32 or int32 is in the low half of its word. context: the same for
    the fields in the context. If it has any, its address is the first word, "context". places, context_places: {name:
    (index of the first word, number of words)}, in order.
    """

    def __init__(self, *fields, context=()):
        self.places, self.n_words = _places((("context", 1), *fields) if context else fields)
        self.context_places, self.context_words = _places(context)

    def index(self, name: str) -> int:
        """The index of a field's first word; a constant for the kernels."""
        return self.places[name][0]

    def offset(self, name: str) -> int:
        """Byte offset of a field, for kernels that are given the address of all words in device memory."""
        return 8 * self.index(name)

    def pack(self, values: dict) -> np.ndarray:
        """The words [n_words] uint64. A value is a number or a sequence of them; a field that is not given is zero."""
        return _packed(self.places, self.n_words, values)

    def pack_context(self, values: dict) -> np.ndarray:
        """The words of the context; values as for pack."""
        return _packed(self.context_places, self.context_words, values)


def _places(fields):
    places, n_words = {}, 0
    for name, length in fields:
        places[name] = (n_words, length)
        n_words += length
    return places, n_words


def _packed(places, n_words, values):
    words = np.zeros(n_words, np.uint64)
    for name, value in values.items():
        at, length = places[name]
        value = value if isinstance(value, (list, tuple)) else [value]
        if len(value) != length:
            raise EPValueError(f"{name} takes {length} words, not {len(value)}")
        words[at:at + length] = value
    return words


def float32_word(value) -> int:
    """A word that holds a float32."""
    return int.from_bytes(struct.pack("<f", value), "little")


@device_fn
def word_in(array, row, n, i):
    """Address of the 32-bit word [row, i] of an array with n words a row."""
    return u64(array + u64(4) * (u64(row) * u64(n) + u64(i)))


def in_context(block, name):
    """Device function (params, i) -> word i of a field of the context."""
    p_context, first = block.index("context"), 8 * block.context_places[name][0]

    @device_fn
    def word(params, i):
        return u64(load_u64(params[p_context] + u64(first) + u64(8) * u64(i)))

    return word


def chosen(block, name):
    """Device function (params, i) -> word i of a field, which each thread may choose for itself."""
    first, n = block.places[name]

    def choosing(j):
        at = first + j
        return device_fn(lambda word, params, i: params[at] if i == j else word)

    choose = in_turn(n, choosing)
    return device_fn(lambda params, i: choose(params[first], params, i))


def namespace(name: str, **functions) -> ModuleType:
    """Device functions under one name, for kernels to call as `name.function(...)`."""
    made = ModuleType(name)
    made.__dict__.update(functions)
    return made


def record_of(block, tails=()):
    """Device function (params, num_tokens, my_rank) -> a record of the call: a named tuple with a field for each name.

    A field of several words is a tuple. tails: (name, number of words) of tuples of words that follow the block's
    words. num_tokens and my_rank are the last fields.
    """
    ranges, end = [(name, *place) for name, place in block.places.items()], block.n_words
    for name, length in tails:
        ranges.append((name, end, length))
        end += length
    Call = namedtuple("Call", [*(name for name, _, _ in ranges), "num_tokens", "my_rank"])

    def field(i):
        _, first, length = ranges[i]
        end, is_tuple = first + length, length != 1 or first >= block.n_words
        return device_fn((lambda params: params[first:end]) if is_tuple else lambda params: params[first])

    words = tuple_of(len(ranges), field)

    @device_fn
    def record(params, num_tokens, my_rank):
        return Call(*(words(params) + (num_tokens, my_rank)))

    return record


def _each_by(me, workers):
    """Decorator of step(i, *arguments): device function (n, *arguments); workers share its calls for all i < n."""
    def shared(step):
        step = device_fn(step)

        @device_fn
        def for_each(n, *arguments):
            i = i32(me())
            while i < n:
                step(i, *arguments)
                i = i32(i + workers())

        return for_each

    return shared


by_threads = _each_by(thread_idx, block_dim)        # of a block
by_warps = _each_by(warp_id, n_warps)               # of a block
by_lanes = _each_by(lane_id, device_fn(lambda: i32(LANES)))


@by_threads
def clear(i, array):
    """Zeroes the first n words of a shared array, by a block: clear(n, array)."""
    array[i] = i32(0)


def tuple_of(n, item):
    """Device function (*arguments) -> the n results of item(j)(*arguments); item: j -> device function."""
    if n == 0:
        return device_fn(lambda *arguments: ())
    if n % 4:
        earlier, last = tuple_of(n - 1, item), item(n - 1)
        return device_fn(lambda *arguments: earlier(*arguments) + (last(*arguments),))
    earlier, (a, b, c, d) = tuple_of(n - 4, item), map(item, range(n - 4, n))   # fewer functions, which compile sooner
    return device_fn(lambda *arguments: earlier(*arguments) + (a(*arguments), b(*arguments), c(*arguments), d(*arguments)))


def in_turn(n, step):
    """Device function (value, *arguments) -> value after step(j)(value, *arguments), j = 0, 1, ..., n - 1."""
    if n == 0:
        return device_fn(lambda value, *arguments: value)
    if n % 4:
        earlier, last = in_turn(n - 1, step), step(n - 1)
        return device_fn(lambda value, *arguments: last(earlier(value, *arguments), *arguments))
    earlier, (a, b, c, d) = in_turn(n - 4, step), map(step, range(n - 4, n))
    return device_fn(lambda value, *arguments: d(c(b(a(earlier(value, *arguments), *arguments), *arguments),
                                                 *arguments), *arguments))
