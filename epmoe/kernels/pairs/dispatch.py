"""Dispatch: sends every token to the owners of its experts; every rank groups the tokens that it receives by expert.

These are the steps, and the module of each. recv_count and the counters reserved, finished and A to G are those of the
specification (epmoe_ref/counters.py). A message is a token for one of its experts. In the fused kernel some blocks send
and the others receive, both from the beginning. (Each split kernel has blocks of one kind.)

1. **announcing** (signal.py). Block 0 counts the ids of each expert. It announces the count to an owner in the p2p
   world: it writes ANNOUNCED + count into recv_count[local_expert, my_rank] there. It signals a count of 0 at once.
2. **reserved** (send.py). Each message claims a slot s by a fetch-add on `reserved[local_expert, dst_rank]`. It goes to
   the owner's recv_buf[local_expert, my_rank, s]. Nothing is sent for -1 and for invalid ids, which ids.record counts.
3. **sending** (send.py). Warps write messages, or parts of them. All blocks send to the lowest local experts first.
4. **finished, signal** (signal.py). A warp adds 1 for each part that it has written to `finished[local_expert,
   dst_rank]` of all messages that use the part, with acquire and release at device scope. If no warp of a block has two
   parts, a thread adds those of a whole message, after a barrier. Block 0 subtracts the number of all parts, before or
   after that. The thread that brings the word to 0 has acquired all of these messages. It overwrites the announcement
   with the count, release at system scope: the signal. It is cumulative, so it covers what other blocks wrote.
5. **counts** (offsets.py). Every receiving block waits until all words of its recv_count hold a count, announced or
   signalled, acquires them, and computes all places: row_offsets, regions A and B. One block stores them.
6. **waiting, copying** (receive.py). Rows are assigned to warps in the order of sending. A warp acquires, at system
   scope, the signal of its row's (local expert, src_rank), and decodes the message into the row.
7. **cleaning up** (signal.resetting). Every block of the launch, even if it only sends, adds 1 to D when it no longer
   needs the counters, possibly before it copies. The last one resets reserved, D, F and G to 0 and recv_count to
   MAX_FINITE. `finished` is 0 already, and A stays for combine. So the host need not reset anything between rounds.

The specification has no announcements. They only save time: places are known early, so copying overlaps sending. C and
E are not used: no block claims tiles, and no block waits until another one has computed the places.

A token's payload is sent to a rank once, with the message to the lowest of its experts there. Its other messages to
that rank are trailers, which refer to this one (message.py). Under use_shmem and under skip_a2a every message has its
own payload, as in the specification. Otherwise a rank with at most 8 tokens may replace steps 1 to 4 by one block for
each dst_rank (few_tokens.py), whichever way its peers take in the same round.

If blocks have several batches of tokens to send, few experts are complete before the last batch. Then, if cfg allows
more than tuning.turns_from batches, all blocks of the fused kernel send first, and afterwards all receive.

dispatch_async is steps 1 to 4, dispatch_wait 5 to 7, and dispatch_kernel all of them in one launch. Between the split
kernels the end of the first launch orders everything. In the fused kernel
- `reserved` is reset by the last of all blocks, so no sender still needs it.
- a receiving block may read recv_buf while peers write other messages to it, but never a message before it has acquired
  its signal.
- sending blocks wait for none, and are the first of the grid. But if all send first, all must be resident together.

Peers write recv_buf again only in their next dispatch, after their combine has received this rank's rows or signals, so
after this launch. The order within an (expert, src_rank) segment, of claims or of tokens, is unspecified.
"""

from dataclasses import dataclass
from functools import lru_cache, partial

from epmoe.device import block_idx, device_fn, grid_dim, griddep_launch, griddep_wait, i32, kernel, n_warps
from epmoe_ref.config import EPConfig

from .. import formats, stamps
from ..launch import KernelCall, LaunchConfig, check_limits
from ..params import CACHED, ParameterBlock
from ..status import failed_before
from . import few_tokens, message, peers, receive, send
from .tuning import TUNING, Tuning


@dataclass(frozen=True)
class Build:
    """The compile-time choices of a dispatch kernel.

    few: the most tokens that few_tokens.py sends, -1 for none. are_few: no launch can have more tokens.
    input_scale: a function i -> float32, or None for the number given at the call. id_bytes: size of an id of topk_ids.
    """

    cfg: EPConfig
    threads: int
    trace: bool
    tuning: Tuning
    few: int = -1
    are_few: bool = False
    input_scale: object = None
    id_bytes: int = 4


def parameter_block(cfg) -> ParameterBlock:
    """The fields of the three dispatch kernels. Each uses those that its call fills in."""
    return peers.parameter_block(
        cfg, ("input_tokens", 1), ("topk_ids", 1), ("clean_topk_ids", 1), ("input_scale", 1),
        ("format_handler", len(formats.of(cfg).output_fields) + 1), ("row_offsets", 1), ("expert_ids", 1),
        ("src_info", 1), ("recv_counts", 1))


def _sending(build):
    """Device function send(call, n_senders, failed) -> whether it gave up: send.make or few_tokens.make."""
    few, n_ranks = build.few, build.cfg.n_ranks
    if build.are_few:
        return few_tokens.make(build)
    send_many = send.make(build)
    if few < 0:
        return send_many
    send_few = few_tokens.make(build)

    @device_fn
    def send_tokens(call, n_senders, failed):
        if call.num_tokens <= few and n_senders >= n_ranks:
            return send_few(call, n_senders, failed)
        return send_many(call, n_senders, failed)

    return send_tokens


@lru_cache(CACHED)
def _compile_async(build):
    begin, send_tokens = peers.beginning(build, parameter_block(build.cfg)), _sending(build)

    @kernel(max_threads=build.threads, words=parameter_block(build.cfg).n_words, shmem=peers.crosses_worlds(build.cfg))
    def dispatch_async(params, num_tokens, my_rank):
        griddep_launch()            # dispatch_wait, if it is next, may be there when this one ends
        call = begin(params, num_tokens, my_rank)
        send_tokens(call, grid_dim(), failed_before(call.status))

    return dispatch_async


@lru_cache(CACHED)
def _compile_wait(build):
    begin, receiving = peers.beginning(build, parameter_block(build.cfg)), receive.make(build)
    mark = stamps.make(build.trace)

    @kernel(max_threads=build.threads, words=parameter_block(build.cfg).n_words)
    def dispatch_wait(params, num_tokens, my_rank):
        call = begin(params, num_tokens, my_rank)
        griddep_wait()              # dispatch_async may still be running
        if receiving.receive(call, block_idx(), grid_dim(), failed_before(call.status)):
            receiving.leave(call)
        mark(call, stamps.LEFT)

    return dispatch_wait


@lru_cache(CACHED)
def _compile_fused(build):
    begin, send_tokens = peers.beginning(build, parameter_block(build.cfg)), _sending(build)
    receiving, senders_of, mark = receive.make(build), _senders_of(build), stamps.make(build.trace)
    batch = send.batch_of(build.cfg, build.tuning)
    may_send_first = build.cfg.max_tokens_per_rank > build.tuning.turns_from * batch

    @device_fn
    def send_and_receive(call, n_senders, failed):
        """Whether the block has yet to leave (step 7). If all_send_first, every block sends, then receives."""
        receiver, n_receivers = i32(block_idx() - n_senders), i32(grid_dim() - n_senders)
        all_send_first = may_send_first and call.num_tokens > batch * n_senders
        if all_send_first:
            n_senders, n_receivers = i32(grid_dim()), i32(grid_dim())
            if receiver < 0:
                receiver = i32(receiver + n_receivers)
        stays = True
        if block_idx() < n_senders:
            stays = not send_tokens(call, n_senders, failed)
            if not all_send_first:
                return stays
        if stays:
            stays = receiving.receive(call, receiver, n_receivers, failed)
        return stays

    @kernel(max_threads=build.threads, words=parameter_block(build.cfg).n_words, shmem=peers.crosses_worlds(build.cfg))
    def dispatch(params, num_tokens, my_rank):
        call = begin(params, num_tokens, my_rank)
        if send_and_receive(call, senders_of(num_tokens), failed_before(call.status)):
            receiving.leave(call)
        mark(call, stamps.LEFT)

    return dispatch


def _senders_of(build):
    """Device function num_tokens -> how many blocks of the fused kernel send, unless all send first."""
    cfg, tuning, shares = build.cfg, build.tuning, message.shares_payloads(build.cfg)
    n_ranks, n_payloads = cfg.n_src_ranks, min(cfg.top_k, cfg.n_src_ranks)
    few = tuning.few_tokens if few_tokens.applies(cfg, tuning) else -1
    of_8, at_once_of_8 = tuning.senders_of_8, tuning.at_once_of_8

    @device_fn
    def senders_of(num_tokens):
        n_senders = i32(max(1, i32(grid_dim() * of_8 // 8)))
        at_once = i32(max(min(n_senders, n_ranks), i32(grid_dim() * at_once_of_8 // 8)))
        if num_tokens <= few and n_senders >= n_ranks:
            n_senders = i32(n_ranks)
        elif shares and num_tokens * n_payloads <= n_warps() * at_once:     # a warp for each payload
            n_senders = at_once
        return n_senders

    return senders_of


def build_of(cfg, launch, tuning, *options) -> Build:
    """The Build for a launch configuration. options: input_scale and id_bytes. Errors: EPValueError."""
    check_limits(cfg)
    few = few_tokens.most(cfg, launch, tuning)
    return Build(cfg, launch.threads, launch.trace, tuning, few, few >= cfg.max_tokens_per_rank, *options)


def _call(compile, halves, cfg, launch, tuning, *options, programmatic=False):
    """The KernelCall of a kernel. halves: for few_tokens.size. options: input_scale and id_bytes."""
    launch = launch or LaunchConfig()
    build = build_of(cfg, launch, tuning, *options)
    return KernelCall(cfg, launch, parameter_block(cfg), lambda *types: compile(build),
                      size=partial(few_tokens.size, cfg, tuning, halves), programmatic=programmatic)


def dispatch_async_kernel(cfg, launch=None, *, input_scale=None, id_bytes=4, tuning=TUNING) -> KernelCall:
    """Makes the kernel that sends this rank's tokens to the owners of their experts: steps 1 to 4 of this module.

    Its launch ends when this rank's messages and signals are written.

    cfg: EPConfig. launch: LaunchConfig, default LaunchConfig(). input_scale: a function i -> float32, called with 0, or
    None for the number given at the call. id_bytes: 4 or 8, size of an id. tuning: for tests. Equal arguments give the
    same compiled kernel. Errors: EPValueError. Source: the dispatch_async_kernel page (docs/pages.md).
    """
    return _call(_compile_async, "sends", cfg, launch, tuning, input_scale, id_bytes)


def dispatch_wait_kernel(cfg, launch=None, *, tuning=TUNING) -> KernelCall:
    """Makes the kernel that waits for all messages of the round and groups them by expert: steps 5 to 7.

    Its launch ends when they are in their rows. The order of rows in a segment, (expert, src_rank), is not specified.

    cfg, launch, tuning: as in dispatch_async_kernel. Errors: EPValueError. Source: the
    dispatch_wait_kernel page (docs/pages.md).
    """
    return _call(_compile_wait, "receives", cfg, launch, tuning, programmatic=True)


def dispatch_kernel(cfg, launch=None, *, input_scale=None, id_bytes=4, tuning=TUNING) -> KernelCall:
    """Makes one kernel of dispatch_async and dispatch_wait: all steps in one launch.

    If few_tokens.applies, up to 8 tokens take fewer blocks and threads. The payload of a token is written to recv_buf
    once for each rank; under use_shmem or skip_a2a once for each message. Arguments: as in dispatch_async_kernel.
    Errors: EPValueError. Source: the dispatch_kernel page (docs/pages.md).
    """
    return _call(_compile_fused, "both", cfg, launch, tuning, input_scale, id_bytes)
