"""Loops over a few registers, unrolled where a kernel is made: step j is a device function of its own."""

from epmoe.device import device_fn


def tuple_of(n, item):
    """Device function (*arguments) -> the n results of item(j)(*arguments); item: j -> device function."""
    if n == 0:
        return device_fn(lambda *arguments: ())
    earlier, last = tuple_of(n - 1, item), item(n - 1)
    return device_fn(lambda *arguments: earlier(*arguments) + (last(*arguments),))


def in_turn(n, step):
    """Device function (value, *arguments) -> value after step(j)(value, *arguments), j = 0, 1, ..., n - 1."""
    if n == 0:
        return device_fn(lambda value, *arguments: value)
    earlier, last = in_turn(n - 1, step), step(n - 1)
    return device_fn(lambda value, *arguments: last(earlier(value, *arguments), *arguments))
