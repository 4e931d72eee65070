"""Bits by expert for small batches: every rank tells all others which of its tokens go to which expert.

A word holds an expert's bits for 32 tokens of a src_rank, and the number of the call. A block that has the words of all
src_ranks can compute where each token's rows by expert begin (expert_places.py). Every block computes this for itself,
so no block waits for another. Words are stored and polled relaxed (lamport_words.py): a thread that sees the call's
number sees the bits in the same word.
"""

from types import SimpleNamespace

from epmoe.device import (SIM, block_dim, device_fn, i32, lane_id, ld_relaxed_sys_u64, st_relaxed_sys_u64,
                          syncthreads_or, thread_idx, u32, u64)

from ..params import in_context
from . import control, map_bits, peers, waits
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
    """RowsShape.few of a kernel for a rank's tokens; the simulator's ranks share a kernel."""
    return control.WINDOW_ROWS if suit(shape) and (SIM or num_tokens <= control.WINDOW_ROWS) else 0


def _bytes_of_source(shape):
    words = WORDS * shape.n_local_experts + control.WINDOW_ROWS * shape.n_local_experts * shape.has_probs
    return -(-WORD * words // 256) * 256


def bytes_for(shape):
    """Bytes of the words of one parity for the calls of a kernel."""
    return shape.n_ranks * _bytes_of_source(shape) if suit(shape) else 0


def words_of_all(shape):
    """Device function (notes) -> words of an expert and a src_rank: of the one that has most tokens."""
    most_tokens = peers.most_tokens(shape.n_ranks)

    @device_fn
    def words_told(notes):
        return i32(u32(most_tokens(notes) + A_WORD - 1) // u32(A_WORD))

    return words_told


@device_fn
def below(token):
    """The bits of the tokens before this one in its word."""
    return u32(u32(u32(1) << u32(token & (A_WORD - 1))) - u32(1))


@device_fn
def word_of(token):
    """The number of the word that holds the token's bit."""
    return i32(u32(token) // u32(A_WORD))


def make(shape, block, phase):
    """Device functions for one kernel.

    n_told(num_tokens): what warps have to tell, 32 words each. tell(params, epoch, num_tokens, my_rank, routing_map,
    first, step): by warps, of `step` the first-th; this rank's words to all ranks. await_bits(params, epoch, my_rank,
    notes, bits): every block; whether all ranks' words came, to the shared array bits [word, source, expert].
    prob_at(params, epoch, rank, source, token, expert): address of the word with a prob, behind those of bits.
    """
    ranks, local, n_experts, of_source = shape.n_ranks, shape.n_local_experts, shape.n_experts, _bytes_of_source(shape)
    n_windows, n_notes, words_told = -(-local // 32), control.experts_at(ranks), words_of_all(shape)
    of_some, of_all = map_bits.of_tokens(FEWEST, n_experts), map_bits.of_tokens(A_WORD, n_experts)
    pool_of, p_words, p_timeout = in_context(block, "pool_ptrs"), block.index("words"), block.index("timeout_ns")
    p_bits, p_bytes = block.index("bits_at"), block.index("bits_bytes")

    @device_fn
    def words_at(params, epoch, rank, source):
        """Where a rank has a source's words."""
        pool = pool_of(params, rank)
        half = u64((u64(epoch) & u64(1)) * params[p_bytes])
        return u64(pool + params[p_bits] + half + u64(source) * u64(of_source))

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
    def await_bits(params, epoch, my_rank, notes, bits):
        ok, i, n = True, i32(thread_idx()), i32(words_told(notes) * n_experts)
        status = u64(params[p_words] + u64(control.STATUS))
        timeout_ns = params[p_timeout]
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

    return SimpleNamespace(n_told=n_told, tell=tell, await_bits=await_bits, prob_at=prob_at)
