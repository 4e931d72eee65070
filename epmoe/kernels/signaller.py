"""The signalling block of dispatch_async: for every expert the number of messages, once all of them are written."""

from epmoe.device import (block_dim, device_fn, i32, lane_id, load_i32, load_u64, n_warps, shared_add_i32,
                          shared_array, syncthreads, syncthreads_or, thread_idx, u64, warp_id)
from epmoe.device import int32

from . import counters, ids, transport
from .spin import wait_for_own_blocks
from .status import DISPATCH_ASYNC, FOR_FINISHED

WINDOW = 4096       # experts that are counted at a time, in shared memory


def make(cfg, block):
    """Device function signal_counts(params, num_tokens, my_rank) -> whether the block had to give up.

    Every expert is signalled in every round, also where the count is 0; under skip_a2a the own experts only.
    """
    at, signal, clean_id = counters.words(cfg), transport.make(cfg, block).signal, ids.make(cfg).clean
    top_k, local, ranks, keeps_own = cfg.top_k, cfg.n_local_experts, cfg.n_src_ranks, cfg.skip_a2a
    n_signalled = local if keeps_own else cfg.n_experts
    window = min(WINDOW, n_signalled)
    tokens_a_warp = 32 // top_k
    ids_a_warp = tokens_a_warp * top_k
    p_topk, p_counters = block.offset("topk_ids"), block.offset("ep_counters")
    p_status, p_timeout = block.offset("status"), block.offset("timeout_ns")

    @device_fn
    def count_ids(params, num_tokens, first, wanted):
        """Adds up the cleaned ids of [first, first + window); a warp takes as many tokens at a time as have room."""
        topk_ids = u64(load_u64(params + u64(p_topk)))
        lane = lane_id()
        n_ids = i32(num_tokens * top_k)
        at_id = i32(warp_id() * ids_a_warp)
        while at_id < n_ids:
            value = i32(-1)
            if lane < ids_a_warp and at_id + lane < n_ids:
                value = i32(load_i32(topk_ids + u64(4) * u64(at_id + lane)))
            expert = clean_id(value, i32(lane // top_k), lane)
            if expert >= first and expert < first + window:
                shared_add_i32(wanted, i32(expert - first), i32(1))
            at_id = i32(at_id + n_warps() * ids_a_warp)

    @device_fn
    def signal_counts(params, num_tokens, my_rank):
        wanted = shared_array(window, int32)
        words, status = u64(load_u64(params + u64(p_counters))), u64(load_u64(params + u64(p_status)))
        timeout_ns = u64(load_u64(params + u64(p_timeout)))
        first, source = i32(0), i32(my_rank)
        if keeps_own:
            first, source = i32(my_rank * local), i32(0)
        end = i32(first + n_signalled)
        ok = True
        while first < end:
            i = i32(thread_idx())
            while i < window:
                wanted[i] = 0
                i = i32(i + block_dim())
            syncthreads()                       # zeros before counts
            count_ids(params, num_tokens, first, wanted)
            syncthreads()                       # counts before signals
            i = i32(thread_idx())
            while ok and i < window and first + i < end:
                count, owner, local_expert = wanted[i], i32((first + i) // local), i32((first + i) % local)
                entry = i32(local_expert * ranks + owner)
                if keeps_own:
                    entry = local_expert
                # acquires what every sender of these messages released; `signal` passes it on at system scope
                ok = wait_for_own_blocks(words + u64(at.finished) + u64(4) * u64(entry), count, status, timeout_ns,
                                         DISPATCH_ASYNC, FOR_FINISHED, entry)
                if ok:
                    signal(params, owner, my_rank, i32(local_expert * ranks + source), count)
                i = i32(i + block_dim())
            first = i32(first + window)
            if syncthreads_or(not ok):          # one decision for all threads of the block
                return True
        return False

    return signal_counts
