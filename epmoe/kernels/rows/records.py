"""What one block writes down of a call, for handle and host: counts, tokens, and where experts' rows begin."""

from epmoe.device import (block_dim, device_fn, i32, int32, load_i32, load_u64, shared_array, store_i32, store_u64,
                          syncthreads, thread_idx, u64)

from ..offsets import block_sum
from . import control

# Words of `info`, int32
HAS_ROOM = 0            # whether all ranks had room, so that rows were sent
PADDED_ROWS = 1         # expert-major: rows of all local experts, padding included
TOKENS = 2              # then the tokens of each rank, and then the counts [R, R]


def make(shape, block, note_of):
    """Device function record(params, epoch, my_rank, has_room): for one block, all of its threads.

    Writes info (its last R * R words are the handle's counts) and tokens_per_expert int64 [L]; expert-major also
    expert_base int32 [R, L], the row at which the rows of a (source rank, expert) begin, expert_rows int32 [2, L],
    where each expert's rows begin and how many hold tokens, and overflow int32 [1].
    """
    ranks, local, expert_major = shape.n_ranks, shape.n_local_experts, shape.expert_major
    sums = block_sum(shape.threads)
    experts_at = control.experts_at(ranks)
    p_info, p_counts, p_per_expert = block.offset("info"), block.offset("counts"), block.offset("tokens_per_expert")
    p_base, p_starts, p_overflow = block.offset("expert_base"), block.offset("expert_rows"), block.offset("overflow")
    p_rows, p_pad = block.offset("n_rows"), block.offset("pad")

    @device_fn
    def pairs_of(params, epoch, my_rank, source, expert):
        """Rows (or slots) that a source rank has for a local expert."""
        return i32(load_i32(note_of(params, epoch, my_rank, source) + u64(experts_at) + u64(4) * u64(expert)))

    @device_fn
    def all_pairs_of(params, epoch, my_rank, expert):
        n, source = i32(0), i32(0)
        while source < ranks:
            n, source = i32(n + pairs_of(params, epoch, my_rank, source, expert)), i32(source + 1)
        return n

    @device_fn
    def record_counts(params, epoch, my_rank, has_room):
        info, counts = u64(load_u64(params + u64(p_info))), u64(load_u64(params + u64(p_counts)))
        if thread_idx() == 0:
            room = i32(0)
            if has_room:
                room = i32(1)
            store_i32(info + u64(4 * HAS_ROOM), room)
        i = i32(thread_idx())
        while i < ranks * ranks:
            note = note_of(params, epoch, my_rank, i32(i // ranks))
            store_i32(counts + u64(4) * u64(i), load_i32(note + u64(control.COUNTS) + u64(4) * u64(i % ranks)))
            if i % ranks == 0:
                store_i32(info + u64(4) * u64(TOKENS + i // ranks), load_i32(note + u64(control.TOKENS)))
            i = i32(i + block_dim())

    @device_fn
    def record_slots(params, epoch, my_rank):
        per_expert, expert = u64(load_u64(params + u64(p_per_expert))), i32(thread_idx())
        while expert < local:
            store_u64(per_expert + u64(8) * u64(expert), u64(all_pairs_of(params, epoch, my_rank, expert)))
            expert = i32(expert + block_dim())

    @device_fn
    def place_expert(params, epoch, my_rank, expert, start, n, padded, limit):
        base, starts = u64(load_u64(params + u64(p_base))), u64(load_u64(params + u64(p_starts)))
        row, source = i32(start), i32(0)
        while source < ranks:
            store_i32(base + u64(4) * u64(source * local + expert), row)
            row, source = i32(row + pairs_of(params, epoch, my_rank, source, expert)), i32(source + 1)
        store_i32(starts + u64(4) * u64(expert), start)
        store_i32(starts + u64(4) * u64(local + expert), n)
        kept = i32(min(padded, i32(max(0, limit - start))))
        store_u64(u64(load_u64(params + u64(p_per_expert))) + u64(8) * u64(expert), u64(kept))

    @device_fn
    def record_experts(params, epoch, my_rank):
        partial = shared_array(32, int32)
        limit, pad = i32(load_i32(params + u64(p_rows))), i32(load_i32(params + u64(p_pad)))
        start, first = i32(0), i32(0)
        while first < local:
            expert, n, padded = i32(first + thread_idx()), i32(0), i32(0)
            if expert < local:
                n = all_pairs_of(params, epoch, my_rank, expert)
                padded = i32((n + pad - 1) // pad * pad)
            before, total = sums(padded, partial)
            if expert < local:
                place_expert(params, epoch, my_rank, expert, i32(start + before), n, padded, limit)
            start, first = i32(start + total), i32(first + block_dim())
        if thread_idx() == 0:
            store_i32(u64(load_u64(params + u64(p_info))) + u64(4 * PADDED_ROWS), start)
            over = i32(0)
            if start > limit:
                over = i32(1)
            store_i32(u64(load_u64(params + u64(p_overflow))), over)

    @device_fn
    def record(params, epoch, my_rank, has_room):
        record_counts(params, epoch, my_rank, has_room)
        if expert_major:
            record_experts(params, epoch, my_rank)
        else:
            record_slots(params, epoch, my_rank)
        syncthreads()

    return record
