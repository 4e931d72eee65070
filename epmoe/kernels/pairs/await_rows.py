"""How a warp of combine takes the rows of a token as they arrive, after their signals or without signals.

Without signals, each 32-bit word of a row is its own ready flag (epmoe/kernels/lamport.py). A thread that has taken a
vector restores ABSENT. This is safe because the next round's rows arrive only after this rank has dispatched again. A
rank without rows for a peer must still tell it that its dispatch has ended. So every combine first releases the word
BEGUN into each peer's recv_count at [0, my_rank]. The peer waits for these words last, and resets them. It neither
writes nor reads other words of recv_count. A row whose src_info is invalid is not sent: its receiver's wait expires.

With signals, the last warps of a block poll them for all of its warps, one word for each thread if there are enough
threads, and raise a flag in shared memory for each word that they have acquired. The other warps poll these flags. If
all warps polled recv_count, which has few words, polls would queue up in front of the signals.
"""

from typing import NamedTuple

from epmoe import layout
from epmoe.device import (all_lanes, any_lane, atomic_or_relaxed_gpu_u32, ballot, block_idx, device_fn,
                          fence_acq_rel_cta, globaltimer, grid_dim, i32, lane_id, ld_acquire_sys_u64, load16,
                          load16_relaxed_sys, n_warps, nanosleep, shared_add_i32, store16, store_u64, syncwarp, u32,
                          u64, warp_id, warp_or_u32)
from epmoe.layout import ABSENT, ANNOUNCED, MAX_FINITE

from ..bits import has, lowest
from ..formats.row_copy import no_vectors
from ..lamport import is_absent
from ..params import clear, in_turn, namespace, tuple_of
from ..wait import POLLS_PER_LOOK, gives_up, wait_below
from ..status import COMBINE_WAIT, FOR_RECV_COUNT, FOR_ROWS, MISSING_RANKS, record_expired

AT_ONCE = 8         # rows whose vectors a lane holds


class TokenRows(NamedTuple):
    """The rows of a token. A lane takes one vector of each.

    wanted: a bit for each k that has a row. segment: on lane k, the word of recv_count that signals the row of k.
    vector: which vector of a row the lane takes. place: its address for k = 0. is_own: whether the vector is the lane's
    own; otherwise another lane takes it, too.
    """

    wanted: int
    segment: int
    vector: int
    place: int
    is_own: bool


def loading(cfg, load):
    """Device function (which, first, place, held) -> the vectors of k = first .. first + 7.

    It loads those with a bit in `which` and keeps the others of `held`. load: device function address -> vector.
    """
    top_k, bytes_a_row = cfg.top_k, layout.combine_msg_bytes(cfg)

    def loading_one(j):
        return device_fn(lambda which, first, place, held: load(place + u64(first + j) * u64(bytes_a_row))
                         if j < top_k and has(which, j) else held[j])

    return tuple_of(AT_ONCE, loading_one)


# after_signals, without_signals: namespace "take" of device functions of a warp, which waits for rows.
# eight(call, flags, rows, first) -> (vectors of k = first .. first + 7, whether they came). flags: of `polling`.
# all_signals(flags, rows) -> whether all came: for rows that are not summed, which need signals.

def after_signals(cfg, next_arrived):
    """Namespace "take": loads rows when their signals have arrived. next_arrived: of `polling`."""
    load_those, none_held = loading(cfg, load16), no_vectors(AT_ONCE)

    @device_fn
    def all_signals(flags, rows):
        wanted, came = rows.wanted, u32(0xFFFFFFFF)
        while wanted != u32(0) and came != u32(0):
            came = next_arrived(flags, rows.segment, wanted)
            wanted = u32(wanted & ~came)
        return came != u32(0)

    @device_fn
    def eight(call, flags, rows, first):
        held = none_held()
        wanted, came = u32(rows.wanted & u32(u32((1 << AT_ONCE) - 1) << u32(first))), u32(1)
        while wanted != u32(0) and came != u32(0):
            came = u32(next_arrived(flags, rows.segment, wanted))
            held = load_those(u32(came >> u32(first)), first, rows.place, held)
            wanted = u32(wanted & ~came)
        return held, came != u32(0)

    return namespace("take", eight=eight, all_signals=all_signals)


def without_signals(build):
    """Namespace "take": each lane polls its own vectors."""
    cfg, nap_ns = build.cfg, build.tuning.row_nap_ns
    bytes_a_row, top_k, n_ranks = layout.combine_msg_bytes(cfg), cfg.top_k, cfg.n_src_ranks

    def restoring(j):
        """Device function (late, first, place, held) -> what is still late. If vector j is not, it restores ABSENT."""
        @device_fn
        def restore(late, first, place, held):
            if j < top_k and has(late, j) and not is_absent(held[j]):
                late = u32(late & u32(~(1 << j) & 0xFF))
                store16(place + u64(first + j) * u64(bytes_a_row), u32(ABSENT), u32(ABSENT), u32(ABSENT), u32(ABSENT))
            return late

        return restore

    look_at_late, none_held = loading(cfg, load16_relaxed_sys), no_vectors(AT_ONCE)
    restore_absent = in_turn(AT_ONCE, restoring)

    @device_fn
    def give_up(call, late, segment, first):
        """Records the ranks whose rows are missing."""
        late, k = warp_or_u32(late), i32(lane_id() - first)
        if k >= 0 and k < AT_ONCE and has(late, k):
            missing = u32(u32(1) << u32(u32(segment) % u32(n_ranks)))
            atomic_or_relaxed_gpu_u32(call.status + u64(4 * MISSING_RANKS), missing)
            record_expired(call.status, COMBINE_WAIT, FOR_ROWS, segment, 0, -1)

    @device_fn
    def eight(call, flags, rows, first):
        held, late = none_held(), u32(u32(rows.wanted) >> u32(first) & u32(0xFF))
        polls, since, ok = 0, u64(0), True
        if not rows.is_own:         # the lane whose vector it is may restore ABSENT before this lane sees it
            late = u32(0)
        while ok and late != u32(0):
            held = look_at_late(late, first, rows.place, held)
            late = restore_absent(late, first, rows.place, held)
            polls += 1
            if late != u32(0):
                nanosleep(u32(nap_ns))
                if polls % POLLS_PER_LOOK == 0:
                    if since == u64(0):
                        since = u64(globaltimer())
                    elif gives_up(call.status, since, call.timeout_ns):
                        ok = False
        failed = any_lane(not ok)
        if failed != 0:
            give_up(call, late, rows.segment, first)
        return held, failed == 0

    return namespace("take", eight=eight)


def await_begun(cfg):
    """Device function (call): one warp of the launch waits until all ranks have begun their combine without signals."""
    n_ranks = cfg.n_ranks

    @device_fn
    def await_all(call):
        if block_idx() == grid_dim() - 1 and warp_id() == 0 and lane_id() < n_ranks:
            word = call.recv_count_p + u64(8) * u64(lane_id())
            # acquire: what that rank has read in the dispatch before, which this rank's next one overwrites
            seen = wait_below(word, u64(MAX_FINITE), call, COMBINE_WAIT, FOR_ROWS, i32(-1))
            if seen != u64(MAX_FINITE):
                store_u64(word, u64(MAX_FINITE))
            else:
                atomic_or_relaxed_gpu_u32(call.status + u64(4 * MISSING_RANKS), u32(u32(1) << u32(lane_id())))

    return await_all


def polling(build):
    """Namespace "polls" of device functions for the flags int32 [n_flags] of a block, in shared memory.

    clear(flags): all threads call it; a barrier must follow before any other use of the flags.
    poll(call, flags): called by all threads of a block. The polling warps, the last ones, return when they have seen
        their words or given up, the others at once. The very last warp waits for all polling warps. It alone gets True,
        if all words came; its lane 0 has then acquired them.
    next_arrived(flags, segment, wanted) -> those of the lanes in `wanted`, as bits, whose words have come; called by a
        warp, each lane with a word's index. It waits until some have come, and acquires for the whole warp what peers
        wrote before these signals. It returns 0 if the block's polling warps gave up.
    """
    n_words, tuning = build.cfg.n_local_experts * build.cfg.n_src_ranks, build.tuning
    n_counts = min(tuning.flags, n_words)       # flag i counts the words i, i + n_counts, ... that have come
    gave_up, done = n_counts, n_counts + 1      # two more: lanes that gave up; polling warps that have seen all words
    warps_a_poller, nap_ns = tuning.warps_a_poller, tuning.flag_nap_ns

    @device_fn
    def all_done(flags, n_polling):
        """A warp waits until all polling warps have seen their words -> False if one has given up."""
        goes_on = lane_id() == 0
        if goes_on:
            while goes_on and shared_add_i32(flags, done, i32(0)) != n_polling:
                goes_on = shared_add_i32(flags, gave_up, i32(0)) == 0
            fence_acq_rel_cta()                         # acquire: the words that the others have seen
        return any_lane(goes_on)

    @device_fn
    def poll_words(call, flags, i, n_polling):
        """A lane polls its words, i first, and raises their flags; returns whether all came."""
        since, polls, polling, all_came = u64(globaltimer()), 0, i < n_words, True
        while polling:
            polls += 1
            if ld_acquire_sys_u64(call.recv_count_p + u64(8) * u64(i)) < u64(ANNOUNCED):
                # inside the loop: a lane whose word has arrived must raise its flag without waiting for the others
                fence_acq_rel_cta()                     # release: what this thread acquired, before the flag
                shared_add_i32(flags, i32(i % n_counts), i32(1))
                i = i32(i + n_polling * 32)
                polling = i < n_words
            elif polls % POLLS_PER_LOOK == 0 and gives_up(call.status, since, call.timeout_ns):
                record_expired(call.status, COMBINE_WAIT, FOR_RECV_COUNT, i, 0, -1)
                shared_add_i32(flags, gave_up, i32(1))
                polling = all_came = False
        return all_came

    @device_fn
    def poll(call, flags):
        n_polling = i32(max(1, min((n_words + 31) // 32, n_warps() // warps_a_poller)))
        i = i32((warp_id() - n_warps() + n_polling) * 32 + lane_id())
        if i >= 0:
            if all_lanes(poll_words(call, flags, i, n_polling)):
                syncwarp()                              # what its lanes have acquired, before lane 0 says so
                if lane_id() == 0:
                    fence_acq_rel_cta()                 # release: this warp's words
                    shared_add_i32(flags, done, i32(1))
        return warp_id() == n_warps() - 1 and all_done(flags, n_polling)

    @device_fn
    def is_up(flags, flag):
        """Whether all words of a flag have come."""
        return shared_add_i32(flags, flag, i32(0)) == (n_words - 1 - flag) // n_counts + 1

    @device_fn
    def wait_for(flags, flag):
        """One thread waits for one flag; returns whether it was raised: always, unless a polling warp has given up."""
        polls, up, goes_on = 0, is_up(flags, flag), True
        while goes_on and not up:
            nanosleep(u32(nap_ns))
            polls += 1
            if polls % POLLS_PER_LOOK == 0:
                goes_on = shared_add_i32(flags, gave_up, i32(0)) == 0
            up = is_up(flags, flag)
        return up

    @device_fn
    def next_arrived(flags, segment, wanted):
        flag = i32(segment % n_counts)
        up = has(wanted, lane_id()) and is_up(flags, flag)
        come = u32(ballot(up))
        if come == u32(0):                  # then wait for the first of them; the others are seen at the next look
            if lane_id() == lowest(wanted):
                up = wait_for(flags, flag)
            come = u32(ballot(up))
        if up:
            fence_acq_rel_cta()             # acquire, from the polling warp that raised the flag
        syncwarp()                          # these lanes acquired for all
        return come

    return namespace("polls", clear=device_fn(lambda flags: clear(done + 1, flags)), n_flags=done + 1, poll=poll,
                     next_arrived=next_arrived)
