"""The data that a rank sends in a round, as hashes. The host and every kernel can compute them; nothing is stored."""

from typing import NamedTuple

from epmoe.device import i32, u32

# The random bits of a pair of bf16: signs, low three bits of the exponents, mantissas. The others are set so that
# every value is finite, of magnitude 2**-7 to 2.
RANDOM_BITS, FIXED_BITS = 0x83FF83FF, 0x3C003C00
WEIGHT_RANDOM, WEIGHT_FIXED = 0x807FFFFF, 0x3F000000  # float32 of magnitude 0.5 to 1
NAN = 0x7FC00000
NO_EXPERT = -1
EMPTY_SLOTS = 16  # one id of this many is -1
EMPTY_TOKENS = 64  # one token of this many has no expert at all
HOT_ROUNDS = 4  # in one round of this many, half of all tokens choose the same experts

# purposes of hashes other than tokens (0, 1, ...) and words
FOR_TOKENS, FOR_HOT, FOR_EXPERT = 0xFFFF0001, 0xFFFF0002, 0xFFFF0003
FOR_SLOT, FOR_WEIGHT = 0x40000000, 0x50000000


class Hashing(NamedTuple):
    """Functions of (seed, round, rank, ...); words are u32.

    tokens(round, rank) -> i32: number of tokens, at most max_tokens_per_rank, often 0 or that maximum.
    token_key(round, rank, token) -> u32: determines everything about that token.
    expert(round, token_key, k) -> i32: global expert id of k, or -1. The ids of one token are distinct.
    weight(round, token_key, k) -> u32: bits of the router weight. NaN where the id is -1, which must not matter.
    word(token_key, i) -> u32: elements 2i and 2i + 1 of the token, two bf16.
    mask(expert) -> u32: an expert's output is its input with these bits flipped.
    """

    tokens: callable
    token_key: callable
    expert: callable
    weight: callable
    word: callable
    mask: callable


def make(cfg, seed, wrap) -> Hashing:
    """The functions for a configuration and a seed. wrap: device_fn for kernels, `plain` for the host."""
    n_experts, most = cfg.n_experts, cfg.max_tokens_per_rank
    bits = max(1, (n_experts - 1).bit_length())
    id_bits, half = (1 << bits) - 1, max(1, bits // 2)
    seed = (seed * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF

    @wrap
    def mix(h, x):
        h = u32(u32(h ^ u32(x)) * u32(0x9E3779B1))
        h = u32(h ^ u32(h >> u32(15)))
        h = u32(h * u32(0x85EBCA77))
        h = u32(h ^ u32(h >> u32(13)))
        h = u32(h * u32(0xC2B2AE3D))
        return u32(h ^ u32(h >> u32(16)))

    @wrap
    def tokens(number, rank):
        h = mix(mix(mix(u32(seed), number), rank), u32(FOR_TOKENS))
        kind, n = u32(h & u32(7)), i32(0)
        if kind == u32(1):
            n = i32(most)
        elif kind > u32(1):
            n = i32(u32(h >> u32(8)) % u32(most + 1))
        return n

    @wrap
    def token_key(number, rank, token):
        return mix(mix(mix(u32(seed), number), rank), token)

    @wrap
    def distinct(key, k):
        """The kth id in an order that the key determines: a permutation of the powers of two, walked until it
        hits an id."""
        x = u32(k)
        while True:
            x = u32(u32(x * u32(key | u32(1)) + u32(key >> u32(7))) & u32(id_bits))
            x = u32(x ^ u32(x >> u32(half)))
            x = u32(u32(x * u32(u32(key >> u32(11)) | u32(1)) + u32(key >> u32(19))) & u32(id_bits))
            x = u32(x ^ u32(x >> u32(half)))
            if x < u32(n_experts):
                return x

    @wrap
    def expert(number, key, k):
        of_round = mix(mix(u32(seed), number), u32(FOR_HOT))
        is_empty = u32(mix(key, u32(FOR_SLOT + k)) % u32(EMPTY_SLOTS)) == u32(0)
        found = i32(NO_EXPERT)
        if not is_empty and u32(u32(key >> u32(3)) % u32(EMPTY_TOKENS)) != u32(0):
            chosen = u32(key)
            if u32(of_round % u32(HOT_ROUNDS)) == u32(0) and u32(key & u32(1)) == u32(0):
                chosen = of_round
            found = i32(distinct(mix(chosen, u32(FOR_EXPERT)), k))
        return found

    @wrap
    def weight(number, key, k):
        drawn = u32(NAN)
        if expert(number, key, k) >= 0:
            drawn = u32(u32(mix(key, u32(FOR_WEIGHT + k)) & u32(WEIGHT_RANDOM)) | u32(WEIGHT_FIXED))
        return drawn

    @wrap
    def word(key, i):
        return u32(u32(mix(key, i) & u32(RANDOM_BITS)) | u32(FIXED_BITS))

    @wrap
    def mask(number_of_expert):
        return u32(mix(u32(FOR_EXPERT), number_of_expert) & u32(RANDOM_BITS))

    return Hashing(tokens, token_key, expert, weight, word, mask)


def plain(fn):
    """For the host: returns the function unchanged."""
    return fn
