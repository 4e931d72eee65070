"""Metadata of a Lamport row: ids, probabilities and scales, in words with 4 bytes of data and the number of the call.

Every word is stored relaxed at system scope by its src_rank, and polled relaxed by its receiver until it names this
call. By the PTX memory model an aligned 8-byte access is single-copy atomic: a thread that sees the call's number sees
the data with it, so no fence and no flag is needed. After a word has been taken it is reset to NOTHING.
"""

from types import SimpleNamespace

from epmoe.device import (any_lane, device_fn, ffs, i32, ld_relaxed_sys_u64, load_u32, st_relaxed_sys_u64,
                          store_u32, store_u64, u32, u64, warp_broadcast_u64)

from ..params import chosen, in_context
from . import companions, control, takes, waits
from .companions import MINUS_ONE
from .status import FOR_WINDOW

WORD = 8                # bytes
NOTHING = 2**64 - 1     # a word that has not arrived


def words_with(shape):
    """Words of a row's metadata: ids, probs, scales; in this order, after the row."""
    slots = shape.top_k * shape.has_meta
    return slots, shape.top_k * shape.has_probs, shape.scale_words


@device_fn
def _look(at, known, tag):
    w = u64(tag)
    if at != u64(0):
        w = u64(ld_relaxed_sys_u64(at))
    return w


@device_fn
def _is_late(w, tag):
    return u64(w ^ tag) >> u64(32) != u64(0)


@device_fn
def _empty(at, tag):
    return u64(0)


@device_fn
def _put_back(at):
    if at != u64(0):
        st_relaxed_sys_u64(at, u64(NOTHING))


def make(block, phase):
    """Device functions for one kernel.

    put(at, number, epoch): stores a word. take_words(params, epoch, source, step, p, q, r, s) -> (whether they came,
    four u32): by a warp, each lane the words at its own four addresses, 0 for none; source, step: as of takes.py.
    take_word(params, epoch, source, at): a thread; a word of this call, 0 if it does not come.
    """
    wait = takes.of_four(block, phase, _empty, _look, _is_late)
    p_words, p_timeout = block.index("words"), block.index("timeout_ns")

    @device_fn
    def put(at, number, epoch):
        st_relaxed_sys_u64(at, waits.told(epoch, number))

    @device_fn
    def take_words(params, epoch, source, step, p, q, r, s):
        ok, _, a, b, c, d = wait(params, epoch, source, step, u64(0), p, q, r, s)
        if ok:
            _put_back(p)
            _put_back(q)
            _put_back(r)
            _put_back(s)
        return ok, u32(a), u32(b), u32(c), u32(d)

    @device_fn
    def take_word(params, epoch, source, at):
        status = u64(params[p_words] + u64(control.STATUS))
        word = u64(waits.wait_for_tagged_word(at, u64(ld_relaxed_sys_u64(at)), epoch, status,
                                              params[p_timeout], phase, FOR_WINDOW, source))
        if word != u64(0):
            _put_back(at)
        return word

    return SimpleNamespace(put=put, take_words=take_words, take_word=take_word)


def more(shape, block, words):
    """Device functions (look, send, receive) for a row's metadata.

    send(params, token, seen, mask, to, epoch, lane): to the words of a row at each rank of `mask`, in whose lane `to`
    has their address. receive(params, epoch, my_rank, source, at, row, lane, has_room): whether it came; it is stored
    with the row, if there is room.
    """
    (n_slots, n_probs, n_scales), (look, _) = words_with(shape), companions.make(shape, block)
    local, n_all, p_scales = shape.n_local_experts, n_slots + n_probs + n_scales, block.index("scales")
    home, word_at, put, take_word = home_of(block), words.word_at, words.put, words.take_word

    @device_fn
    def send(params, token, seen, mask, to, epoch, lane):
        expert, prob = seen
        owner, local_expert, left = i32(-1), u32(0xFFFFFFFF), u32(mask)
        if expert >= 0:
            owner, local_expert = i32(u32(expert) // u32(local)), u32(u32(expert) % u32(local))
        scales = u64(0)
        if n_scales > 0:
            scales = params[p_scales] + u64(4) * u64(token) * u64(n_scales)
        while left != u32(0):
            rank = i32(ffs(left) - 1)
            there = u64(warp_broadcast_u64(to, rank))
            if lane < n_slots:
                value, here = u32(0xFFFFFFFF), u32(0)
                if owner == rank:
                    value, here = local_expert, prob
                put(word_at(there, lane), value, epoch)
                if n_probs > 0:
                    put(word_at(there, i32(n_slots + lane)), here, epoch)
            i = i32(lane)
            while i < n_scales:
                put(word_at(there, i32(n_slots + n_probs + i)), load_u32(scales + u64(4) * u64(i)), epoch)
                i = i32(i + 32)
            left = u32(left & u32(left - u32(1)))

    @device_fn
    def keep(params, my_rank, row, i, data):
        """Stores the data of a row's i-th word."""
        if i < n_slots:
            value = u64(data)
            if data == u32(0xFFFFFFFF):
                value = u64(MINUS_ONE)
            store_u64(home(params, my_rank, 1) + u64(8) * (u64(row) * u64(n_slots) + u64(i)), value)
        elif i < n_slots + n_probs:
            store_u32(home(params, my_rank, 2) + u64(4) * (u64(row) * u64(n_probs) + u64(i - n_slots)), data)
        else:
            k = u64(i - n_slots - n_probs)
            store_u32(home(params, my_rank, 3) + u64(4) * (u64(row) * u64(n_scales) + k), data)

    @device_fn
    def receive(params, epoch, my_rank, source, at, row, lane, has_room):
        ok, i = True, i32(lane)
        while i < n_all:
            word = u64(take_word(params, epoch, source, word_at(at, i)))
            ok, data = ok and word != u64(0), u32(word)
            if has_room:
                keep(params, my_rank, row, i, data)
            i = i32(i + 32)
        return any_lane(not ok) == 0

    return look, send, receive


def home_of(block):
    """Device function (params, my_rank, index): address of this rank's array `index` of the call."""
    pool_of, place_of = in_context(block, "pool_ptrs"), chosen(block, "places")

    @device_fn
    def home(params, my_rank, index):
        pool = pool_of(params, my_rank)
        return u64(pool + place_of(params, index))

    return home
