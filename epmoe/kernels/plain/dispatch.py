"""dispatch_async_kernel, dispatch_wait_kernel and dispatch_kernel, then the steps of their sending half.

Sending half. A block takes a token t and encodes its message into send_buf. For every pair (t, k), expert =
topk_ids[t, k] and dst_rank is its owner. A warp claims slot `reserved[local_expert, dst_rank]++`, copies the message
into dst_rank's recv_buf at [local_expert, my_rank, slot], and then adds one to `finished` with release. Nothing is sent
for id -1. Any other invalid id is treated as -1, and counted in the status words (messages.ids). For every expert a
warp counts its tokens in topk_ids. One thread waits with acquire until `finished` has reached that count, and writes
the count into dst_rank's recv_count at [local_expert, my_rank], with release at system scope. That is the signal. It is
sent for every expert, even if the count is 0.
Waiting half: receive.py. Every kernel first looks at FAILED (waits.py), and does nothing if it is set.

A rank's dispatch i+1 comes after its combine_wait i. Then all peers have sent combine i, so all have read dispatch i.
If dispatch i+1 began earlier, it could overwrite messages in a peer's recv_buf, and counts in its recv_count, that the
peer has not read. Its waiting half would overwrite region A, which combine_async i of this rank needs.

With skip_a2a a rank sends only to itself: the pairs and signals of its own experts. The rank axis of segments has
length 1. The ranks divide the shared expert's rows. Combine sums the pairs of a rank's own experts.
"""

from typing import NamedTuple

from epmoe.device import (atomic_add_relaxed_gpu_i32, block_idx, device_fn, f32, grid_dim, i32, lane_id, n_warps,
                          red_add_relaxed_gpu_i32, red_add_release_gpu_i32, store_i32, syncthreads, syncthreads_or,
                          syncwarp, thread_idx, u64, warp_broadcast_i32, warp_id)

from ..status import DISPATCH_ASYNC, DISPATCH_WAIT, FOR_FINISHED, has_failed
from . import arguments, counters, messages, peers, receive, waits
from .counters import namespace
from .launcher import PlainKernel
from .peers import Peers
from .receive import Inbox, Outputs
from .waits import Waiter


class Call(NamedTuple):
    """Arguments of a launch: addresses of the status words and of clean_topk_ids (0: not wanted), input scale."""

    status: int
    clean_topk_ids: int
    input_scale: float


def dispatch_async_kernel(cfg, launch=None, **page):
    """Makes the kernel that sends every pair of this rank, and the signals. Its blocks wait only for each other.

    cfg: EPConfig. launch: LaunchConfig. page: compile-time names of the specification page, see PlainKernel.
    kernel[grid, block, stream](input_tokens, topk_ids, send_buf_p, recv_buf_ptrs, recv_count_ptrs, ep_counters,
    my_rank): see PlainKernel. Slots may be in any order. Source: the dispatch_async_kernel page (docs/pages.md).
    """
    options = arguments.options(cfg, launch, page, arguments.DISPATCH_SENDS)
    send, scale_of = _sending(cfg, options.input_type), device_fn(options.input_scale)

    def dispatch_async_kernel(input_tokens, topk_ids, send_buf_p, recv_buf_ptrs, recv_count_ptrs, ep_counters, my_rank,
                              status, timeout_ns, clean_topk_ids, input_scales_args):
        if syncthreads_or(has_failed(status)):
            return
        inputs, to = (input_tokens, topk_ids), Peers(recv_buf_ptrs, recv_count_ptrs, my_rank)
        call = Call(status, clean_topk_ids, f32(scale_of(i32(0), *input_scales_args)))
        send.messages(inputs, send_buf_p, to, ep_counters, call)
        send.signals(inputs, to, ep_counters, Waiter(status, timeout_ns, DISPATCH_ASYNC))

    return PlainKernel(cfg, options, dispatch_async_kernel)


def dispatch_wait_kernel(cfg, launch=None, **page):
    """Makes the kernel that waits for all signals and writes the rows of this rank's experts.

    cfg, launch, page: as for dispatch_async_kernel. kernel[grid, block, stream](format_handler, row_offsets,
    expert_ids, src_info, recv_buf_p, recv_count_p, ep_counters, my_rank): see PlainKernel. With fused_shared_expert the
    launch also takes send_buf_p= and num_tokens=. Rows of a segment may be in any order.
    Source: the dispatch_wait_kernel page (docs/pages.md).
    """
    options = arguments.options(cfg, launch, page, arguments.DISPATCH)
    wait = receive.make(cfg)

    def dispatch_wait_kernel(format_handler, row_offsets, expert_ids, src_info, recv_buf_p, recv_count_p, ep_counters,
                             my_rank, status, timeout_ns, recv_counts, send_buf_p, num_tokens):
        if syncthreads_or(has_failed(status)):
            return
        out = Outputs(format_handler, row_offsets, expert_ids, src_info, recv_counts)
        inbox, waiter = Inbox(recv_buf_p, recv_count_p, ep_counters, my_rank), Waiter(status, timeout_ns, DISPATCH_WAIT)
        wait.rows(out, inbox, send_buf_p, num_tokens, waiter)

    return PlainKernel(cfg, options, dispatch_wait_kernel)


def dispatch_kernel(cfg, launch=None, **page):
    """Makes one kernel of dispatch_async and dispatch_wait. All blocks of a launch must be resident together.

    cfg, launch, page: as for dispatch_async_kernel. kernel[grid, block, stream](input_tokens, topk_ids,
    format_handler, row_offsets, expert_ids, src_info, send_buf_p, recv_buf_ptrs, recv_count_ptrs, ep_counters,
    my_rank): see PlainKernel. Source: the dispatch_kernel page (docs/pages.md).
    """
    options = arguments.options(cfg, launch, page, arguments.DISPATCH_SENDS)
    send, wait, world = _sending(cfg, options.input_type), receive.make(cfg), cfg.p2p_world_size
    scale_of = device_fn(options.input_scale)

    def dispatch_kernel(input_tokens, topk_ids, format_handler, row_offsets, expert_ids, src_info, send_buf_p,
                        recv_buf_ptrs, recv_count_ptrs, ep_counters, my_rank,
                        status, timeout_ns, clean_topk_ids, recv_counts, input_scales_args):
        if syncthreads_or(has_failed(status)):
            return
        inputs, to = (input_tokens, topk_ids), Peers(recv_buf_ptrs, recv_count_ptrs, my_rank)
        call = Call(status, clean_topk_ids, f32(scale_of(i32(0), *input_scales_args)))
        send.messages(inputs, send_buf_p, to, ep_counters, call)
        send.signals(inputs, to, ep_counters, Waiter(status, timeout_ns, DISPATCH_ASYNC))
        own, waiter = my_rank % world, Waiter(status, timeout_ns, DISPATCH_WAIT)
        inbox = Inbox(recv_buf_ptrs[own], recv_count_ptrs[own], ep_counters, my_rank)
        out = Outputs(format_handler, row_offsets, expert_ids, src_info, recv_counts)
        wait.rows(out, inbox, send_buf_p, input_tokens.shape[0], waiter)

    return PlainKernel(cfg, options, dispatch_kernel)


def _sending(cfg, input_type):
    """Namespace "send": the steps of the sending half, called by all threads of every block.

    messages(inputs, send_buf_p, to, ep_counters, call) sends all pairs of this rank. signals(inputs, to, ep_counters,
    waiter) sends all counts. inputs: (input_tokens, topk_ids). to: Peers.
    """
    word, ids, message = counters.words(cfg), messages.ids(cfg), messages.make(cfg, input_type)
    to_peers, share = peers.make(cfg, message.n_bytes), receive.shared_expert_share(cfg)
    segment, local, top_k, slots = word.segment, cfg.n_local_experts, cfg.top_k, cfg.max_tokens_per_rank
    skip_a2a, fused_shared_expert, p2p_world_size = cfg.skip_a2a, cfg.fused_shared_expert, cfg.p2p_world_size
    n_signals = local if skip_a2a else cfg.n_experts

    @device_fn
    def send_pair(place, expert, to, ep_counters):
        """A warp sends the message at `place` to the owner of `expert`. The ids of a token differ, so slot < slots."""
        lane, dst_rank, local_expert = i32(lane_id()), i32(expert // local), i32(expert % local)
        i = segment(local_expert, dst_rank)
        slot = i32(0)
        if lane == 0:
            slot = i32(atomic_add_relaxed_gpu_i32(word.reserved(ep_counters, i), i32(1)))
        slot = i32(warp_broadcast_i32(slot, 0))
        there = u64(segment(local_expert, to.my_rank)) * u64(slots) + u64(slot)     # [local_expert, my_rank, slot]
        to_peers.write(to, dst_rank, message.at(u64(0), there), place, lane)
        syncwarp()                                          # all lanes have written their part
        if lane == 0:
            red_add_release_gpu_i32(word.finished(ep_counters, i), i32(1))

    @device_fn
    def send_pairs(topk_ids, t, place, to, ep_counters, call):
        """A block sends token t, whose message is at `place`. A warp takes every n_warps-th k."""
        k = i32(warp_id())
        while k < top_k:
            expert = ids.clean(topk_ids, t, k)
            if lane_id() == 0:
                ids.record(topk_ids, t, k, call.status)
                if call.clean_topk_ids != u64(0):
                    store_i32(u64(call.clean_topk_ids) + u64(4) * u64(t * top_k + k), expert)
            if expert >= 0 and (not skip_a2a or expert // local == to.my_rank):
                send_pair(place, expert, to, ep_counters)
            k = i32(k + n_warps())

    @device_fn
    def send_messages(inputs, send_buf_p, to, ep_counters, call):
        input_tokens, topk_ids = inputs
        first, n_shared = share(input_tokens.shape[0], to.my_rank)
        t = i32(block_idx())
        while t < input_tokens.shape[0]:
            place = message.at(send_buf_p, t)
            message.encode(place, input_tokens, topk_ids, t, call.input_scale)
            syncthreads()                                   # the message is whole
            if fused_shared_expert and thread_idx() == 0 and t >= first and t < first + n_shared:
                red_add_release_gpu_i32(word.f(ep_counters, 0), i32(1))     # F: rows of the shared expert in send_buf
            send_pairs(topk_ids, t, place, to, ep_counters, call)
            t = i32(t + grid_dim())

    @device_fn
    def send_signal(expert, count, to, ep_counters, waiter):
        """One thread waits until all messages to `expert` are written, and then signals."""
        dst_rank, local_expert = i32(expert // local), i32(expert % local)
        i = segment(local_expert, dst_rank)
        if waits.wait_for_counter(word.finished(ep_counters, i), count, waiter, FOR_FINISHED, i):
            to_peers.signal(to, dst_rank, segment(local_expert, to.my_rank), count)
            if to_peers.is_near(dst_rank, to.my_rank):
                red_add_relaxed_gpu_i32(word.rank_completion(ep_counters, dst_rank % p2p_world_size), i32(1))

    @device_fn
    def send_signals(inputs, to, ep_counters, waiter):
        """All blocks send signals. A warp takes one expert at a time, under skip_a2a only this rank's experts."""
        input_tokens, topk_ids = inputs
        i = i32(block_idx() + grid_dim() * warp_id())
        while i < n_signals:
            expert = i
            if skip_a2a:
                expert = i32(to.my_rank * local + i)
            count = ids.count(topk_ids, i32(input_tokens.shape[0]), expert, lane_id())
            if lane_id() == 0:
                send_signal(expert, count, to, ep_counters, waiter)
            i = i32(i + grid_dim() * n_warps())

    return namespace("send", messages=send_messages, signals=send_signals)
