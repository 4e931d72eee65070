"""Copies rows in parts: a warp reads 16 bytes a lane and stores them at each place. Flags tell which parts have come.

Flags are at the beginning of a rank's pool: MOST_PARTS u32 for each row. The flag of a part holds the number of the
last call in which the part was written. A warp that has written one or more parts of a row raises their flags at the
receiver, so a reader need not wait for later rows. Epochs only grow, so flags are never lowered.
"""

from functools import cache, lru_cache

from epmoe.device import (block_dim, block_idx, device_fn, grid_dim, i32, kernel, load16, load16_nc, load_u32, shfl_idx,
                          st_release_sys_u32, store16, store_u32, syncwarp, thread_idx, u32, u64, warp_broadcast_u64,
                          warp_max_i32)

from ..bits import adding_four, but_lowest, divided_up, four, has, lowest, parts_of_each, share, split
from ..params import VECTOR, chosen, word_in
from . import mailbox, wait
from .shape import BLOCK, MAX_PLACES, memory_of, namespace

BATCH = 128         # vectors: four loads by each of 32 lanes
FLAG_BYTES = 4


@device_fn
def rotated(mask, start):
    """The mask with bit `start` moved to bit 0. Each rank begins with another peer, so they do not all meet at one."""
    return u32((mask >> u32(start)) | u32(mask << u32((32 - start) & 31)))


@cache
def copying(*, read_only, store=store16):
    """Namespace of device functions, called by a warp.

    copy(src, place, mask, start, first, end, lane): copies vectors [first, end) of the row at src to the place (address
    of a row) of each lane in `mask`, beginning with lane `start`. It reads the row once. load(src, base, end, lane) and
    store(batch, place, mask, start, base, end, lane) are its two halves, for [base, base + BATCH) below `end`.
    read_only: the row is not written while the kernel runs, so the non-coherent path may be used. store: the device
    function that stores 16 bytes.
    """
    load_vector = load16_nc if read_only else load16
    load_four = four(device_fn(lambda given, i: load_vector(given[0] + u64(VECTOR) * u64(min(i, given[1])))))

    @device_fn
    def store_vector(n, to, i, q):
        """Vector i of the lane's n vectors of a batch."""
        if n > i:
            store(to + u64(32 * VECTOR) * u64(i), q[0], q[1], q[2], q[3])
        return n

    store_vectors = adding_four(store_vector)

    @device_fn
    def load(src, base, end, lane):
        # lanes past the end read the last vector again and store nothing, so all lanes take part in the broadcasts
        return load_four((src, i32(end - 1)), i32(base + lane), 32)

    @device_fn
    def store_batch(batch, place, mask, start, base, end, lane):
        n, at = i32((end - base - lane + 31) >> 5), u64(VECTOR) * u64(base + lane)
        left = rotated(mask, start)
        while left != u32(0):
            to = u64(warp_broadcast_u64(place, i32((lowest(left) + start) & 31))) + at
            store_vectors(n, to, 0, 1, batch)
            left = but_lowest(left)

    @device_fn
    def copy(src, place, mask, start, first, end, lane):
        base = i32(first)
        while base < end:
            store_batch(load(src, base, end, lane), place, mask, start, base, end, lane)
            base = i32(base + BATCH)

    return namespace("rows", load=load, store=store_batch, copy=copy)


def fewest_parts(shape):
    """The fewest parts into which warps divide a row to send, if it has that many batches."""
    return min(shape.tuning.send_parts, max(1, -(-shape.n_vectors // BATCH)))


@cache
def parts(n_vectors):
    """Namespace of device functions that divide rows into parts. A part of a row is the unit that has a flag.

    count(n_rows, warps) -> number of parts of a row. span(part, n_parts) -> the part's vectors [first, end).
    """
    most, batches = max(1, -(-n_vectors // 32)), -(-n_vectors // BATCH)

    count = device_fn(lambda n_rows, warps: parts_of_each(n_rows, max(warps, 0), most))

    @device_fn
    def span(part, n_parts):
        runs, a_run = (i32(batches), i32(BATCH // 32)) if n_parts <= batches else (i32(most), i32(1))   # whole batches
        return share(i32(0), i32(n_vectors), i32(divided_up(runs, n_parts) * a_run * 32), part)

    return namespace("parts", count=count, span=span)


def flag_bytes_for(n_rows):
    """Size of the flags of n rows in bytes."""
    return mailbox.MOST_PARTS * FLAG_BYTES * n_rows


def flags(shape, phase):
    """Namespace of device functions that use the flags of rows.

    n_parts(announced) -> parts of a row, the same on all ranks; long rows have a few (`fewest`), so that parts
    alternate even if all warps have many rows. raise_parts(call, mask, row, part, n_parts, lane): a warp has written up
    to at_once parts, from `part` on, at the ranks of `mask`; in lane r, row is the row at rank r. raise_at(call,
    rank, row, part, end, lane): it has written the parts [part, end) of a row at one rank. wait_for(call, row, part,
    src_rank) -> whether all came: each lane waits for the part of its own row that src_rank writes here, if row >= 0.
    """
    most, tuning = min(mailbox.MOST_PARTS, max(1, -(-shape.src_bytes // (VECTOR * BATCH)))), shape.tuning
    fewest = min(shape.sending.parts if phase == wait.ROWS_DISPATCH else tuning.return_parts, most)
    ranks, at_once, units, what = shape.n_ranks, shape.sending.at_once, tuning.useful_parts, (phase, wait.FOR_ARRIVAL)
    mail, memory = mailbox.reading(ranks), memory_of(ranks)

    flag_at = device_fn(lambda params, rank, row, part:
                        word_in(memory.pool(params, rank), row, mailbox.MOST_PARTS, part))

    @device_fn
    def n_parts(announced):
        rows = warp_max_i32(mail.arriving(announced))
        return i32(max(fewest, min(most, i32(u32(units) // u32(max(rows, 1))))))

    @device_fn
    def raise_parts(call, mask, row, part, n_parts, lane):
        i, n_flags = i32(lane), i32(ranks * at_once)
        syncwarp()                              # all lanes' stores of the parts, before lanes release them
        while i - lane < n_flags:
            rank, further = split(i, at_once)
            its_row, its_part = i32(shfl_idx(row, rank)), i32(part + further)
            if i < n_flags and has(mask, rank) and its_part < n_parts:
                st_release_sys_u32(flag_at(call.params, rank, its_row, its_part), u32(call.epoch))
            i = i32(i + 32)

    @device_fn
    def raise_at(call, rank, row, part, end, lane):
        syncwarp()                              # all lanes' stores of the parts, before lanes release them
        if part + lane < end:
            st_release_sys_u32(flag_at(call.params, rank, row, i32(part + lane)), u32(call.epoch))

    @device_fn
    def wait_for(call, row, part, src_rank):
        ok = True
        if row >= 0:
            at = flag_at(call.params, call.my_rank, row, part)
            ok, _ = wait.for_flag(call.params, at, call.epoch, what, src_rank)
        return wait.in_warp(ok)

    return namespace("flags", n_parts=n_parts, raise_parts=raise_parts, raise_at=raise_at, wait_for=wait_for)


@lru_cache
def move_kernel(threads):
    """Makes a kernel that copies word_counts[i] 32-bit words from sources[i] to targets[i], 16-byte aligned. Local.

    It moves rows that peers wrote into the pool because no result memory was free.
    """
    source_of, target_of, words_of = (chosen(BLOCK, n) for n in ("sources", "targets", "word_counts"))

    @kernel(max_threads=threads, words=BLOCK.n_words)
    def rows_move(params, num_tokens, my_rank):
        array = i32(0)
        while array < MAX_PLACES:
            src, to, words = source_of(params, array), target_of(params, array), words_of(params, array)
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
