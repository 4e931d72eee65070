"""Bits by expert: which of a few tokens go to which expert, told by every rank to all in words that name the call.

A word holds an expert's bits of 32 tokens of a source rank. Who has the words of all source ranks knows where each
token's rows by expert begin; every block works that out for itself, so that nobody waits for anybody who writes it
down. As in tagged.py words are stored and polled relaxed: who sees the call's number sees the bits beside it.
"""

from types import SimpleNamespace

from epmoe.device import (SIM, block_dim, device_fn, i32, int32, lane_id, ld_relaxed_sys_u64, load_i32, load_u8,
                          load_u64, n_warps, popc, shared_array, shfl_xor, st_relaxed_sys_u64, syncthreads,
                          syncthreads_or, thread_idx, u32, u64, warp_id, warp_sum_i32)

from ..offsets import block_sum
from . import control, peers, waits
from .status import FOR_WINDOW

WORD = 8                            # bytes
A_WORD = 2 if SIM else 32           # tokens whose bits a word holds
WORDS = control.WINDOW_ROWS // A_WORD
MOST_EXPERTS = 512                  # whose bits a block has room for
FEWEST = min(8, A_WORD)             # tokens that are looked at together


def suit(shape):
    """Whether a kernel's rows may go this way, if they are few: expanded by expert while they come."""
    return shape.expert_major and shape.expands and shape.has_meta and shape.n_experts <= MOST_EXPERTS


def few_for(shape, num_tokens):
    """RowsShape.tags of a kernel for a rank's tokens; the simulator's ranks share a kernel."""
    return control.WINDOW_ROWS if suit(shape) and (SIM or num_tokens <= control.WINDOW_ROWS) else 0


def _bytes_of_source(shape):
    words = WORDS * shape.n_local_experts + control.WINDOW_ROWS * shape.n_local_experts * shape.has_probs
    return -(-WORD * words // 256) * 256


def bytes_for(shape):
    """Bytes of the words of one parity for the calls of a kernel."""
    return shape.n_ranks * _bytes_of_source(shape) if suit(shape) else 0


@device_fn
def below(token):
    """The bits of the tokens before this one in its word."""
    return u32(u32(u32(1) << u32(token & (A_WORD - 1))) - u32(1))


@device_fn
def word_of(token):
    """The number of the word that holds the token's bit."""
    return i32(u32(token) // u32(A_WORD))


def _bits_of(n, n_experts):
    """Device function (at, last) -> an expert's bits of n tokens from an address of the map on, all asked for first.

    Bits behind that of token `last` are not cleared.
    """
    @device_fn
    def nothing(at, last):
        return u32(0)

    if n == 0:
        return nothing
    of_the_rest, token = _bits_of(n - 1, n_experts), n - 1

    @device_fn
    def bits(at, last):
        value = load_u8(at + u64(n_experts) * u64(min(i32(token), last)))
        mask = u32(of_the_rest(at, last))
        if value != 0:
            mask = u32(mask | u32(u32(1) << u32(token)))
        return mask

    return bits


def ranks_of_token(shape):
    """Device functions (look(routing_map, token, lane), gather(seen)) -> the mask of a token's ranks, by a warp.

    look: what a lane sees of the token's row of the map, all asked for together, not waited for.
    """
    n_experts, local = shape.n_experts, shape.n_local_experts

    def looking(n):
        @device_fn
        def nothing(row, lane):
            return u32(0)

        if n == 0:
            return nothing
        at_the_rest, first = looking(n - 1), 32 * (n - 1)

        @device_fn
        def look_at(row, lane):
            expert = i32(min(i32(first + lane), n_experts - 1))
            value = load_u8(row + u64(expert))
            mask = u32(at_the_rest(row, lane))
            if value != 0:
                mask = u32(mask | u32(u32(1) << u32(u32(expert) // u32(local))))
            return mask

        return look_at

    look_at_all = looking(-(-n_experts // 32))

    @device_fn
    def look(routing_map, token, lane):
        return look_at_all(u64(routing_map) + u64(token) * u64(n_experts), lane)

    @device_fn
    def gather(mask):
        mask = u32(mask | u32(shfl_xor(mask, 16)))
        mask = u32(mask | u32(shfl_xor(mask, 8)))
        mask = u32(mask | u32(shfl_xor(mask, 4)))
        mask = u32(mask | u32(shfl_xor(mask, 2)))
        return u32(mask | u32(shfl_xor(mask, 1)))

    return look, gather


def make(shape, block, phase):
    """Device functions for one kernel; known: what allocate() gives.

    allocate() -> shared int32 arrays (bits, before [word, source, expert], starts [expert + 1], counts [expert],
    here [source, word], partial [32]). n_told(num_tokens): what warps have to tell, 32 words each. tell(params, epoch,
    num_tokens, my_rank, routing_map, first, step): by warps, of `step` the first-th; this rank's words to all ranks.
    await_bits(params, epoch, my_rank, notes, known): every block; whether all ranks' words came. count(known, notes,
    gathered): of a block that wants only gathered[source * local + expert], the tokens for an expert. place(params,
    notes, known): the rest of `known`, behind a barrier: in `before` the output row of the first of the word's tokens;
    starts, counts: of an expert's rows, starts[experts] the end of all; here: the tokens with any expert of this rank.
    target(known, source, token, expert, limit) -> output row, -1 for none. comes(known, source, token): whether it has
    a row here. number(known, source, token, lane) -> its number among all rows that come, by a warp. total(known,
    lane): of these. prob_at(params, epoch, rank, source, token, expert): address of the word with a prob.
    """
    ranks, local, n_experts, of_source = shape.n_ranks, shape.n_local_experts, shape.n_experts, _bytes_of_source(shape)
    n_windows, n_notes, sums = -(-local // 32), control.experts_at(ranks), block_sum()
    most_tokens = peers.most_tokens(ranks)
    n_bits, n_starts, n_here = WORDS * n_experts, local + 1, ranks * WORDS
    of_some, of_all = _bits_of(FEWEST, n_experts), _bits_of(A_WORD, n_experts)
    p_pools, p_words, p_timeout = block.offset("pool_ptrs"), block.offset("words"), block.offset("timeout_ns")
    p_tagged, p_bytes, p_pad = block.offset("tagged_at"), block.offset("tagged_bytes"), block.offset("pad")

    @device_fn
    def allocate():
        return (shared_array(n_bits, int32), shared_array(n_bits, int32), shared_array(n_starts, int32),
                shared_array(local, int32), shared_array(n_here, int32), shared_array(32, int32))

    @device_fn
    def words_at(params, epoch, rank, source):
        """Where a rank has a source's words."""
        pool = u64(load_u64(params + u64(p_pools) + u64(8) * u64(rank)))
        half = u64((u64(epoch) & u64(1)) * u64(load_u64(params + u64(p_bytes))))
        return u64(pool + u64(load_u64(params + u64(p_tagged))) + half + u64(source) * u64(of_source))

    @device_fn
    def prob_at(params, epoch, rank, source, token, expert):
        words = u64(words_at(params, epoch, rank, source) + u64(WORD * WORDS * local))
        return u64(words + u64(WORD) * (u64(token) * u64(local) + u64(expert)))

    @device_fn
    def n_told(num_tokens):
        return i32(i32(u32(num_tokens + A_WORD - 1) // u32(A_WORD)) * (ranks * n_windows))

    @device_fn
    def tell(params, epoch, num_tokens, my_rank, routing_map, first, step):
        lane, task = i32(lane_id()), i32(first)
        end = n_told(num_tokens)
        while task < end:
            word = i32(u32(task) // u32(ranks * n_windows))
            rest = i32(task - word * (ranks * n_windows))
            rank = i32(u32(rest) // u32(n_windows))
            expert = i32((rest - rank * n_windows) * 32 + lane)
            to = u64(words_at(params, epoch, rank, my_rank) + u64(WORD) * u64(i32(word * local + expert)))
            column = u64(routing_map) + u64(word * A_WORD) * u64(n_experts)
            column = u64(column + u64(i32(rank * local + min(expert, local - 1))))
            last = i32(min(A_WORD, i32(num_tokens - word * A_WORD)) - 1)
            if last < FEWEST:
                mask = u32(of_some(column, last))
            else:
                mask = u32(of_all(column, last))
            mask = u32(mask & u32(u32(u32(u32(1) << u32(last)) << u32(1)) - u32(1)))
            if expert < local:
                st_relaxed_sys_u64(to, waits.told(epoch, mask))
            task = i32(task + step)

    @device_fn
    def words_told(notes):
        """Words of the source rank that has most tokens."""
        return i32(u32(most_tokens(notes) + A_WORD - 1) // u32(A_WORD))

    @device_fn
    def await_bits(params, epoch, my_rank, notes, known):
        bits, ok, i, n = known[0], True, i32(thread_idx()), i32(words_told(notes) * n_experts)
        status = u64(u64(load_u64(params + u64(p_words))) + u64(control.STATUS))
        timeout_ns = u64(load_u64(params + u64(p_timeout)))
        while ok and i < n:
            word = i32(u32(i) // u32(n_experts))
            source = i32(u32(i32(i - word * n_experts)) // u32(local))
            expert, value = i32(i - word * n_experts - source * local), i32(0)
            if word * A_WORD < notes[source * n_notes + control.TOKENS]:
                at = u64(words_at(params, epoch, my_rank, source) + u64(WORD) * u64(i32(word * local + expert)))
                seen = u64(waits.wait_for_tagged_word(at, u64(ld_relaxed_sys_u64(at)), epoch, status, timeout_ns, phase,
                                                      FOR_WINDOW, source))
                ok, value = seen != u64(0), i32(u32(seen))
            bits[i] = value
            i = i32(i + block_dim())
        return not syncthreads_or(not ok)

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
            mask = u32(mask | u32(shfl_xor(mask, 16)))
            mask = u32(mask | u32(shfl_xor(mask, 8)))
            mask = u32(mask | u32(shfl_xor(mask, 4)))
            mask = u32(mask | u32(shfl_xor(mask, 2)))
            mask = u32(mask | u32(shfl_xor(mask, 1)))
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
        pad, n_words, start, first = i32(load_i32(params + u64(p_pad))), words_told(notes), i32(0), i32(0)
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

    return SimpleNamespace(allocate=allocate, n_told=n_told, tell=tell, await_bits=await_bits, count=count, place=place,
                           target=target, comes=comes, number=number, total=total, prob_at=prob_at)
