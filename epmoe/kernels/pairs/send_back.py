"""The sending part of combine: sends rows of expert outputs to the places [token, k] of their tokens' ranks.

Steps 1 and 2 of combine.py. Each block takes a run of consecutive rows, whatever segments they belong to. So blocks
have equal shares. If there are more warps than rows, a row has several parts. No warp waits for the arrival of a part
before it sends the next. Without signals (lamport.py) step 2 is left out: each word of a row is its own ready flag.
"""

from typing import NamedTuple

from epmoe import layout
from epmoe.device import (atomic_add_acq_rel_gpu_i32, block_dim, block_idx, device_fn, fence_acq_rel_cta,
                          grid_dim, i32, int32, lane_id, load16_stream, load_i32, load_u64, n_warps, prefetch,
                          shared_add_i32, shared_array, store_i32, syncthreads, syncthreads_or, syncwarp, thread_idx,
                          u32, u64, warp_id)
from epmoe_ref.config import READY

from .. import lamport, stamps
from ..bits import divided, divided_up, parts_of_each, split
from ..formats.row_copy import copy_in_halves, copy_part, most_parts, store_vector
from ..params import LANES, VECTOR, namespace
from ..plain import counters
from ..prefetch import SECTOR, fetch_sectors, n_sectors
from . import peers, signal
from .offsets import segment_of_row

HELD = 7            # vectors that a lane holds at a time
ROWS_AHEAD = 32     # rows to prefetch before their number is known
REGION_A = "a_end", "a_count"       # its words of a segment, which combine resets


class Segments(NamedTuple):
    """n segments of region A from `first` on, in shared memory; done: parts that the block has sent of each."""

    first: int
    n: int
    ends: object
    counts: object
    done: object


def make(build):
    """Device function send_back(call, failed) -> whether it had to give up; called by all blocks.

    It signals every segment in every round, even one without rows. Without signals, one block sends BEGUN to all ranks,
    and the last block that has read region A resets it. failed: from failed_before. It has a barrier before it sends.
    """
    cfg, n_ranks, signals, mark = build.cfg, build.cfg.n_ranks, build.signals, stamps.make(build.trace)
    word, to, n_segments = counters.words(cfg), peers.make(cfg), cfg.n_local_experts * cfg.n_src_ranks
    window = min(build.tuning.returned_segments, n_segments) if signals else n_segments     # at most LAMPORT_EXPERTS
    parts = _parts(cfg, store_vector if signals else device_fn(lambda at, q: lamport.store_row(at, *q)))
    send_run, leave = _runs(build, parts), signal.resetting(cfg, REGION_A, recv_count=False)
    bytes_a_row = layout.combine_msg_bytes(cfg)
    sectors_a_row = n_sectors(bytes_a_row)

    @device_fn
    def prefetch_first(call):
        """Prefetches src_info, and the first few of the n_rows rows that there is memory for."""
        i = i32(block_idx() * block_dim() + thread_idx())
        if u64(i) < (call.n_rows * u64(8) + u64(SECTOR - 1)) // u64(SECTOR):
            prefetch(call.src_info + u64(SECTOR) * u64(i))
        if block_idx() < ROWS_AHEAD and u64(block_idx()) < call.n_rows:
            fetch_sectors(sectors_a_row, call.input_tokens + u64(bytes_a_row) * u64(block_idx()))

    @device_fn
    def signal_first(call, segments):
        """The last block signals empty segments. Without signals, it sends BEGUN, and every block leaves."""
        i = i32(thread_idx())
        if not signals:
            if block_idx() == grid_dim() - 1 and i < n_ranks:
                # release: what this rank has read in the dispatch before, which its peers' next one overwrites
                to.signal(call, i, call.my_rank, i32(lamport.BEGUN))
            leave(call)
        elif block_idx() == grid_dim() - 1:
            while i < segments.n:
                if segments.counts[i] == 0:
                    parts.signal(call, i32(segments.first + i), i32(0))
                i = i32(i + block_dim())

    @device_fn
    def send_back(call, failed):
        prefetch_first(call)
        ends, counts, first = shared_array(window, int32), shared_array(window, int32), i32(0)
        done = shared_array(window, int32) if signals else counts
        while first < n_segments:
            n, i = i32(min(window, n_segments - first)), i32(thread_idx())
            while i < n:
                ends[i] = i32(load_i32(word.a_end(call.ep_counters, i32(first + i))) - READY)
                counts[i] = i32(load_i32(word.a_count(call.ep_counters, i32(first + i))))
                if signals:
                    done[i] = 0
                i = i32(i + block_dim())
            if syncthreads_or(failed):          # the window is there
                return True
            mark(call, stamps.COUNTED)
            segments = Segments(first, n, ends, counts, done)
            signal_first(call, segments)
            send_run(call, segments)
            first = i32(first + window)
            if first < n_segments:
                syncthreads()               # all have read the old window
        mark(call, stamps.SENT)
        return False

    return send_back


def _runs(build, parts):
    """Device function send_run(call, segments), by all blocks: sends the window's rows and signals their segments."""
    word, of_11, signals = counters.words(build.cfg), build.tuning.senders_of_11, build.signals
    bytes_a_row = layout.combine_msg_bytes(build.cfg)
    n_vectors, most = bytes_a_row // VECTOR, most_parts(bytes_a_row)

    @device_fn
    def finish(call, segments, i, count, n_here, n_parts):
        """One thread, after its warp sent one of the parts of n_here rows of segment i. The last to do so signals."""
        segment = i32(segments.first + i)
        fence_acq_rel_cta()                             # release: the part that this warp has written
        if shared_add_i32(segments.done, i, i32(1)) == n_here * n_parts - 1:
            fence_acq_rel_cta()                         # acquire: all the others of this block
            is_last = n_here == count
            if not is_last:
                finished = word.finished(call.ep_counters, segment)
                # release: this block's rows; acquire: those of all the others, if this is the last block
                if atomic_add_acq_rel_gpu_i32(finished, n_here) == count - n_here:
                    store_i32(finished, i32(0))
                    is_last = True
            if is_last:
                parts.signal(call, segment, count)

    @device_fn
    def run_of(segments):
        """(low, n, n_parts, vectors): this block has n rows from `low` on, each in n_parts parts of so many vectors.

        If the warps can send all rows at once, only tuning.senders_of_11 of 11 blocks share them.
        """
        start, last = i32(segments.ends[0] - segments.counts[0]), i32(segments.n - 1)
        n, blocks = i32(segments.ends[last] - segments.ends[0] + segments.counts[0]), grid_dim()
        if n > blocks and n <= blocks * n_warps():
            blocks = i32(max(i32(1), divided(i32(blocks * of_11), i32(11))))
        each, more = split(n, blocks)
        n_rows = i32((each + i32(block_idx() < more)) * i32(block_idx() < blocks))
        n_parts = parts_of_each(n_rows, n_warps(), i32(most))
        low = i32(start + block_idx() * each + min(block_idx(), more))
        return low, n_rows, n_parts, i32(divided_up(i32(most), n_parts) * LANES)

    @device_fn
    def send_run(call, segments):
        (low, n, n_parts, vectors), unit = run_of(segments), i32(warp_id())
        while unit < n * n_parts:
            n_before, part = split(unit, n_parts)
            row, first = i32(low + n_before), i32(part * vectors)
            end = i32(min(first + vectors, n_vectors))
            asked = parts.ask(call, row, first, end)       # while the warp finds the row's segment
            i = segment_of_row(segments.ends, segments.n, row)
            last_row, count = i32(segments.ends[i]), i32(segments.counts[i])
            if row >= last_row - count:             # else it is a padding row between two experts
                parts.send(call, (row, first, end), asked, i32(segments.first + i), i32(row - last_row + count))
                if signals:
                    syncwarp()                      # the part by all lanes, before lane 0 releases it
                    if lane_id() == 0:
                        n_here = i32(min(last_row, i32(low + n)) - max(i32(last_row - count), low))
                        finish(call, segments, i, count, n_here, n_parts)
            unit = i32(unit + n_warps())

    return send_run


def _parts(cfg, store):
    """Namespace "parts" of device functions of a warp. segment: index in region A. store(place, vector): a store.

    ask(call, row, first, end) -> (src_info, vectors from `first` on); does not wait for the loads.
    send(call, (row, first, end), asked, segment, at_row): writes vectors [first, end) of a row to their place. asked:
        from `ask`. at_row: the row's number in the segment.
    signal(call, segment, count): one thread writes the segment's count into recv_count of the rank that its rows go to,
        after everything that it has written or acquired.
    """
    to, bytes_a_row, top_k = peers.make(cfg), layout.combine_msg_bytes(cfg), cfg.top_k
    # load16_stream stays where it is; the compiler would move loads of the read-only path behind the use of src_info
    stage = copy_part(bytes_a_row, read_only=True)
    load_held, deliver = copy_in_halves(HELD, load16_stream, store, short=True)
    ranks, tokens_per_rank, skip_a2a = cfg.n_src_ranks, cfg.max_tokens_per_rank, cfg.skip_a2a

    @device_fn
    def ask(call, row, first, end):
        src_info = u64(load_u64(call.src_info + u64(8) * u64(row)))
        return src_info, load_held(call.input_tokens + u64(row) * u64(bytes_a_row), first, end)

    @device_fn
    def rank_of(call, segment):
        return i32(call.my_rank) if skip_a2a else i32(u32(segment) % u32(ranks))

    @device_fn
    def send(call, part, asked, segment, at_row):
        (row, first, end), (src_info, held), rank = part, asked, rank_of(call, segment)
        token, k, recv_buf = i32(u32(src_info)), i32(u32(src_info >> u64(32))), to.recv_buf(call, rank)
        src = call.input_tokens + u64(row) * u64(bytes_a_row)
        # a wrong pair must not write to a peer's other memory
        if token >= 0 and token < tokens_per_rank and k >= 0 and k < top_k:
            place = recv_buf + u64(token * top_k + k) * u64(bytes_a_row)
            if not to.is_far(call, rank):
                deliver(place, src, first, end, held)
            elif first == 0:    # the whole row, out of send_buf, where the segment has a row for each token
                staged = call.send_buf_p + u64(segment * tokens_per_rank + at_row) * u64(bytes_a_row)
                stage(staged, src, 0, 1, lane_id())
                syncwarp()      # the row by all lanes, before the network reads it
                to.put(place, staged, bytes_a_row, rank_of(call, segment))

    @device_fn
    def signal(call, segment, count):
        index = i32(segment - i32(u32(segment) % u32(ranks)))
        if not skip_a2a:
            index = i32(index + call.my_rank)
        to.signal(call, rank_of(call, segment), index, count)

    return namespace("parts", ask=ask, send=send, signal=signal)
