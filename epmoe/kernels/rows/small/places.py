"""The places of rows by expert in small batches, which every block computes from the bits of all ranks.

A word holds an expert's bits for 32 tokens of a src_rank, and the number of the call. A rank's last warps make these
words and store them at all ranks. Every block polls the words of all src_ranks, also of its own rank. Then it computes
each token's output rows by itself. An expert's rows follow those of the previous experts, padded. Lower ranks come
first, and a rank's rows have the order of its tokens. The words follow the announcement in the mailbox. They are stored
and polled relaxed: the call's number and the bits are in the same word.
"""

from typing import NamedTuple

from epmoe.device import (block_dim, device_fn, i32, int32, lane_id, n_warps, popc, shared_array, st_relaxed_sys_u64,
                          syncthreads, syncthreads_or, thread_idx, u32, u64, warp_id, warp_or_u32, warp_sum_i32)

from ...bits import below, divided_up, has, split
from .. import announce, handle, mailbox, routing, wait
from ..shape import namespace, p


class Places(NamedTuple):
    """Shared int32 arrays of a block.

    bits, first_row [word, src_rank, expert]: the word's bits, and the output row of the first of its tokens. starts,
    counts [expert]: an expert's first row, and how many of its rows hold tokens. any_expert [src_rank, word]: bits of
    the tokens that go to any expert of this rank. partial [32]: scratch of block_sums().
    """

    bits: object
    first_row: object
    starts: object
    counts: object
    any_expert: object
    partial: object


def _words_used(shape):
    """Device function (announced) -> words for an expert and a src_rank, enough for the rank with most tokens."""
    mail, a_word = mailbox.reading(shape.n_ranks), shape.tuning.bits_word
    return device_fn(lambda announced: divided_up(mail.most_tokens(announced), a_word))


def announcing(shape):
    """Namespace of device functions by which ranks announce bits.

    n_tasks(num_tokens): the tasks of warps, 32 words each. announce(call, first, step): a warp does every step-th task
    from `first` on, and so stores this rank's words at all ranks. await_bits(call, announced, bits) -> whether all
    ranks' words came: every block waits for them and stores the bits in the shared array `bits`.
    """
    ranks, n_local, num_experts = shape.n_ranks, shape.num_local_experts, shape.num_experts
    word_at, n_windows = announce.mailbox_words(shape), -(-n_local // 32)
    mail, words_used = mailbox.reading(ranks), _words_used(shape)
    a_word, a_few, bits_at = shape.tuning.bits_word, shape.tuning.bits_word_of_few, mailbox.bits_at(ranks, n_local)
    of_few, of_all = routing.bits_of_tokens(a_few, num_experts), routing.bits_of_tokens(a_word, num_experts)
    what = wait.ROWS_DISPATCH, wait.FOR_WINDOW      # reports do not tell bits from rows

    bits_word_at = device_fn(lambda call, rank, src_rank, word, expert:
                             word_at(call.params, rank, call.epoch, src_rank, i32(bits_at + word * n_local + expert)))
    n_tasks = device_fn(lambda num_tokens: i32(divided_up(num_tokens, a_word) * (ranks * n_windows)))

    @device_fn
    def announce_bits(call, first, step):
        lane, task, end = i32(lane_id()), i32(first), n_tasks(call.num_tokens)
        while task < end:
            word, rest = split(task, ranks * n_windows)
            rank, window = split(rest, n_windows)
            expert = i32(window * 32 + lane)
            to = bits_word_at(call, rank, call.my_rank, word, expert)
            column = call.params[p.ids] + u64(word * a_word) * u64(num_experts)
            column = u64(column + u64(i32(rank * n_local + min(expert, n_local - 1))))
            last = i32(min(a_word, i32(call.num_tokens - word * a_word)) - 1)      # of the word's tokens
            mask = u32(of_few(column, last)) if last < a_few else u32(of_all(column, last))
            mask = u32(mask & u32(u32(u32(u32(1) << u32(last)) << u32(1)) - u32(1)))
            if expert < n_local:
                st_relaxed_sys_u64(to, wait.tagged(call.epoch, mask))
            task = i32(task + step)

    @device_fn
    def await_bits(call, announced, bits):
        ok, i, n = True, i32(thread_idx()), i32(words_used(announced) * num_experts)
        while ok and i < n:
            word, rest = split(i, num_experts)
            (src_rank, expert), value = split(rest, n_local), i32(0)
            if word * a_word < mail.tokens(announced, src_rank):
                at = bits_word_at(call, call.my_rank, src_rank, word, expert)
                ok, seen = wait.for_tagged_word(call.params, at, call.epoch, what, src_rank)
                value = i32(seen)
            bits[i] = value
            i = i32(i + block_dim())
        return not syncthreads_or(not ok)

    return namespace("bits", n_tasks=n_tasks, announce=announce_bits, await_bits=await_bits)


def placing(shape):
    """Namespace of device functions that fill or read Places.

    allocate() -> Places. place(params, announced, places) -> rows by expert, padding included: fills all but `bits`,
    ends with a barrier. tokens_for((places, words_used(announced)), src_rank, expert) -> number of tokens. row(places,
    src_rank, token, expert) -> output row, -1 for none. comes(places, src_rank, token) -> whether it has a row here.
    number(places, src_rank, token, lane) -> its number among all arriving rows, by a warp.
    """
    ranks, n_local, num_experts = shape.n_ranks, shape.num_local_experts, shape.num_experts
    a_word, most_words = shape.tuning.bits_word, -(-shape.lamport // shape.tuning.bits_word)
    n_bits, n_any, words_used = most_words * num_experts, ranks * most_words, _words_used(shape)
    index = device_fn(lambda word, src_rank, expert: i32((word * ranks + src_rank) * n_local + expert))

    @device_fn
    def allocate():
        return Places(shared_array(n_bits, int32), shared_array(n_bits, int32), shared_array(n_local, int32),
                      shared_array(n_local, int32), shared_array(n_any, int32), shared_array(32, int32))

    @device_fn
    def tokens_for(known, src_rank, expert):
        (places, n_words), n, word = known, i32(0), i32(0)
        while word < n_words:
            n = i32(n + popc(u32(places.bits[index(word, src_rank, expert)])))
            word = i32(word + 1)
        return n

    @device_fn
    def place_expert(params, known, expert, start, n, padded):
        (places, n_words), row, src_rank = known, i32(start), i32(0)
        places.starts[expert], places.counts[expert] = start, n
        while src_rank < ranks:
            word = i32(0)
            while word < n_words:
                i = index(word, src_rank, expert)
                places.first_row[i] = row
                row, word = i32(row + popc(u32(places.bits[i]))), i32(word + 1)
            src_rank = i32(src_rank + 1)

    place_experts = handle.placing_experts(shape, handle.pairs_for(shape, tokens_for), place_expert)

    @device_fn
    def place(params, announced, places):
        n_words, lane, task = words_used(announced), i32(lane_id()), i32(n_warps() - 1 - warp_id())
        while task < n_any:     # a warp a word of a src_rank, from the last warp on: the others sum up experts
            (src_rank, word), mask, expert = split(task, most_words), u32(0), i32(lane)
            while word < n_words and expert < n_local:
                mask = u32(mask | u32(places.bits[index(word, src_rank, expert)]))
                expert = i32(expert + 32)
            mask = warp_or_u32(mask)
            if lane == 0:
                places.any_expert[task] = i32(mask)
            task = i32(task + n_warps())
        n_rows = place_experts(params, (places, n_words), places.partial)
        syncthreads()
        return n_rows

    @device_fn
    def row_of(places, src_rank, token, expert):
        row, (word, bit) = i32(-1), split(token, a_word)
        if expert < n_local:
            i = index(word, src_rank, expert)
            mask = u32(places.bits[i])
            row = i32(places.first_row[i] + popc(u32(mask & below(bit)))) if has(mask, bit) else i32(-1)
        return row

    @device_fn
    def comes(places, src_rank, token):
        word, bit = split(token, a_word)
        return has(u32(places.any_expert[src_rank * most_words + word]), bit)

    @device_fn
    def number(places, src_rank, token, lane):
        (word, bit), n, i = split(token, a_word), i32(0), i32(lane)
        its = i32(src_rank * most_words + word)
        while i < its:                          # words of earlier tokens
            n, i = i32(n + popc(u32(places.any_expert[i]))), i32(i + 32)
        return i32(warp_sum_i32(n) + popc(u32(u32(places.any_expert[its]) & below(bit))))

    return namespace("placing", allocate=allocate, words_used=words_used, tokens_for=tokens_for, place=place,
                     row=row_of, comes=comes, number=number)
