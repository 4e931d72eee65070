"""The places of rows by expert in small batches, which every block computes from the bits of all ranks.

An expert's rows follow those of the previous experts, padded. Among them lower ranks come first, and a rank's rows have
the order of its tokens.
"""

from types import SimpleNamespace

from epmoe.device import (block_dim, device_fn, i32, int32, lane_id, n_warps, popc, shared_array, syncthreads,
                          thread_idx, u32, warp_id, warp_sum_i32)

from ..pairs.offsets import block_sum
from .expert_bits import A_WORD, WORDS, below, word_of, words_of_all
from .routing import or_of_warp


def make(shape, block):
    """Device functions for one kernel; known: what allocate() gives.

    allocate() -> shared int32 arrays (bits, before [word, source, expert], starts [expert + 1], counts [expert],
    here [source, word], partial [32]); bits: as await_bits of expert_bits.py leaves it. count(known, notes, gathered):
    of a block that wants only gathered[source * local + expert], the tokens for an expert. place(params, notes, known):
    the rest of `known`, behind a barrier: in `before` the output row of the first of the word's tokens; starts, counts:
    of an expert's rows, starts[experts] the end of all; here: the tokens with any expert of this rank. target(known,
    source, token, expert, limit) -> output row, -1 for none. comes(known, source, token): whether it has a row here.
    number(known, source, token, lane) -> its number among all rows that come, by a warp. total(known, lane): of these.
    """
    ranks, local, n_experts, words_told = shape.n_ranks, shape.n_local_experts, shape.n_experts, words_of_all(shape)
    n_bits, n_starts, n_here = WORDS * n_experts, local + 1, ranks * WORDS
    sums, p_pad = block_sum(), block.index("pad")

    @device_fn
    def allocate():
        return (shared_array(n_bits, int32), shared_array(n_bits, int32), shared_array(n_starts, int32),
                shared_array(local, int32), shared_array(n_here, int32), shared_array(32, int32))

    @device_fn
    def tokens_for(bits, source, expert, n_words):
        n, word = i32(0), i32(0)
        while word < n_words:
            n = i32(n + popc(u32(bits[(word * ranks + source) * local + expert])))
            word = i32(word + 1)
        return n

    @device_fn
    def count(known, notes, gathered):
        i, n_words = i32(thread_idx()), words_told(notes)
        while i < n_experts:
            source = i32(u32(i) // u32(local))
            gathered[i] = tokens_for(known[0], source, i32(i - source * local), n_words)
            i = i32(i + block_dim())

    @device_fn
    def gather_here(known, n_words):
        """A warp a word of a source, from the last warp on: the others sum up experts."""
        bits, here, lane = known[0], known[4], i32(lane_id())
        task = i32(n_warps() - 1 - warp_id())
        while task < ranks * WORDS:
            source = i32(u32(task) // u32(WORDS))
            word, mask, expert = i32(task - source * WORDS), u32(0), i32(lane)
            if word >= n_words:
                expert = i32(local)
            while expert < local:
                mask = u32(mask | u32(bits[(word * ranks + source) * local + expert]))
                expert = i32(expert + 32)
            mask = or_of_warp(mask)
            if lane == 0:
                here[task] = i32(mask)
            task = i32(task + n_warps())

    @device_fn
    def place_expert(known, expert, start, n_words):
        bits, before = known[0], known[1]
        row, source = i32(start), i32(0)
        while source < ranks:
            word = i32(0)
            while word < n_words:
                i = i32((word * ranks + source) * local + expert)
                before[i] = row
                row, word = i32(row + popc(u32(bits[i]))), i32(word + 1)
            source = i32(source + 1)

    @device_fn
    def place(params, notes, known):
        bits, _, starts, counts, _, partial = known
        pad, n_words, start, first = i32(params[p_pad]), words_told(notes), i32(0), i32(0)
        gather_here(known, n_words)
        while first < local:
            expert, n, padded = i32(first + thread_idx()), i32(0), i32(0)
            if expert < local:
                source = i32(0)
                while source < ranks:
                    n, source = i32(n + tokens_for(bits, source, expert, n_words)), i32(source + 1)
                padded = i32(i32(u32(i32(n + pad - 1)) // u32(pad)) * pad)
            ahead, all_rows = sums(padded, partial)
            if expert < local:
                starts[expert], counts[expert] = i32(start + ahead), n
                place_expert(known, expert, i32(start + ahead), n_words)
            start, first = i32(start + all_rows), i32(first + block_dim())
        if thread_idx() == 0:
            starts[local] = start
        syncthreads()

    @device_fn
    def target(known, source, token, expert, limit):
        row = i32(-1)
        if expert < local:
            i = i32((word_of(token) * ranks + source) * local + expert)
            mask = u32(known[0][i])
            if u32(mask >> u32(token & (A_WORD - 1))) & u32(1) != u32(0):
                row = i32(known[1][i] + popc(u32(mask & below(token))))
            if row >= limit:
                row = i32(-1)
        return row

    @device_fn
    def comes(known, source, token):
        mask = u32(known[4][source * WORDS + word_of(token)])
        return u32(mask >> u32(token & (A_WORD - 1))) & u32(1) != u32(0)

    @device_fn
    def rows_up_to(known, end, lane):
        """Rows that come, of the first words; in all lanes."""
        n, i = i32(0), i32(lane)
        while i < end:
            n, i = i32(n + popc(u32(known[4][i]))), i32(i + 32)
        return i32(warp_sum_i32(n))

    @device_fn
    def number(known, source, token, lane):
        i = i32(source * WORDS + word_of(token))
        return i32(rows_up_to(known, i, lane) + popc(u32(u32(known[4][i]) & below(token))))

    @device_fn
    def total(known, lane):
        return rows_up_to(known, i32(ranks * WORDS), lane)

    return SimpleNamespace(allocate=allocate, count=count, place=place, target=target, comes=comes, number=number,
                           total=total)
