"""Exchanges counts between the blocks of a rank in the layout: a word for each sending block and column, and their
sums.

Each word names its call, so it is its own ready flag: no fence and no barrier of the grid is needed.
"""

from typing import NamedTuple

from epmoe.device import device_fn, i32, ld_relaxed_gpu_u64, st_relaxed_gpu_u64, u32, u64

from . import control, waits
from .status import FOR_BLOCKS

IN_FLIGHT = 8           # words that a thread asks for together


class Columns(NamedTuple):
    """Device functions made for one kernel.

    tell(params, epoch, my_block, column, number). sum_up(params, epoch, column, first, step, end): the sum of what the
    blocks first, first + step, ... before `end` told in a column -> (whether all of them did, the sum).
    """

    tell: callable
    sum_up: callable


def _sum_of(n, stride):
    """Device function (at, i, step, end, epoch) -> (whether all are of this epoch, sum) of n words, asked for together.
    """
    @device_fn
    def nothing(at, i, step, end, epoch):
        return True, i32(0)

    if n == 0:
        return nothing
    of_the_rest = _sum_of(n - 1, stride)

    @device_fn
    def of_words(at, i, step, end, epoch):
        word = u64(0)
        if i < end:
            word = u64(ld_relaxed_gpu_u64(at + u64(8 * stride) * u64(i)))
        all_told, total = of_the_rest(at, i32(i + step), step, end, epoch)
        if i < end:
            all_told = all_told and u32(word >> u64(32)) == u32(epoch)
            total = i32(total + i32(word))
        return all_told, total

    return of_words


def make(shape, block, phase):
    """The Columns of one kernel: the ranks', and behind them the experts'."""
    stride, n_words = shape.n_ranks + shape.n_experts, IN_FLIGHT
    sum_of_words = _sum_of(n_words, stride)
    p_columns, p_words, p_timeout = block.index("columns"), block.index("words"), block.index("timeout_ns")

    @device_fn
    def column_at(params, column):
        return u64(params[p_columns] + u64(8) * u64(column))

    @device_fn
    def tell(params, epoch, my_block, column, number):
        at = u64(column_at(params, column) + u64(8 * stride) * u64(my_block))
        st_relaxed_gpu_u64(at, waits.told(epoch, number))

    @device_fn
    def await_words(params, epoch, at, i, step, end):
        """Waits until all n blocks have stored their words."""
        status, ok, n = u64(params[p_words] + u64(control.STATUS)), True, i32(0)
        timeout_ns = params[p_timeout]
        while ok and n < n_words and i < end:
            word = u64(at + u64(8 * stride) * u64(i))
            ok = waits.wait_for_word_of_rank(word, u64(ld_relaxed_gpu_u64(word)), epoch, status, timeout_ns, phase,
                                             FOR_BLOCKS, i) != u64(0)
            n, i = i32(n + 1), i32(i + step)
        return ok

    @device_fn
    def sum_up(params, epoch, column, first, step, end):
        at, ok, total, i = u64(column_at(params, column)), True, i32(0), i32(first)
        while ok and i < end:
            all_told, here = sum_of_words(at, i, step, end, epoch)
            if all_told:
                total, i = i32(total + here), i32(i + n_words * step)
            else:
                ok = await_words(params, epoch, at, i, step, end)
        return ok, total

    return Columns(tell, sum_up)
