"""A few warps of each block poll combine's signals for all of its warps, which see each signal as it arrives.

recv_count has few words, and every block needs all of them. If all warps polled them, polls would queue up in front of
the signals. So the last warps of a block poll, one word for each thread if there are enough threads, and raise a flag
in shared memory for each word that they have acquired. The other warps poll these flags.
"""

from epmoe.device import (all_lanes, any_lane, ballot, block_dim, device_fn, fence_acq_rel_cta, ffs, globaltimer, i32,
                          lane_id, ld_acquire_sys_u64, n_warps, nanosleep, shared_add_i32, syncwarp, thread_idx, u32,
                          u64, warp_id)
from epmoe.layout import ANNOUNCED

from ..params import namespace
from ..spin import POLLS_PER_LOOK, gives_up
from ..status import COMBINE_WAIT, FOR_RECV_COUNT, record_expired


def make(build):
    """Namespace "polls" of device functions for the flags int32 [n_flags] of a block, in shared memory.

    clear(flags): by all threads, a barrier before anything else.
    poll(call, flags): by all threads of a block; the polling warps return when they have seen their words, or given up,
        the others at once. The last warp waits for all of them; to it alone it gives True, if all words came: lane 0 has
        acquired them then.
    next_come(flags, segment, wanted): by a warp, each lane with a word's index; `wanted` has a bit for each lane that
        wants to know. Waits until some of these words have come and gives their bits, what peers wrote before these
        signals acquired for the whole warp; 0 if the block's polling warps gave up.
    """
    n_words, tuning = build.cfg.n_local_experts * build.cfg.n_src_ranks, build.tuning
    gave_up = min(tuning.flags, n_words)        # the last flag but one says that a polling warp gave up
    n_through = gave_up + 1                     # the last counts the polling warps that have seen their words
    warps_a_poller, nap_ns = tuning.warps_a_poller, tuning.flag_nap_ns

    @device_fn
    def clear(flags):
        i = i32(thread_idx())
        while i <= n_through:
            flags[i] = 0
            i = i32(i + block_dim())

    @device_fn
    def all_through(flags, n_polling):
        """By a warp: waits until all polling warps have seen their words; False if one has given up."""
        goes_on = False
        if lane_id() == 0:
            goes_on = True
            while goes_on and shared_add_i32(flags, n_through, i32(0)) != n_polling:
                goes_on = shared_add_i32(flags, gave_up, i32(0)) == 0
            fence_acq_rel_cta()                         # acquire: the words that the others have seen
        return any_lane(goes_on)

    @device_fn
    def poll_words(call, flags, i, n_polling):
        """A lane polls word i and every so many later ones; returns whether all came."""
        since, polls, polling, through = u64(globaltimer()), 0, i < n_words, True
        while polling:
            polls += 1
            if ld_acquire_sys_u64(call.recv_count_p + u64(8) * u64(i)) < u64(ANNOUNCED):
                # inside the loop: a lane whose word has arrived must raise its flag without waiting for the others
                fence_acq_rel_cta()                     # release: what this thread acquired, before the flag
                shared_add_i32(flags, i32(i % gave_up), i32(1))
                i = i32(i + n_polling * 32)
                polling = i < n_words
            elif polls % POLLS_PER_LOOK == 0 and gives_up(call.status, since, call.timeout_ns):
                record_expired(call.status, COMBINE_WAIT, FOR_RECV_COUNT, i, 0, -1)
                shared_add_i32(flags, gave_up, i32(1))
                polling = through = False
        return through

    @device_fn
    def poll(call, flags):
        n_polling = i32(max(1, min((n_words + 31) // 32, n_warps() // warps_a_poller)))
        i = i32((warp_id() - n_warps() + n_polling) * 32 + lane_id())
        if i >= 0:
            if all_lanes(poll_words(call, flags, i, n_polling)):
                syncwarp()                              # what its lanes have acquired, before lane 0 says so
                if lane_id() == 0:
                    fence_acq_rel_cta()                 # release: this warp's words
                    shared_add_i32(flags, n_through, i32(1))
        return warp_id() == n_warps() - 1 and all_through(flags, n_polling)

    @device_fn
    def is_up(flags, flag):
        return shared_add_i32(flags, flag, i32(0)) == (n_words - 1 - flag) // gave_up + 1

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
    def next_come(flags, segment, wanted):
        flag, up = i32(segment % gave_up), False
        if ((u32(wanted) >> u32(lane_id())) & u32(1)) != u32(0):
            up = is_up(flags, flag)
        come = u32(ballot(up))
        if come == u32(0):                  # then wait for the first of them; the others are seen at the next look
            if lane_id() == ffs(wanted) - 1:
                up = wait_for(flags, flag)
            come = u32(ballot(up))
        if up:
            fence_acq_rel_cta()             # acquire, from the polling warp that raised the flag
        syncwarp()                          # these lanes acquired for all
        return come

    return namespace("polls", n_flags=n_through + 1, clear=clear, poll=poll, next_come=next_come)
