"""The leader block's records for handle and host: counts, tokens, and where experts' rows begin."""

from epmoe.device import (block_dim, device_fn, fence_acq_rel_gpu, i32, int32, ld_relaxed_gpu_i32, load_i32,
                          shared_array, st_release_sys_u64, store_i32, store_u64, syncthreads, thread_idx, u64)

from ..bits import block_sums, divided_up, split
from ..params import by_threads
from . import announce, mailbox, wait
from .shape import namespace, p

# Words of `info`, int32
HAS_ROOM = 0            # whether all ranks had room to receive, so that rows were sent
PADDED_ROWS = 1         # expert-major: rows of all local experts, padding included
TOKENS = 2              # then the tokens of each rank, and then the counts [R, R]

TOLD_AT = 64            # byte offset in host memory of what the host is told; at 0 is told_number
TOLD_STATUS = 16        # the host is told this many status words, int32; then tokens_per_expert, and then info


def pairs_for(shape, tokens_for):
    """Device function (known, expert) -> pairs (token, expert) of a local one. tokens_for, known: as in writing()."""
    ranks = shape.n_ranks

    @device_fn
    def pairs_of(known, expert):
        n, src_rank = i32(0), i32(0)
        while src_rank < ranks:
            n, src_rank = i32(n + tokens_for(known, src_rank, expert)), i32(src_rank + 1)
        return n

    return pairs_of


def placing_experts(shape, pairs_of, place):
    """Device function (params, known, partial) -> rows of all local experts with padding; called by a whole block.

    place(params, known, expert, start, n, padded): called by one thread for each expert; n of its rows hold tokens.
    pairs_of: from pairs_for(). partial: shared int32 array [32].
    """
    n_local = shape.num_local_experts

    @device_fn
    def place_experts(params, known, partial):
        pad, start, first = i32(params[p.pad_multiple]), i32(0), i32(0)
        while first < n_local:
            expert = i32(first + thread_idx())
            n = pairs_of(known, expert) if expert < n_local else i32(0)
            padded = i32(divided_up(n, pad) * pad)
            before, total = block_sums(padded, partial)
            if expert < n_local:
                place(params, known, expert, i32(start + before), n, padded)
            start, first = i32(start + total), i32(first + block_dim())
        return start

    return place_experts


def writing(shape, tokens_for):
    """Namespace of device functions of the leader block. tokens_for(known, src_rank, expert): tokens for an expert.

    known: what tokens_for reads. counts(params, announced, has_room): writes info; its last R * R words are the
    handle's counts. tokens(n, params, known): writes tokens_per_expert int64 [n]. experts(params, known, partial), in
    place of tokens() in expert-major: writes tokens_per_expert (rows with padding, up to num_rows), expert_base int32
    [R, L], first rows of (src_rank, expert), expert_rows int32 [2, L], experts' first rows and numbers of tokens, and
    overflow int32 [1], 1 if rows with padding are more than num_rows.
    """
    ranks, n_local, mail = shape.n_ranks, shape.num_local_experts, mailbox.reading(shape.n_ranks)
    pairs_of, expert_major = pairs_for(shape, tokens_for), shape.expert_major

    @by_threads
    def write_count(i, info, counts, announced):
        src_rank, dst_rank = split(i, ranks)
        store_i32(counts + u64(4) * u64(i), mail.count(announced, src_rank, dst_rank))
        if dst_rank == 0:
            store_i32(info + u64(4) * u64(TOKENS + src_rank), mail.tokens(announced, src_rank))

    @device_fn
    def write_counts(params, announced, has_room):
        info, counts = params[p.info], params[p.counts]
        if thread_idx() == 0:
            store_i32(info + u64(4 * HAS_ROOM), i32(1) if has_room else i32(0))
            if not expert_major:
                store_i32(info + u64(4 * PADDED_ROWS), i32(0))
        write_count(ranks * ranks, info, counts, announced)

    @by_threads
    def write_tokens(expert, params, known):
        store_u64(params[p.tokens_per_expert] + u64(8) * u64(expert), u64(pairs_of(known, expert)))

    @device_fn
    def write_expert(params, known, expert, start, n, padded):
        base, starts, limit = params[p.expert_base], params[p.expert_rows], i32(params[p.num_rows])
        row, src_rank = i32(start), i32(0)
        while src_rank < ranks:
            store_i32(base + u64(4) * u64(src_rank * n_local + expert), row)
            row, src_rank = i32(row + tokens_for(known, src_rank, expert)), i32(src_rank + 1)
        store_i32(starts + u64(4) * u64(expert), start)
        store_i32(starts + u64(4) * u64(n_local + expert), n)
        n_visible = i32(min(padded, i32(max(0, limit - start))))
        store_u64(params[p.tokens_per_expert] + u64(8) * u64(expert), u64(n_visible))

    place_experts = placing_experts(shape, pairs_of, write_expert)

    @device_fn
    def write_experts(params, known, partial):
        n_rows = place_experts(params, known, partial)
        if thread_idx() == 0:
            store_i32(params[p.info] + u64(4 * PADDED_ROWS), n_rows)
            store_i32(params[p.overflow], i32(1) if n_rows > i32(params[p.num_rows]) else i32(0))

    return namespace("write", counts=write_counts, tokens=write_tokens, experts=write_experts)


def told_words(n_ranks, n_local):
    """Number of int32 words that are stored for the host."""
    return TOLD_STATUS + 2 * n_local + TOKENS + n_ranks + n_ranks * n_ranks


def telling_host(shape):
    """Device function tell(params): the leader block tells the host the counts, after its records, if the host waits.

    The counts are known before the rows have arrived, and later work on the stream follows in order. So the host can go
    on while rows are under way.
    """
    n_words, info_at = told_words(shape.n_ranks, shape.num_local_experts), TOLD_STATUS + 2 * shape.num_local_experts

    @device_fn
    def word_at(params, i):
        if i < TOLD_STATUS:
            return i32(ld_relaxed_gpu_i32(wait.status_of(params) + u64(4) * u64(i)))
        if i < info_at:
            return i32(load_i32(params[p.tokens_per_expert] + u64(4) * u64(i32(i - TOLD_STATUS))))
        return i32(load_i32(params[p.info] + u64(4) * u64(i32(i - info_at))))

    @by_threads
    def tell_word(i, params):
        store_i32(params[p.told] + u64(TOLD_AT) + u64(4) * u64(i), word_at(params, i))

    @device_fn
    def tell(params):
        syncthreads()                           # all records
        if params[p.told] != u64(0):
            tell_word(n_words, params)
            syncthreads()                       # all of it before thread 0 stores told_number
            if thread_idx() == 0:
                st_release_sys_u64(params[p.told], params[p.told_number])

    return tell


def recording(shape):
    """Device function record(call, announced, has_room, experts) -> whether experts' counts came; by the leader block.

    It writes all records. experts: of layout.Scratch; overwritten with announced counts [src_rank, local expert].
    """
    expert_major, n_local, tell_host = shape.expert_major, shape.num_local_experts, telling_host(shape)
    write = writing(shape, device_fn(lambda experts, src_rank, expert: i32(experts[src_rank * n_local + expert])))
    gather = announce.awaiting(shape, wait.ROWS_DISPATCH, "experts")

    @device_fn
    def record(call, announced, has_room, experts):
        if not gather(call, experts):
            return False
        write.counts(call.params, announced, has_room)
        if expert_major:
            write.experts(call.params, experts, shared_array(32, int32))
        else:
            write.tokens(n_local, call.params, experts)
            if call.params[p.told] != u64(0):
                fence_acq_rel_gpu()             # the counts are seen; now their blocks' records of bad ids are, too
        tell_host(call.params)
        return True

    return record
