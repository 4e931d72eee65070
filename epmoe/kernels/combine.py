"""Combine: sends every expert output back to its token's rank, and every rank sums its tokens' rows.

These are the steps, with the names of the specification and the module of each:

1. **way back** (returners.py). Region A, written by dispatch, gives for each segment (local expert, src_rank) its end
   row and its number of rows. A block sends a run of consecutive rows (row_runs.py), a warp a row or a piece of one
   (row_pieces.py). It reads `src_info[row] = (token, k)` and writes the row to place [token, k] of src_rank's recv_buf.
   The place identifies the row, so the message is only the row.
2. **signal**. The thread that knows that all rows of a segment are written stores the count into src_rank's recv_count
   at [local_expert, my_rank], release at system scope. The warps of a block count their pieces in shared memory. If all
   rows of the segment belong to one block, the warp with the last piece has acquired the others and signals. If they
   belong to several blocks, each adds its rows to `finished[local_expert, src_rank]`, acquire and release at device
   scope (dispatch no longer needs that region). The block that completes the count resets the word to 0 and signals.
   The signal covers rows of all warps and blocks. If a segment has no rows, it is sent at once.
3. **wait** (watchers.py). In every block a few warps acquire all words of the rank's recv_count at system scope, and
   raise a flag in shared memory for each.
4. **cleaning up** (leaving.py). When a block has seen all words, its last warp counts it in D: the block needs neither
   A nor recv_count any more. The last block resets recv_count, region A and D, so the next round finds the memory as
   this one did.
5. **reducing** (reducers.py). A warp takes columns of a token and loads the rows' vectors as their flags go up. It sums
   fma(w, x, sum) over k ascending from +0.0, rounds once to the output type, then adds the shared expert, then applies
   the epilogue.

To ranks of other p2p worlds (use_shmem) the row goes out of send_buf, by a put that is complete before step 2, and the
count by a SHMEM signal: transport.py.

combine_async is steps 1 and 2, combine_wait 3 to 5, and combine_kernel all of them in one launch. There every block
does all steps. So the blocks of a launch must be resident together: each waits for rows that all blocks of its peers
return. Region A may be zeroed only when every block has read it, and recv_count only when every block has seen it; the
last block to leave comes after all. The ready flags stay 0, because no block waits for another block that waits for
all. If a round fails, tokens that miss a row are not written; others may have been reduced.

The first memory access loads A; src_info, the first rows and the peers' addresses are prefetched.
"""

from functools import lru_cache

from epmoe.device import device_fn, i32, kernel, lane_id, shared_array, store_i32, syncthreads_or, u64
from epmoe.device import int32
from epmoe.layout import combine_msg_bytes as row_bytes
from epmoe_ref.errors import EPValueError

from . import ahead, counters, lamport, lamport_returners, leaving, limits, reducers, returners, stamps, watchers
from .call import CombineAsyncCall, CombineCall, CombineWaitCall
from .launch import LaunchConfig
from .params import ParameterBlock
from .status import failed_before
from .transport import crosses_worlds
from .user_functions import OutputLambda, words_of

CACHED = 128        # compiled kernels that are remembered, for each of the three


def parameter_block(cfg) -> ParameterBlock:
    """The fields of the three combine kernels; the arguments of user functions follow them."""
    return ParameterBlock(
        ("send_buf_p", 1), ("recv_buf_p", 1), ("recv_count_p", 1), ("ep_counters", 1), ("status", 1),
        ("timeout_ns", 1), ("trace", 1),
        ("input_tokens", 1), ("src_info", 1), ("n_rows", 1), ("output_tokens", 1), ("topk_ids", 1),
        ("router_weights", 1),
        context=(("recv_buf_ptrs", cfg.p2p_world_size), ("recv_count_ptrs", cfg.p2p_world_size)))


def _looked_at_first(block):
    """Indices of ep_counters, status, rows, src_info, and how many rows there is memory for."""
    return [block.index(n) for n in ("ep_counters", "status", "input_tokens", "src_info", "n_rows")]


def _n_words(block, functions):
    """Words of a kernel with these functions and types of their arguments."""
    _, weights_types, _, epilogue_types = functions
    return block.n_words + words_of(weights_types) + words_of(epilogue_types)


def _leaving(cfg, block, trace):
    """Device function leave(params, words): one warp of every block, when the block has seen all signals."""
    at, mark = counters.words(cfg), stamps.by_caller(block, trace)

    @device_fn
    def clear(words, entry):
        store_i32(words + u64(at.a) + u64(8) * u64(entry), i32(0))
        store_i32(words + u64(at.a) + u64(8) * u64(entry) + u64(4), i32(0))

    count_out = leaving.make(cfg, block, clear)

    @device_fn
    def leave(params, words):
        count_out(params, words)
        if lane_id() == 0:
            mark(params, stamps.LEFT)

    return leave


@lru_cache(CACHED)
def _compile_async(cfg, threads, trace):
    block = parameter_block(cfg)
    p_words, p_status, p_rows, p_src_info, p_n_rows = _looked_at_first(block)
    mark, fetch, fetch_rows = stamps.make(block, trace), ahead.context(block), ahead.first_rows(row_bytes(cfg))
    return_rows = returners.make(cfg, block, mark)

    @kernel(max_threads=threads, words=block.n_words, shmem=crosses_worlds(cfg))
    def combine_async(params, num_tokens, my_rank):
        words, status, rows, src_infos = params[p_words], params[p_status], params[p_rows], params[p_src_info]
        mark(params, stamps.START)
        fetch(params)
        fetch_rows(rows, src_infos, params[p_n_rows])
        return_rows(params, words, rows, src_infos, my_rank, failed_before(status))

    return combine_async


def _second_half(cfg, block, trace, mark, router_weights, weights_types, epilogue, epilogue_types):
    """(n_flags, clear, finish): finish(params, num_tokens, my_rank, words, status, flags) is steps 3 to 5."""
    n_flags, clear, watch, next_come = watchers.make(cfg, block)
    leave, taking = _leaving(cfg, block, trace), reducers.behind_signals(cfg, next_come)
    reduce = reducers.make(cfg, block, mark, taking, router_weights, weights_types, epilogue, epilogue_types)

    @device_fn
    def finish(params, num_tokens, my_rank, words, status, flags):
        if watch(params, status, flags):
            leave(params, words)
        reduce(params, flags, num_tokens, my_rank)

    return n_flags, clear, finish


@lru_cache(CACHED)
def _compile_wait(cfg, threads, trace, *functions):
    block = parameter_block(cfg)
    p_words, p_status, *_ = _looked_at_first(block)
    n_words = _n_words(block, functions)
    mark, fetch = stamps.make(block, trace), ahead.context(block)
    n_flags, clear, finish = _second_half(cfg, block, trace, mark, *functions)

    @kernel(max_threads=threads, words=n_words)
    def combine_wait(params, num_tokens, my_rank):
        words, status = params[p_words], params[p_status]
        flags = shared_array(n_flags, int32)
        mark(params, stamps.START)
        fetch(params)
        clear(flags)
        if not syncthreads_or(failed_before(status)):
            finish(params, num_tokens, my_rank, words, status, flags)

    return combine_wait


@lru_cache(CACHED)
def _compile_fused(cfg, threads, trace, *functions):
    block = parameter_block(cfg)
    p_words, p_status, p_rows, p_src_info, p_n_rows = _looked_at_first(block)
    n_words = _n_words(block, functions)
    mark, fetch, fetch_rows = stamps.make(block, trace), ahead.context(block), ahead.first_rows(row_bytes(cfg))
    return_rows = returners.make(cfg, block, mark)
    n_flags, clear, finish = _second_half(cfg, block, trace, mark, *functions)

    @kernel(max_threads=threads, words=n_words, shmem=crosses_worlds(cfg))
    def combine(params, num_tokens, my_rank):
        words, status, rows, src_infos = params[p_words], params[p_status], params[p_rows], params[p_src_info]
        flags = shared_array(n_flags, int32)
        mark(params, stamps.START)
        fetch(params)
        fetch_rows(rows, src_infos, params[p_n_rows])
        clear(flags)                        # there is a barrier in return_rows
        if not return_rows(params, words, rows, src_infos, my_rank, failed_before(status)):
            finish(params, num_tokens, my_rank, words, status, flags)

    return combine


@lru_cache(CACHED)
def _compile_lamport(cfg, threads, trace, *functions):
    block = parameter_block(cfg)
    p_words, p_status, p_rows, p_src_info, p_n_rows = _looked_at_first(block)
    n_words = _n_words(block, functions)
    mark, fetch, fetch_rows = stamps.make(block, trace), ahead.context(block), ahead.first_rows(row_bytes(cfg))
    return_rows, await_begun = lamport_returners.make(cfg, block, mark), lamport.ending(cfg, block)
    reduce = reducers.make(cfg, block, mark, lamport.taking(cfg, block), *functions)

    @kernel(max_threads=threads, words=n_words)
    def combine(params, num_tokens, my_rank):
        words, status, rows, src_infos = params[p_words], params[p_status], params[p_rows], params[p_src_info]
        mark(params, stamps.START)
        fetch(params)
        fetch_rows(rows, src_infos, params[p_n_rows])
        if not return_rows(params, words, rows, src_infos, my_rank, failed_before(status)):
            reduce(params, i32(0), num_tokens, my_rank)
            await_begun(params, status)
            mark(params, stamps.LEFT)

    return combine


def _checked_output(cfg, router_weights, epilogue, elementwise_lambda_fn):
    """The function applied to a value before it is stored: epilogue, an OutputLambda, or None."""
    if elementwise_lambda_fn is not None and epilogue is not None:
        raise EPValueError("epilogue and elementwise_lambda_fn are both given: the second stores the result itself, so "
                           "it must also do what the first does")
    if not (router_weights is None or router_weights == "array" or callable(router_weights)):
        raise EPValueError(f"router_weights={router_weights!r} must be an array, a function (token, k, *args) or None")
    if router_weights is None and (epilogue is not None or elementwise_lambda_fn is not None):
        raise EPValueError("an epilogue needs router_weights, and so does elementwise_lambda_fn: without them rows are "
                           "not reduced, only moved")
    if cfg.fused_shared_expert and router_weights is None:
        raise EPValueError("fused_shared_expert needs router_weights: its output is added to the sum over the slots")
    return epilogue if elementwise_lambda_fn is None else OutputLambda(elementwise_lambda_fn)


def combine_async_kernel(cfg, launch=None) -> CombineAsyncCall:
    """The kernel that sends the experts' rows back to the ranks of their tokens: steps 1 and 2 of this module's story.

    Its launch ends when this rank's rows and signals are on their way.

    cfg: EPConfig. launch: LaunchConfig, default LaunchConfig().
    Returns a CombineAsyncCall, called with the page's arguments in the page's order: addresses (KernelCall).
    The same arguments give the same compiled kernel. Errors: EPValueError. Source: the combine_async_kernel
    page (docs/pages.md).
    """
    limits.check(cfg)
    launch = launch or LaunchConfig()
    return CombineAsyncCall(cfg, launch, parameter_block(cfg),
                            lambda weights, epilogue: _compile_async(cfg, launch.threads, launch.trace))


def combine_wait_kernel(cfg, launch=None, *, router_weights="array", epilogue=None,
                        elementwise_lambda_fn=None) -> CombineWaitCall:
    """The kernel that waits for the returned rows and reduces them by token: steps 3 to 5.

    Its launch ends when all tokens are reduced, over slots 0, 1, ... in float32: nothing is free in the result.

    cfg: EPConfig. launch: LaunchConfig, default LaunchConfig(). router_weights: "array" for an array given at the call,
    a function (token, k, *args) -> float32, or None: then the output is [num_tokens, top_k, hidden] and not reduced.
    epilogue: a function (token, col, value, *args) -> value, or None. elementwise_lambda_fn: a function of the same
    arguments that stores its result into writable arrays among args and returns nothing, or None; with it the output
    array is not written, and both functions' args are the call's epilogue_args.
    Returns a CombineWaitCall, called with the page's arguments in the page's order: addresses (KernelCall).
    Errors: EPValueError. Source: the combine_wait_kernel page (docs/pages.md).
    """
    limits.check(cfg)
    launch = launch or LaunchConfig()
    epilogue = _checked_output(cfg, router_weights, epilogue, elementwise_lambda_fn)

    def compile(weights_types, epilogue_types):
        return _compile_wait(cfg, launch.threads, launch.trace, router_weights, weights_types, epilogue, epilogue_types)

    return CombineWaitCall(cfg, launch, parameter_block(cfg), compile)


def combine_kernel(cfg, launch=None, *, router_weights="array", epilogue=None, elementwise_lambda_fn=None,
                   without_signals=False) -> CombineCall:
    """combine_async and combine_wait as one kernel: all steps in one launch.

    cfg: EPConfig. launch: LaunchConfig, default LaunchConfig(). without_signals: True: where lamport.applies, rows are
    polled themselves, and recv_buf_ptrs are of lamport.recv_buf_name. router_weights, epilogue, elementwise_lambda_fn:
    as in combine_wait_kernel.
    Returns a CombineCall, called with the page's arguments in the page's order: addresses (KernelCall).
    Errors: EPValueError. Source: the combine_kernel page (docs/pages.md).
    """
    limits.check(cfg)
    launch = launch or LaunchConfig()
    epilogue = _checked_output(cfg, router_weights, epilogue, elementwise_lambda_fn)

    make = _compile_lamport if lamport.applies(cfg, without_signals, router_weights) else _compile_fused

    def compile(weights_types, epilogue_types):
        return make(cfg, launch.threads, launch.trace, router_weights, weights_types, epilogue, epilogue_types)

    return CombineCall(cfg, launch, parameter_block(cfg), compile)
