"""Dispatch: sends every token to the owners of its experts; every rank groups the tokens that it receives by expert.

These are the steps, with the names of the specification and the module of each. In the fused kernel some blocks send
and the others receive, both from the beginning. (Each split kernel has blocks of one kind.)

1. **announcing** (signaller.py). Block 0 counts the ids of each expert and announces the count to its owner: it writes
   ANNOUNCED + count into the owner's recv_count at [local_expert, my_rank]. A count of 0 is the signal itself: 0.
2. **reserved** (senders.py). A warp takes a token. For each k, lane k claims slot s by a fetch-add on
   `reserved[local_expert, dst_rank]`. The message goes to the owner's recv_buf at [local_expert, my_rank, s].
3. **sending** (senders.py, pieces.py). Warps write messages, or pieces of them, in the same order in all blocks. So the
   messages to the first experts are complete long before the last ones.
4. **finished, signal** (signaller.py). `finished[local_expert, dst_rank]` counts pieces, with acquire and release at
   device scope. The warp that has written a piece adds to it; if all warps of a block have one, a thread adds for the
   block after a barrier. Block 0 has subtracted the number of pieces in advance. The thread that brings the word to 0
   has acquired all of these messages. It writes the count into the same word of recv_count, release at system scope:
   the signal. Release is cumulative, so the signal covers messages that other blocks wrote.
5. **counts** (offsets.py). Every receiving block waits until all words of its recv_count hold a count, acquires them,
   and computes all places: row_offsets, regions A and B. One block stores them.
6. **waiting, copying** (copiers.py). A warp takes a row, in the order of arrival. It acquires, at system scope, the
   signal of the row's (local expert, src_rank), and decodes the message into the row.
7. **cleaning up** (leaving.py). A block counts itself in D when it no longer needs the counters, possibly before it
   copies. The last warp of a block does so. The last block resets reserved, D, F and G to 0 and recv_count to
   MAX_FINITE. `finished` is 0 again already, and A stays for combine. So the host need not reset anything between
   rounds.

The specification has no announcement. It only saves time: places are known early, so copying overlaps sending. Rows are
assigned, not claimed in C, and no block waits for another one's offsets, which E would signal.

A token's payload is sent to a rank once, even if several of its experts are there (pieces.py). The message to the
lowest of these experts carries it. The others are trailers, which give the row of recv_buf that holds the payload. A
signal covers the payloads that its messages refer to, and receivers read from each trailer where the payload is, so the
sender alone decides. Messages to other p2p worlds, and all messages under skip_a2a, are whole, as in the specification.
In small batches with shared payloads, one block for each dst_rank replaces steps 1 to 4 (few_tokens.py): it sends
payloads at once, and the signals describe the messages (described.py), which have no trailers. A peer may use either
way in the same round. If all signals describe messages, warps need not wait for each other in step 6 (known_rows.py).

If blocks have several batches of tokens to send, no expert is complete before the last batch, and nothing could be
copied meanwhile. Then all blocks of the fused kernel send first, and afterwards all receive.

To ranks of other p2p worlds (use_shmem) the message goes out of send_buf, by a put that is complete before step 4, and
the count by a SHMEM signal, without an announcement: transport.py.

dispatch_async is steps 1 to 4, dispatch_wait 5 to 7, and dispatch_kernel all of them in one launch. The launch boundary
orders the split kernels. The fused kernel replaces it as follows:
- the last block to leave clears reserved, when no sender needs it any more (in both forms).
- a copying block may read recv_buf while peers write other messages to it, but never a message whose signal it has not
  acquired.
- rows of a fused shared expert need tokens that other blocks encode: region F counts them (shared_expert.py).
- sending blocks wait for no block, and they are the first blocks of the grid. Only receiving blocks wait, for senders.
  Blocks that do both send first.

The order within an (expert, src_rank) segment is the order of the claims: unspecified.
"""

from functools import lru_cache, partial

from epmoe.device import (block_idx, device_fn, grid_dim, griddep_launch, griddep_wait, i32, kernel, n_warps,
                          store_i32, u64, warp_id)

from . import ahead, copiers, counters, few_tokens, formats, leaving, limits, senders, stamps
from .call import DispatchAsyncCall, DispatchCall, DispatchWaitCall
from .launch import LaunchConfig
from .params import ParameterBlock
from .status import failed_before
from .transport import crosses_worlds

CACHED = 128        # compiled kernels that are remembered, for each of the three
SENDERS_OF_8 = 4    # of 8 blocks of the fused kernel, those that send; the others receive
AT_ONCE_OF_8 = 3    # the same where their warps can send all payloads at once, each once to a rank
TURNS_FROM = 4      # batches of tokens of a block: a kernel for fewer tokens has no code for blocks that do both


def parameter_block(cfg) -> ParameterBlock:
    """The fields of the three dispatch kernels; each uses those that its call fills in."""
    return ParameterBlock(
        ("send_buf_p", 1), ("recv_buf_p", 1), ("recv_count_p", 1), ("ep_counters", 1), ("status", 1),
        ("timeout_ns", 1), ("trace", 1),
        ("input_tokens", 1), ("topk_ids", 1), ("clean_topk_ids", 1), ("input_scale", 1),
        ("format_handler", len(formats.of(cfg).output_fields) + 1), ("row_offsets", 1), ("expert_ids", 1),
        ("src_info", 1), ("recv_counts", 1),
        context=(("recv_buf_ptrs", cfg.p2p_world_size), ("recv_count_ptrs", cfg.p2p_world_size)))


def _shares(cfg):
    """Whether a payload is sent to a rank once: not to other p2p worlds, nor if nothing is sent."""
    return not cfg.use_shmem and not cfg.skip_a2a


def _leaving(cfg, block):
    """Device function leave(params): the last warp of a block, which needs neither recv_count nor reserved any more.

    Behind a barrier.
    """
    at, p_counters = counters.words(cfg), block.index("ep_counters")

    @device_fn
    def clear(words, entry):
        store_i32(words + u64(at.reserved) + u64(4) * u64(entry), i32(0))
        if entry == 0:
            store_i32(words + u64(at.f), i32(0))
            store_i32(words + u64(at.g), i32(0))

    count_out = leaving.make(cfg, block, clear)

    @device_fn
    def leave(params):
        count_out(params, params[p_counters])

    return leave


@lru_cache(CACHED)
def _compile_async(cfg, threads, trace, input_scale, shares, few, are_few):
    block = parameter_block(cfg)
    mark, fetch = stamps.make(block, trace), ahead.context(block)
    send_tokens = senders.make(cfg, block, mark, input_scale, shares, few, are_few)
    p_ids, p_tokens, p_status = (block.index(n) for n in ("topk_ids", "input_tokens", "status"))

    @kernel(max_threads=threads, words=block.n_words, shmem=crosses_worlds(cfg))
    def dispatch_async(params, num_tokens, my_rank):
        mark(params, stamps.START)
        griddep_launch()            # dispatch_wait, if it is next, may be there when this one ends
        fetch(params)
        failed = failed_before(params[p_status])
        send_tokens(params, params[p_ids], params[p_tokens], num_tokens, my_rank, grid_dim(), failed)

    return dispatch_async


@lru_cache(CACHED)
def _compile_wait(cfg, threads, trace, are_few):
    block = parameter_block(cfg)
    mark, fetch = stamps.make(block, trace), ahead.context(block)
    leave = _leaving(cfg, block)
    receive, p_status = copiers.make(cfg, block, threads, mark, leave, are_few), block.index("status")

    @kernel(max_threads=threads, words=block.n_words)
    def dispatch_wait(params, num_tokens, my_rank):
        mark(params, stamps.START)
        fetch(params)
        griddep_wait()              # dispatch_async may still be running
        found = failed_before(params[p_status])
        gave_up, is_out = receive(params, num_tokens, my_rank, block_idx(), grid_dim(), found)
        if not gave_up and not is_out and warp_id() == n_warps() - 1:
            leave(params)
        mark(params, stamps.LEFT)

    return dispatch_wait


@lru_cache(CACHED)
def _compile_fused(cfg, threads, trace, input_scale, shares, are_few):
    block = parameter_block(cfg)
    mark, fetch = stamps.make(block, trace), ahead.context(block)
    n_ranks, n_payloads, batch = cfg.n_src_ranks, min(cfg.top_k, cfg.n_src_ranks), senders.batch_of(cfg)
    few = few_tokens.MOST_TOKENS if few_tokens.applies(cfg, shares) else -1
    send_tokens = senders.make(cfg, block, mark, input_scale, shares, few, are_few)
    leave = _leaving(cfg, block)
    receive = copiers.make(cfg, block, threads, mark, leave, are_few)
    p_ids, p_tokens, p_status = (block.index(n) for n in ("topk_ids", "input_tokens", "status"))

    @device_fn
    def send_or_receive(params, num_tokens, my_rank, topk_ids, tokens, n_senders, failed):
        if block_idx() < n_senders:
            return send_tokens(params, topk_ids, tokens, num_tokens, my_rank, n_senders, failed), False
        return receive(params, num_tokens, my_rank, i32(block_idx() - n_senders), i32(grid_dim() - n_senders), failed)

    @device_fn
    def send_and_receive(params, num_tokens, my_rank, topk_ids, tokens, n_senders, failed):
        copier, n_copiers = i32(block_idx() - n_senders), i32(grid_dim() - n_senders)
        in_turns = num_tokens > batch * n_senders
        if in_turns:
            n_senders, n_copiers = i32(grid_dim()), i32(grid_dim())
            if copier < 0:
                copier = i32(copier + n_copiers)
        gave_up, is_out, sends = False, False, block_idx() < n_senders
        if sends:
            gave_up = send_tokens(params, topk_ids, tokens, num_tokens, my_rank, n_senders, failed)
        if not gave_up and (in_turns or not sends):
            gave_up, is_out = receive(params, num_tokens, my_rank, copier, n_copiers, failed)
        return gave_up, is_out

    act = send_and_receive if cfg.max_tokens_per_rank > TURNS_FROM * batch else send_or_receive

    @kernel(max_threads=threads, words=block.n_words, shmem=crosses_worlds(cfg))
    def dispatch(params, num_tokens, my_rank):
        mark(params, stamps.START)
        fetch(params)
        n_senders = i32(max(1, i32(grid_dim() * SENDERS_OF_8 // 8)))
        at_once = i32(max(min(n_senders, n_ranks), i32(grid_dim() * AT_ONCE_OF_8 // 8)))
        if num_tokens <= few and n_senders >= n_ranks:
            n_senders = i32(n_ranks)
        elif shares and num_tokens * n_payloads <= n_warps() * at_once:
            n_senders = at_once
        failed = failed_before(params[p_status])
        gave_up, is_out = act(params, num_tokens, my_rank, params[p_ids], params[p_tokens], n_senders, failed)
        if not gave_up and not is_out and warp_id() == n_warps() - 1:
            leave(params)
        mark(params, stamps.LEFT)

    return dispatch


def dispatch_async_kernel(cfg, launch=None, *, input_scale=None) -> DispatchAsyncCall:
    """The kernel that sends this rank's tokens to the owners of their experts: steps 1 to 4 of this module's story.

    Its launch ends when this rank's messages and signals are on their way.

    cfg: EPConfig. launch: LaunchConfig, default LaunchConfig(); input_scale:
    a function i -> float32 that is read at 0, or None for the number given at the call.
    Returns a DispatchAsyncCall, called with the page's arguments in the page's order: addresses (KernelCall).
    The same arguments give the same compiled kernel. Errors: EPValueError. Source: the dispatch_async_kernel
    page (docs/pages.md).
    """
    limits.check(cfg)
    launch = launch or LaunchConfig()
    shares = _shares(cfg)
    few, are_few = few_tokens.most(cfg, shares, launch), few_tokens.are_all(cfg, shares, launch)
    options = launch.threads, launch.trace, input_scale, shares, few, are_few
    call = DispatchAsyncCall(cfg, launch, parameter_block(cfg), lambda *types: _compile_async(cfg, *options))
    call.size = partial(few_tokens.size_of_senders, cfg, shares)
    return call


def dispatch_wait_kernel(cfg, launch=None) -> DispatchWaitCall:
    """The kernel that waits for all messages of the round and groups them by expert: steps 5 to 7.

    Its launch ends when they lie in their rows; inside an (expert, src_rank) segment the order of rows is free.

    cfg: EPConfig. launch: LaunchConfig, default LaunchConfig().
    Returns a DispatchWaitCall, called with the page's arguments in the page's order: addresses (KernelCall).
    Errors: EPValueError. Source: the dispatch_wait_kernel page (docs/pages.md).
    """
    limits.check(cfg)
    launch = launch or LaunchConfig()
    shares = _shares(cfg)
    options = launch.threads, launch.trace, few_tokens.are_all(cfg, shares, launch)
    call = DispatchWaitCall(cfg, launch, parameter_block(cfg), lambda *types: _compile_wait(cfg, *options))
    call.size = partial(few_tokens.size_of_receivers, cfg, shares)
    call.programmatic = True
    return call


def dispatch_kernel(cfg, launch=None, *, input_scale=None) -> DispatchCall:
    """dispatch_async and dispatch_wait as one kernel: all steps in one launch.

    cfg: EPConfig. launch: LaunchConfig, default LaunchConfig(). recv_buf gets the payload of a token once a rank;
    under use_shmem and skip_a2a once a message. input_scale: as in dispatch_async_kernel.
    Returns a DispatchCall, called with the page's arguments in the page's order: addresses (KernelCall); a
    launch of a few tokens takes fewer blocks and threads than `launch` says.
    Errors: EPValueError. Source: the dispatch_kernel page (docs/pages.md).
    """
    limits.check(cfg)
    launch = launch or LaunchConfig()
    shares = _shares(cfg)
    options = launch.threads, launch.trace, input_scale, shares, few_tokens.are_all(cfg, shares, launch)
    call = DispatchCall(cfg, launch, parameter_block(cfg), lambda *types: _compile_fused(cfg, *options))
    call.size = partial(few_tokens.size, cfg, shares)
    return call
