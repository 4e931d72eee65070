"""Combine: sends every expert output back to its token's rank, and every rank sums its tokens' rows.

These are the steps, and the module of each. Names of counters are those of the specification (epmoe_ref/counters.py).

1. **way back** (send_back.py). Region A, written by dispatch, gives for each segment (local expert, src_rank) its end
   row and its number of rows. A block sends a run of consecutive rows, a warp a row or a part of one. The warp reads
   `src_info[row] = (token, k)` and writes the row to place [token, k] of src_rank's recv_buf. The place identifies the
   row, so the message is only the row.
2. **signal** (send_back.py). The thread that knows that all rows of a segment are written stores the count into
   src_rank's recv_count at [local_expert, my_rank], release at system scope. The warps of a block count their parts in
   shared memory. If all rows of the segment belong to one block, the warp with the last part has acquired the others
   and signals. If they belong to several blocks, each adds its rows to `finished[local_expert, src_rank]`, acquire and
   release at device scope. The block that completes the count resets the word to 0 and signals. A segment without rows
   is signalled at once.
3. **wait** (await_rows.py). In every block a few warps acquire all words of the rank's recv_count at system scope, and
   raise a flag in shared memory for each.
4. **cleaning up** (signal.resetting). When a block has seen all words, its last warp adds 1 to D: the block needs
   neither A nor recv_count any more. The last block resets recv_count, region A and D, so the next round finds the
   memory as this one did. No peer signals the next combine before this rank's next dispatch, a later launch.
5. **reducing** (reduce.py, await_rows.py). A warp takes columns of a token, and loads these of a row when its flag is
   up. It sums fma(w, x, sum) over k ascending from +0.0, adds the shared expert, and applies the epilogue. Each of the
   three rounds its result to the output type.

combine_async is steps 1 and 2, combine_wait 3 to 5, and combine_kernel all of them in one launch. There every block
does all steps. So the blocks of a launch must be resident together: each waits for rows that all blocks of all ranks
return. The specification's ready flags are not used, since every block polls recv_count itself. If a round fails,
columns that miss a row are not written; others may have been reduced.

without_signals: if rows are few (lamport.applies), a fused combine sends only BEGUN, as each word of a row is its own
ready flag (await_rows.py). Then blocks add 1 to D as soon as they have read region A, and the last one resets A and D.
"""

from dataclasses import dataclass
from functools import lru_cache, partial

from epmoe.device import device_fn, int32, kernel, lane_id, shared_array, syncthreads_or
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

from .. import lamport, stamps, user_functions
from ..launch import KernelCall, LaunchConfig, check_limits
from ..params import CACHED, ParameterBlock
from ..status import failed_before
from . import await_rows, peers, reduce, send_back, signal
from .tuning import TUNING, Tuning


@dataclass(frozen=True)
class Build:
    """The compile-time choices of a combine kernel.

    signals: whether rows are signalled; otherwise they are their own ready flags. router_weights: "array", a function
    (token, k, *args), or None for output [num_tokens, top_k, hidden]. epilogue: a function (token, col, value, *args),
    an OutputLambda, or None. weights_types, epilogue_types: types of their args.
    """

    cfg: EPConfig
    threads: int
    trace: bool
    tuning: Tuning
    signals: bool = True
    router_weights: object = None
    epilogue: object = None
    weights_types: tuple = ()
    epilogue_types: tuple = ()

    @property
    def args(self):
        """(name, number of words) of the arguments of user functions."""
        return (("router_weights_args", user_functions.words_of(self.weights_types)),
                ("epilogue_args", user_functions.words_of(self.epilogue_types)))

    @property
    def n_words(self):
        """Number of words of a kernel's parameters."""
        return parameter_block(self.cfg).n_words + sum(n for _, n in self.args)


def parameter_block(cfg) -> ParameterBlock:
    """The fields of the three combine kernels. The arguments of user functions follow them."""
    return peers.parameter_block(cfg, *((name, 1) for name in (
        "input_tokens", "src_info", "n_rows", "output_tokens", "topk_ids", "router_weights")))


def _beginning(build):
    return peers.beginning(build, parameter_block(build.cfg), build.args)


def _waiting(build):
    """(n_flags, clear, wait_and_reduce(call, flags): steps 3 to 5). flags: shared int32 [n_flags], cleared first."""
    mark = stamps.make(build.trace, by_caller=build.signals)
    if not build.signals:
        reduce_tokens, await_begun = reduce.make(build, await_rows.without_signals(build)), await_rows.await_begun(build.cfg)

        @device_fn
        def reduce_and_leave(call, flags):
            reduce_tokens(call, flags)
            await_begun(call)
            mark(call, stamps.LEFT)

        return 1, device_fn(lambda flags: None), reduce_and_leave

    polls, leave = await_rows.polling(build), signal.resetting(build.cfg, send_back.REGION_A)
    reduce_tokens = reduce.make(build, await_rows.after_signals(build.cfg, polls.next_arrived))

    @device_fn
    def wait_and_reduce(call, flags):
        if polls.poll(call, flags):
            leave(call)
            if lane_id() == 0:
                mark(call, stamps.LEFT)
        reduce_tokens(call, flags)

    return polls.n_flags, polls.clear, wait_and_reduce


@lru_cache(CACHED)
def _compile_async(build):
    begin, send = _beginning(build), send_back.make(build)

    @kernel(max_threads=build.threads, words=build.n_words, shmem=peers.crosses_worlds(build.cfg))
    def combine_async(params, num_tokens, my_rank):
        call = begin(params, num_tokens, my_rank)
        send(call, failed_before(call.status))

    return combine_async


@lru_cache(CACHED)
def _compile_wait(build):
    begin, (n_flags, clear, wait_and_reduce) = _beginning(build), _waiting(build)

    @kernel(max_threads=build.threads, words=build.n_words)
    def combine_wait(params, num_tokens, my_rank):
        call, flags = begin(params, num_tokens, my_rank), shared_array(n_flags, int32)
        clear(flags)
        if not syncthreads_or(failed_before(call.status)):
            wait_and_reduce(call, flags)

    return combine_wait


@lru_cache(CACHED)
def _compile_fused(build):
    begin, send, (n_flags, clear, wait_and_reduce) = _beginning(build), send_back.make(build), _waiting(build)

    @kernel(max_threads=build.threads, words=build.n_words, shmem=peers.crosses_worlds(build.cfg))
    def combine(params, num_tokens, my_rank):
        call, flags = begin(params, num_tokens, my_rank), shared_array(n_flags, int32)
        clear(flags)                        # there is a barrier in send
        if not send(call, failed_before(call.status)):
            wait_and_reduce(call, flags)

    return combine


def _checked(cfg, router_weights, epilogue, elementwise_lambda_fn):
    """Checks them -> (router_weights, the function for each value: epilogue, an OutputLambda, or None)."""
    if elementwise_lambda_fn is not None and epilogue is not None:
        raise EPValueError("epilogue and elementwise_lambda_fn are both given: the second stores the result itself, so "
                           "it must also do what the first does")
    if not (router_weights is None or router_weights == "array" or callable(router_weights)):
        raise EPValueError(f"router_weights={router_weights!r} must be an array, a function (token, k, *args) or None")
    if router_weights is None and (epilogue is not None or elementwise_lambda_fn is not None):
        raise EPValueError("an epilogue needs router_weights, and so does elementwise_lambda_fn: without them rows are "
                           "not reduced, only moved")
    if cfg.fused_shared_expert and router_weights is None:
        raise EPValueError("fused_shared_expert needs router_weights: its output is added to the sum over k")
    return router_weights, epilogue if elementwise_lambda_fn is None else user_functions.OutputLambda(elementwise_lambda_fn)


def _call(compile, cfg, launch, tuning, signals=True, functions=()):
    """The KernelCall of a kernel. functions: (router_weights, epilogue), if it calls them."""
    check_limits(cfg)
    launch = launch or LaunchConfig()
    build = partial(Build, cfg, launch.threads, launch.trace, tuning, signals, *functions)
    return KernelCall(cfg, launch, parameter_block(cfg), lambda *types: compile(build(*types) if functions else build()))


def combine_async_kernel(cfg, launch=None, *, tuning=TUNING) -> KernelCall:
    """Makes the kernel that sends the experts' rows back to the ranks of their tokens: steps 1 and 2 of this module.

    Its launch ends when this rank's rows and signals are written.

    cfg: EPConfig. launch: LaunchConfig, default LaunchConfig(). tuning: for tests. The same arguments give the same
    compiled kernel. Errors: EPValueError. Source: the combine_async_kernel page (docs/pages.md).
    """
    return _call(_compile_async, cfg, launch, tuning)


def combine_wait_kernel(cfg, launch=None, *, router_weights="array", epilogue=None, elementwise_lambda_fn=None,
                        tuning=TUNING) -> KernelCall:
    """Makes the kernel that waits for the returned rows and reduces them by token: steps 3 to 5.

    Its launch ends when all tokens are reduced, over k = 0, 1, ... in float32. The result is fully determined.

    router_weights: "array" for an array given at the call, a function (token, k, *args) -> float32, or None: then the
    output is [num_tokens, top_k, hidden] and not reduced.
    epilogue: a function (token, col, value, *args) -> value, or None. elementwise_lambda_fn: a function of the same
    arguments that stores its result into writable arrays among args and returns nothing, or None; with it the output
    array is not written. The args of both are the call's epilogue_args. cfg, launch, tuning: as in
    combine_async_kernel. Errors: EPValueError. Source: the combine_wait_kernel page (docs/pages.md).
    """
    return _call(_compile_wait, cfg, launch, tuning, True, _checked(cfg, router_weights, epilogue, elementwise_lambda_fn))


def combine_kernel(cfg, launch=None, *, router_weights="array", epilogue=None, elementwise_lambda_fn=None,
                   without_signals=False, tuning=TUNING) -> KernelCall:
    """Makes one kernel of combine_async and combine_wait: all steps in one launch.

    without_signals: if True and lamport.applies, the rows themselves are polled, and recv_buf_ptrs must point to
    lamport.recv_buf_name. Others: as in combine_wait_kernel. Errors: EPValueError. Source: the combine_kernel page
    (docs/pages.md).
    """
    signals = not lamport.applies(cfg, without_signals, router_weights)
    return _call(_compile_fused, cfg, launch, tuning, signals, _checked(cfg, router_weights, epilogue, elementwise_lambda_fn))
