"""Moves arrays out of the pool into separate memory: rows that peers wrote there because no result memory was free.
Local.
"""

from functools import lru_cache

from epmoe.device import (block_dim, block_idx, grid_dim, i32, kernel, load16, load_u32, store16, store_u32,
                          thread_idx, u64)

from ..params import chosen
from .block import parameter_block
from .shape import MAX_PLACES


@lru_cache
def move_kernel(n_ranks, threads):
    """Kernel that copies word_counts[i] 32-bit words from sources[i] to targets[i]; both 16-byte aligned."""
    block = parameter_block(n_ranks)
    source_of, target_of, words_of = (chosen(block, n) for n in ("sources", "targets", "word_counts"))

    @kernel(max_threads=threads, words=block.n_words)
    def rows_move(params, num_tokens, my_rank):
        array = i32(0)
        while array < MAX_PLACES:
            src = source_of(params, array)
            to = target_of(params, array)
            words = words_of(params, array)
            me, all_threads = u64(block_idx() * block_dim() + thread_idx()), u64(grid_dim() * block_dim())
            i = u64(me)
            while i < words // u64(4):
                q = load16(src + u64(16) * i)
                store16(to + u64(16) * i, q[0], q[1], q[2], q[3])
                i = u64(i + all_threads)
            i = u64(u64(words // u64(4)) * u64(4) + me)
            while i < words:
                store_u32(to + u64(4) * i, load_u32(src + u64(4) * i))
                i = u64(i + all_threads)
            array = i32(array + 1)

    return rows_move
