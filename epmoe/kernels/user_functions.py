"""The caller's own functions inside a kernel: epilogue and router weights, with their arguments out of the block.

A function is plain Python: scalars come as numbers, arrays as something to index with [i] or [i, j]. On the GPU it is
compiled; in the simulator it runs as it is. Its arguments travel as words (uint64) and become numbers and arrays where
the function is called, because device functions cannot return arrays.

A value function returns a number. An output lambda (OutputLambda) stores into arrays among its arguments, and returns
nothing.
"""

from typing import NamedTuple

from epmoe.device import (SIM, device_fn, f32, i32, load_f32, load_i32, store_f32, store_i32, u32, u32_as_f32)

from . import returned


class OutputLambda(NamedTuple):
    """A function (token, col, value, *args) instead of an epilogue, which stores its result itself."""

    function: callable


def words_of(types) -> int:
    """Words of a kernel that arguments of these (dtype, number of axes, writable) take."""
    return sum(1 + n_axes for _, n_axes, _ in types)


def reader(types, first):
    """Device function params -> tuple of the arguments' words, the first of which is params[first]."""
    n_words = words_of(types)
    if not n_words:
        @device_fn
        def none(params):
            return ()

        return none
    end = first + n_words

    @device_fn
    def words(params):
        return params[first:end]

    return words


def bound(fn, types, what):
    """Device function (arguments, words) -> float32: fn(*arguments, *its own arguments out of their words).

    what: the function's name among the caller's arguments. With an OutputLambda the result is 0.
    """
    return _bind(_storing(fn.function, what) if isinstance(fn, OutputLambda) else _valued(fn, what), types, 0)


def _valued(fn, what):
    of_device = device_fn(returned.checked(what, fn))

    @device_fn
    def call(arguments, words):
        return f32(of_device(*arguments))

    return call


def _storing(fn, what):
    of_device = device_fn(returned.checked(what, fn))

    @device_fn
    def call(arguments, words):
        of_device(*arguments)
        return f32(0)

    return call


def _bind(call, types, first_word):
    if not types:
        return call
    (dtype, n_axes, writable), *others = types
    made = _scalar(dtype) if n_axes == 0 else _array(dtype, n_axes, writable)
    call_rest = _bind(call, others, first_word + 1 + n_axes)
    i, j, k = first_word, first_word + 1, first_word + 2
    if n_axes == 0:
        @device_fn
        def with_scalar(arguments, words):
            return call_rest(arguments + (made(words[i]),), words)

        return with_scalar
    if n_axes == 1:
        @device_fn
        def with_vector(arguments, words):
            return call_rest(arguments + (made(words[i], words[j]),), words)

        return with_vector

    @device_fn
    def with_matrix(arguments, words):
        return call_rest(arguments + (made(words[i], words[j], words[k]),), words)

    return with_matrix


def _scalar(dtype):
    if dtype == "float32":
        @device_fn
        def number(word):
            return u32_as_f32(u32(word))

        return number

    @device_fn
    def whole_number(word):
        return i32(u32(word))

    return whole_number


def _array(dtype, n_axes, writable):
    if not SIM:
        from .gpu_array import array_at

        return array_at(dtype, n_axes, writable)
    load, store, number = {"float32": (load_f32, store_f32, f32), "int32": (load_i32, store_i32, i32)}[dtype]

    def write(address, value):
        if not writable:
            raise TypeError("the array is read-only")
        store(address, number(value))

    def array(address, *shape):
        return SimulatedArray(load, write, address, shape)

    return array


class SimulatedArray:
    """An array in the simulator's memory, read and written element by element."""

    def __init__(self, load, store, address, shape):
        self.load, self.store, self.address, self.shape = load, store, address, shape

    def __getitem__(self, index):
        return self.load(self._place(index))

    def __setitem__(self, index, value):
        self.store(self._place(index), value)

    def _place(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != len(self.shape):
            raise IndexError(f"an array of shape {self.shape} takes {len(self.shape)} indices, not {len(index)}")
        place = 0
        for i, n in zip(index, self.shape):
            if not -n <= i < n:
                raise IndexError(f"index {i} is outside an axis of length {n}")
            place = place * n + int(i) % n
        return self.address + 4 * place
