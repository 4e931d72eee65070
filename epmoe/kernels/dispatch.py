"""Dispatch: every token goes to the owners of its experts, and every rank groups what it received by expert.

The story, in the words of the specification, and who tells which part:

1. **reserved** (senders.py). A warp takes a token. For each slot k, lane k claims place s by a fetch-add on
   `reserved[local_expert, owner]`; the message is written to the owner's recv_buf at [local_expert, my_rank, s].
2. **finished** (senders.py). After the message the lane adds 1 to `finished[local_expert, owner]`, release at device
   scope: whoever acquires that value sees the message.
3. **signal** (signaller.py). Block 0 counts the ids of each expert. When `finished` has reached the count (acquire at
   device scope), it writes the count into the owner's recv_count at [local_expert, my_rank], release at system
   scope. Release is cumulative: the signal covers messages that other blocks wrote.
4. **wait** (offsets.py). The owner's block 0 acquires all its recv_count words at system scope.
5. **offsets** (offsets.py). It turns counts into row_offsets and regions A and B, clears the claims C, and raises the
   ready flag E, release at device scope.
6. **copying** (copiers.py). The other blocks acquire E, claim tiles of rows in C, and decode messages to their rows.
7. **cleaning up** (`leave` below). Each block counts itself in D; the last one leaves reserved, finished, D, E, F and G
   at 0. recv_count was reset in step 5; A stays for combine. No host has to reset anything between rounds.

To ranks of other p2p worlds (use_shmem) the message goes out of send_buf, by a put that is complete before step 2, and
the count by a SHMEM signal: transport.py, crossing.py.

dispatch_async is 1 to 3, dispatch_wait 4 to 7, dispatch_kernel all in one launch. What the boundary between the
launches gave the split kernels for free, and what replaces it in the fused one:
- reserved and finished are cleared when no sender needs them any more: by the last block to leave, in both.
- the copying blocks of the fused kernel may read recv_buf while peers still write other messages to it, but never a
  message that E does not cover; this rank's own later messages go to its peers' memory, not into rows being read.
- rows of a fused shared expert need tokens that other blocks encode: region F counts them (shared_expert.py).
- blocks wait for each other, so all of them must be resident at once: the grid is at most what the device holds.

Order inside one (expert, source rank) segment is the order of the claims: unspecified.
"""

from functools import lru_cache

from epmoe.device import (atomic_add_acq_rel_gpu_i32, block_dim, block_idx, device_fn, grid_dim, i32, kernel, load_u64,
                          store_i32, syncthreads_or, thread_idx, u64)

from . import copiers, counters, formats, offsets, senders, shared_expert, signaller
from .call import DispatchAsyncCall, DispatchCall, DispatchWaitCall
from .launch import LaunchConfig
from .params import ParameterBlock
from .status import has_failed
from .transport import crosses_worlds

CACHED = 128        # compiled kernels that are remembered, for each of the three


def parameter_block(cfg) -> ParameterBlock:
    """The fields of the three dispatch kernels; each uses those that its call fills in."""
    return ParameterBlock(
        ("input_tokens", 1), ("topk_ids", 1), ("clean_topk_ids", 1), ("send_buf_p", 1),
        ("recv_buf_ptrs", cfg.p2p_world_size), ("recv_count_ptrs", cfg.p2p_world_size),
        ("recv_buf_p", 1), ("recv_count_p", 1), ("format_handler", len(formats.of(cfg).output_fields) + 1),
        ("row_offsets", 1), ("expert_ids", 1), ("src_info", 1), ("recv_counts", 1), ("ep_counters", 1), ("status", 1),
        ("input_scale", 1), ("timeout_ns", 1))


def failed_before(block):
    """Device function params -> whether an earlier wait of this rank expired; the same for all threads of the block."""
    p_status = block.offset("status")

    @device_fn
    def failed(params):
        return syncthreads_or(thread_idx() == 0 and has_failed(u64(load_u64(params + u64(p_status)))))

    return failed


def _leave(cfg, block):
    """Device function: the end of every block of dispatch_wait; the last one leaves the counters as they were found."""
    at, p_counters = counters.words(cfg), block.offset("ep_counters")
    n_entries = cfg.n_local_experts * cfg.n_src_ranks

    @device_fn
    def leave(params):
        words = u64(load_u64(params + u64(p_counters)))
        # Other warps of this block may still copy rows, but what is cleared here they have not touched since a barrier.
        is_last = False
        if thread_idx() == 0:
            # release: what this block did with the counters; acquire: what all the others did
            is_last = atomic_add_acq_rel_gpu_i32(words + u64(at.d), i32(1)) == grid_dim() - 1
        if syncthreads_or(is_last):
            i = i32(thread_idx())
            while i < n_entries:
                store_i32(words + u64(at.reserved) + u64(4) * u64(i), i32(0))
                store_i32(words + u64(at.finished) + u64(4) * u64(i), i32(0))
                i = i32(i + block_dim())
            if thread_idx() == 0:
                store_i32(words + u64(at.d), i32(0))
                store_i32(words + u64(at.e), i32(0))
                store_i32(words + u64(at.f), i32(0))
                store_i32(words + u64(at.g), i32(0))

    return leave


@lru_cache(CACHED)
def _compile_async(cfg, threads, input_scale):
    block = parameter_block(cfg)
    failed = failed_before(block)
    signal_counts, send_tokens = signaller.make(cfg, block), senders.make(cfg, block, input_scale)

    @kernel(max_threads=threads, shmem=crosses_worlds(cfg))
    def dispatch_async(params, num_tokens, my_rank):
        if failed(params):
            return
        if block_idx() == 0:
            signal_counts(params, num_tokens, my_rank)
        else:
            send_tokens(params, num_tokens, my_rank)

    return dispatch_async


@lru_cache(CACHED)
def _compile_wait(cfg, threads):
    block = parameter_block(cfg)
    failed, leave, shared = failed_before(block), _leave(cfg, block), shared_expert.make(cfg, block)
    begin_shared, pack_shared = shared.begin, shared.pack
    place_rows, copy_rows = offsets.make(cfg, block, threads), copiers.make(cfg, block)

    @kernel(max_threads=threads)
    def dispatch_wait(params, num_tokens, my_rank):
        if failed(params):
            return
        if block_idx() == 0:
            begin_shared(params)
            if place_rows(params, num_tokens, my_rank):
                return
        else:
            if pack_shared(params, num_tokens, my_rank):
                return
            if copy_rows(params, num_tokens, my_rank):
                return
        leave(params)

    return dispatch_wait


@lru_cache(CACHED)
def _compile_fused(cfg, threads, input_scale):
    block = parameter_block(cfg)
    failed, leave, shared = failed_before(block), _leave(cfg, block), shared_expert.make(cfg, block)
    begin_shared, pack_shared = shared.begin, shared.pack
    signal_counts, send_tokens = signaller.make(cfg, block), senders.make(cfg, block, input_scale)
    place_rows, copy_rows = offsets.make(cfg, block, threads), copiers.make(cfg, block)

    @kernel(max_threads=threads, shmem=crosses_worlds(cfg))
    def dispatch(params, num_tokens, my_rank):
        if failed(params):
            return
        if block_idx() == 0:
            begin_shared(params)
            if signal_counts(params, num_tokens, my_rank):
                return
            if place_rows(params, num_tokens, my_rank):
                return
        else:
            send_tokens(params, num_tokens, my_rank)
            if pack_shared(params, num_tokens, my_rank):
                return
            if copy_rows(params, num_tokens, my_rank):
                return
        leave(params)

    return dispatch


def dispatch_async_kernel(cfg, launch=None, *, input_scale=None) -> DispatchAsyncCall:
    """Steps 1 to 3: returns when this rank's messages and signals are on their way.

    input_scale: a function i -> float32 read at 0, or None for the number given at the call.
    """
    launch = launch or LaunchConfig()
    return DispatchAsyncCall(cfg, launch, parameter_block(cfg),
                             lambda weights, epilogue: _compile_async(cfg, launch.threads, input_scale))


def dispatch_wait_kernel(cfg, launch=None) -> DispatchWaitCall:
    """Steps 4 to 7: returns when all messages of the round lie in their rows."""
    launch = launch or LaunchConfig()
    return DispatchWaitCall(cfg, launch, parameter_block(cfg),
                            lambda weights, epilogue: _compile_wait(cfg, launch.threads))


def dispatch_kernel(cfg, launch=None, *, input_scale=None) -> DispatchCall:
    """All steps in one launch. input_scale: as in dispatch_async_kernel."""
    launch = launch or LaunchConfig()
    return DispatchCall(cfg, launch, parameter_block(cfg),
                        lambda weights, epilogue: _compile_fused(cfg, launch.threads, input_scale))
