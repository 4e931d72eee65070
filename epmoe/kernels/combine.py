"""Combine: every expert output goes back to the rank and token it came from, and every rank sums up its tokens.

The story, in the words of the specification, and who tells which part:

1. **way back** (returners.py). Region A, which dispatch left behind, says for each (local expert, source rank) where
   its rows end and how many they are. A warp takes a row, reads `src_info[row] = (token, k)`, and writes the row to
   place [token, k] of the source rank's recv_buf. The place says all, so the message is the row and nothing else.
2. **finished** (returners.py). After the row it adds 1 to `finished[local_expert, source rank]`, release at device
   scope; dispatch no longer needs that region.
3. **signal** (returners.py). Block 0 acquires `finished` until it equals the count, then writes the count into the
   source rank's recv_count at [local_expert, my_rank], release at system scope: the signal covers rows of all blocks.
4. **wait** (`await_signals` below). The source rank's block 0 acquires all its recv_count words at system scope.
5. **flags**. It raises one ready flag for each reducing block, release at device scope; the launch keeps the grid
   within the 2n flags.
6. **reducing** (reducers.py). A block acquires its flag, lowers it, and reduces tokens: sum over k ascending of
   fma(w, x, sum) from +0.0, one rounding to the output type, then the shared expert, then the epilogue.
7. **cleaning up**. Block 0 resets recv_count, finished and region A: the next round finds the memory as this one did.

To ranks of other p2p worlds (use_shmem) the row goes out of send_buf, by a put that is complete before step 2, and the
count by a SHMEM signal: transport.py.

combine_async is 1 to 3, combine_wait 4 to 7, combine_kernel all in one launch. What the boundary between the launches
gave the split kernels for free: region A may be zeroed only when every block has read it. A full `finished` does not
say so, because a block without rows may be late; so in the fused kernel each block counts itself in D once it has read
A, and block 0 acquires that count first.
"""

from functools import lru_cache

from epmoe.device import (block_dim, block_idx, device_fn, grid_dim, i32, kernel, load_u64, st_release_gpu_i32,
                          store_i32, store_u64, syncthreads_or, thread_idx, u64)
from epmoe.layout import MAX_FINITE, EPLocalSyncCounters
from epmoe_ref.config import READY
from epmoe_ref.errors import EPValueError

from . import counters, reducers, returners
from .call import CombineAsyncCall, CombineCall, CombineWaitCall
from .dispatch import failed_before
from .launch import LaunchConfig
from .params import ParameterBlock
from .spin import wait_for_own_blocks, wait_for_signal
from .status import COMBINE_WAIT, FOR_READERS
from .transport import crosses_worlds

CACHED = 128        # compiled kernels that are remembered, for each of the three


def parameter_block(cfg) -> ParameterBlock:
    """The fields of the three combine kernels; the arguments of user functions follow them."""
    return ParameterBlock(
        ("input_tokens", 1), ("src_info", 1), ("output_tokens", 1), ("send_buf_p", 1),
        ("recv_buf_ptrs", cfg.p2p_world_size), ("recv_count_ptrs", cfg.p2p_world_size),
        ("recv_buf_p", 1), ("recv_count_p", 1), ("ep_counters", 1), ("topk_ids", 1), ("router_weights", 1),
        ("status", 1), ("timeout_ns", 1))


def _await_signals(cfg, block, fused):
    """Device function params -> whether it had to give up: steps 4, 5 and 7, by the waiting block."""
    at = counters.words(cfg)
    n_entries = cfg.n_local_experts * cfg.n_src_ranks
    p_count, p_counters = block.offset("recv_count_p"), block.offset("ep_counters")
    p_status, p_timeout = block.offset("status"), block.offset("timeout_ns")

    @device_fn
    def await_signals(params):
        words, status = u64(load_u64(params + u64(p_counters))), u64(load_u64(params + u64(p_status)))
        recv_count, timeout_ns = u64(load_u64(params + u64(p_count))), u64(load_u64(params + u64(p_timeout)))
        ok, i = True, i32(thread_idx())
        while ok and i < n_entries:
            ok = wait_for_signal(recv_count + u64(8) * u64(i), status, timeout_ns, COMBINE_WAIT, i) != u64(MAX_FINITE)
            i = i32(i + block_dim())
        if syncthreads_or(not ok):              # every word has been acquired by some thread, before any flag
            return True
        i = i32(thread_idx())
        while i < grid_dim() - 1:
            flag = words + u64(at.combine_ready) + u64(4) * u64(i)
            st_release_gpu_i32(flag, i32(READY))                        # acquired by block i + 1
            i = i32(i + block_dim())
        if fused:
            if thread_idx() == 0:
                ok = wait_for_own_blocks(words + u64(at.d), i32(grid_dim() - 1), status, timeout_ns, COMBINE_WAIT,
                                         FOR_READERS, 0)
                store_i32(words + u64(at.d), i32(0))
            if syncthreads_or(not ok):          # all blocks have read A, before any thread zeroes it
                return True
        # A peer signals these words again only after this rank's next dispatch has reached it.
        i = i32(thread_idx())
        while i < n_entries:
            store_u64(recv_count + u64(8) * u64(i), u64(MAX_FINITE))
            store_i32(words + u64(at.finished) + u64(4) * u64(i), i32(0))
            store_i32(words + u64(at.a) + u64(8) * u64(i), i32(0))
            store_i32(words + u64(at.a) + u64(8) * u64(i) + u64(4), i32(0))
            i = i32(i + block_dim())
        return False

    return await_signals


@lru_cache(CACHED)
def _compile_async(cfg, threads):
    block = parameter_block(cfg)
    failed = failed_before(block)
    signal_counts = returners.make_signal_counts(cfg, block)
    return_rows = returners.make_return_rows(cfg, block, fused=False)

    @kernel(max_threads=threads, shmem=crosses_worlds(cfg))
    def combine_async(params, num_tokens, my_rank):
        if failed(params):
            return
        if block_idx() == 0:
            signal_counts(params, my_rank)
        else:
            return_rows(params, my_rank)

    return combine_async


@lru_cache(CACHED)
def _compile_wait(cfg, threads, router_weights, weights_types, epilogue, epilogue_types):
    block = parameter_block(cfg)
    failed, await_signals = failed_before(block), _await_signals(cfg, block, fused=False)
    reduce = reducers.make(cfg, block, router_weights, weights_types, epilogue, epilogue_types)

    @kernel(max_threads=threads)
    def combine_wait(params, num_tokens, my_rank):
        if failed(params):
            return
        if block_idx() == 0:
            await_signals(params)
        else:
            reduce(params, num_tokens, my_rank)

    return combine_wait


@lru_cache(CACHED)
def _compile_fused(cfg, threads, router_weights, weights_types, epilogue, epilogue_types):
    block = parameter_block(cfg)
    failed, await_signals = failed_before(block), _await_signals(cfg, block, fused=True)
    signal_counts = returners.make_signal_counts(cfg, block)
    return_rows = returners.make_return_rows(cfg, block, fused=True)
    reduce = reducers.make(cfg, block, router_weights, weights_types, epilogue, epilogue_types)

    @kernel(max_threads=threads, shmem=crosses_worlds(cfg))
    def combine(params, num_tokens, my_rank):
        if failed(params):
            return
        if block_idx() == 0:
            if signal_counts(params, my_rank):
                return
            await_signals(params)
        else:
            return_rows(params, my_rank)
            reduce(params, num_tokens, my_rank)

    return combine


def _check_options(cfg, router_weights, epilogue):
    if not (router_weights is None or router_weights == "array" or callable(router_weights)):
        raise EPValueError(f"router_weights={router_weights!r} must be an array, a function (token, k, *args) or None")
    if epilogue is not None and router_weights is None:
        raise EPValueError("an epilogue needs router_weights: without them the rows are not reduced, only moved")
    if cfg.fused_shared_expert and router_weights is None:
        raise EPValueError("fused_shared_expert needs router_weights: its output is added to the sum over the slots")


def combine_async_kernel(cfg, launch=None) -> CombineAsyncCall:
    """Steps 1 to 3: returns when this rank's rows and signals are on their way."""
    launch = launch or LaunchConfig()
    return CombineAsyncCall(cfg, launch, parameter_block(cfg),
                            lambda weights, epilogue: _compile_async(cfg, launch.threads))


def combine_wait_kernel(cfg, launch=None, *, router_weights="array", epilogue=None) -> CombineWaitCall:
    """Steps 4 to 7: returns when all tokens are reduced.

    router_weights: "array" for an array given at the call, a function (token, k, *args) -> float32, or None: then the
    output is [num_tokens, top_k, hidden] and not reduced. epilogue: a function (token, col, value, *args) -> value.
    """
    launch = launch or LaunchConfig()
    _check_options(cfg, router_weights, epilogue)

    def compile(weights_types, epilogue_types):
        return _compile_wait(cfg, launch.threads, router_weights, weights_types, epilogue, epilogue_types)

    return CombineWaitCall(cfg, launch, parameter_block(cfg), compile,
                           EPLocalSyncCounters(cfg.n_experts).combine_wait_size())


def combine_kernel(cfg, launch=None, *, router_weights="array", epilogue=None) -> CombineCall:
    """All steps in one launch. Options: as in combine_wait_kernel."""
    launch = launch or LaunchConfig()
    _check_options(cfg, router_weights, epilogue)

    def compile(weights_types, epilogue_types):
        return _compile_fused(cfg, launch.threads, router_weights, weights_types, epilogue, epilogue_types)

    return CombineCall(cfg, launch, parameter_block(cfg), compile,
                       EPLocalSyncCounters(cfg.n_experts).combine_wait_size())
