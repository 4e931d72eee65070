"""Records of a call that the leader block writes for handle and host: counts, tokens, and where experts' rows begin."""

from epmoe.device import (block_dim, device_fn, i32, int32, shared_array, store_i32, store_u64,
                          syncthreads, syncthreads_or, thread_idx, u32, u64)

from ..pairs.offsets import block_sum
from . import control

# Words of `info`, int32
HAS_ROOM = 0            # whether all ranks had room, so that rows were sent
PADDED_ROWS = 1         # expert-major: rows of all local experts, padding included
TOKENS = 2              # then the tokens of each rank, and then the counts [R, R]


def make(shape, block, expert_count):
    """Device functions (record, record_few), of the leader block.

    record(params, epoch, my_rank, notes, has_room, gathered) -> whether all came. Writes info (its last R * R words are
    the handle's counts) and tokens_per_expert int64 [L]; expert-major also expert_base int32 [R, L], the row at which
    the rows of a (src_rank, expert) begin, expert_rows int32 [2, L], where each expert's rows begin and how many
    hold tokens, and overflow int32 [1]. gathered: shared int32 array [experts] that nobody needs. expert_count: of the
    exchange. record_few(params, notes, has_room, gathered, partial): the same, behind a barrier, where a
    shared array has all that is gathered: of ids the slots of each local expert, expert-major the tokens of each source
    rank for each. partial: shared int32 array [32].
    """
    ranks, local, expert_major = shape.n_ranks, shape.n_local_experts, shape.expert_major
    sums, n_words = block_sum(), control.experts_at(ranks)
    p_info, p_counts, p_per_expert = block.index("info"), block.index("counts"), block.index("tokens_per_expert")
    p_base, p_starts, p_overflow = block.index("expert_base"), block.index("expert_rows"), block.index("overflow")
    p_rows, p_pad = block.index("n_rows"), block.index("pad")

    @device_fn
    def gather(params, epoch, my_rank, gathered):
        """What the ranks tell of local experts into gathered[source * local + expert]; all at once, it has a long way.
        """
        ok, i = True, i32(thread_idx())
        while i < ranks * local:
            source = i32(u32(i) // u32(local))
            n = i32(expert_count(params, epoch, my_rank, source, i32(i - source * local)))
            ok, gathered[i] = ok and n >= 0, i32(max(n, 0))
            i = i32(i + block_dim())
        return not syncthreads_or(not ok)

    @device_fn
    def pairs_of(gathered, expert, n_sources):
        """Rows (or slots) that all ranks have for a local expert."""
        n, source = i32(0), i32(0)
        while source < n_sources:
            n, source = i32(n + gathered[source * local + expert]), i32(source + 1)
        return n

    @device_fn
    def record_counts(params, notes, has_room):
        info, counts = params[p_info], params[p_counts]
        if thread_idx() == 0:
            room = i32(0)
            if has_room:
                room = i32(1)
            store_i32(info + u64(4 * HAS_ROOM), room)
            store_i32(info + u64(4 * PADDED_ROWS), i32(0))
        i = i32(thread_idx())
        while i < ranks * ranks:
            source, target = i32(u32(i) // u32(ranks)), i32(u32(i) % u32(ranks))
            store_i32(counts + u64(4) * u64(i), i32(notes[source * n_words + control.COUNTS + target]))
            if target == 0:
                store_i32(info + u64(4) * u64(TOKENS + source), i32(notes[source * n_words + control.TOKENS]))
            i = i32(i + block_dim())

    @device_fn
    def record_slots(params, gathered, n_sources):
        per_expert, expert = params[p_per_expert], i32(thread_idx())
        while expert < local:
            store_u64(per_expert + u64(8) * u64(expert), u64(pairs_of(gathered, expert, n_sources)))
            expert = i32(expert + block_dim())

    @device_fn
    def place_expert(params, gathered, expert, start, n, padded, limit):
        base, starts = params[p_base], params[p_starts]
        row, source = i32(start), i32(0)
        while source < ranks:
            store_i32(base + u64(4) * u64(source * local + expert), row)
            row, source = i32(row + gathered[source * local + expert]), i32(source + 1)
        store_i32(starts + u64(4) * u64(expert), start)
        store_i32(starts + u64(4) * u64(local + expert), n)
        kept = i32(min(padded, i32(max(0, limit - start))))
        store_u64(params[p_per_expert] + u64(8) * u64(expert), u64(kept))

    @device_fn
    def record_experts(params, gathered, partial):
        limit, pad = i32(params[p_rows]), i32(params[p_pad])
        start, first = i32(0), i32(0)
        while first < local:
            expert, n, padded = i32(first + thread_idx()), i32(0), i32(0)
            if expert < local:
                n = i32(pairs_of(gathered, expert, ranks))
                padded = i32(i32(u32(i32(n + pad - 1)) // u32(pad)) * pad)
            before, total = sums(padded, partial)
            if expert < local:
                place_expert(params, gathered, expert, i32(start + before), n, padded, limit)
            start, first = i32(start + total), i32(first + block_dim())
        if thread_idx() == 0:
            store_i32(params[p_info] + u64(4 * PADDED_ROWS), start)
            over = i32(0)
            if start > limit:
                over = i32(1)
            store_i32(params[p_overflow], over)

    @device_fn
    def record(params, epoch, my_rank, notes, has_room, gathered):
        partial = shared_array(32, int32)       # not in a function that two others call
        if not gather(params, epoch, my_rank, gathered):
            return False
        record_counts(params, notes, has_room)
        record_experts(params, gathered, partial)
        syncthreads()                           # all of it before thread 0 may say so
        return True

    @device_fn
    def record_of_ids(params, epoch, my_rank, notes, has_room, gathered):
        if not gather(params, epoch, my_rank, gathered):
            return False
        record_counts(params, notes, has_room)
        record_slots(params, gathered, ranks)
        syncthreads()                           # as above
        return True

    @device_fn
    def record_few(params, notes, has_room, gathered, partial):
        record_counts(params, notes, has_room)
        if expert_major:
            record_experts(params, gathered, partial)
        else:
            record_slots(params, gathered, i32(1))

    return record if expert_major else record_of_ids, record_few
