"""combine_async_kernel, combine_wait_kernel and combine_kernel, then the steps that they call.

Sending half. Region A holds for each segment (local_expert, src_rank) the end of its rows and their number. A block
takes a segment and copies row i, where src_info[i] = (t, k), into src_rank's recv_buf at [t, k]. When the whole block
has written, one thread writes the count into src_rank's recv_count at [local_expert, my_rank], with release at system
scope, and zeroes the segment's words of A.

Waiting half. Block 0 waits until every word of recv_count has arrived, resets them, and raises one ready flag for each
block. A block waits for its flag, lowers it, and reduces its tokens.
"""

from epmoe.device import (address_of, block_dim, block_idx, device_fn, f32, grid_dim, i32, lane_id, load16, load_i32,
                          n_warps, st_release_gpu_i32, store16, store_i32, syncthreads, syncthreads_or, syncwarp,
                          thread_idx, u32, u64, warp_id)
from epmoe.layout import combine_msg_bytes
from epmoe_ref.config import READY

from .. import elements
from ..formats.row_copy import copy_part
from ..status import COMBINE_WAIT, FOR_REDUCING, has_failed
from . import arguments, counters, messages, peers, receive, waits
from .launcher import PlainKernel
from .peers import Peers
from .receive import Inbox
from .waits import Waiter


def combine_async_kernel(cfg, launch=None, **page):
    """Makes the kernel that sends the experts' rows back to the ranks of their tokens, and then the signals.

    cfg: EPConfig. launch: LaunchConfig. page: compile-time names of the specification page, see PlainKernel.
    kernel[grid, block, stream](input_tokens, src_info, send_buf_p, recv_buf_ptrs, recv_count_ptrs, ep_counters,
    my_rank): see PlainKernel. Source: the combine_async_kernel page (docs/pages.md).
    """
    options = arguments.options(cfg, launch, page, arguments.COMBINE)
    send_back = _send_back(cfg)

    def combine_async_kernel(input_tokens, src_info, send_buf_p, recv_buf_ptrs, recv_count_ptrs, ep_counters, my_rank,
                             status, timeout_ns):
        if has_failed(status):         # nothing in this launch changes it
            return
        send_back(input_tokens, src_info, send_buf_p, Peers(recv_buf_ptrs, recv_count_ptrs, my_rank), ep_counters)

    return PlainKernel(cfg, options, combine_async_kernel)


def combine_wait_kernel(cfg, launch=None, **page):
    """Makes the kernel that waits for the rows that come back, and reduces them by token.

    cfg, launch, page: as for combine_async_kernel. kernel[grid, block, stream](output_tokens, recv_buf_p,
    recv_count_p, ep_counters, my_rank, topk_ids): see PlainKernel. Without router_weights_wrapper output_tokens is
    [num_tokens, top_k, hidden] and nothing is summed. With fused_shared_expert the launch also takes input_tokens=.
    Source: the combine_wait_kernel page (docs/pages.md).
    """
    options = arguments.options(cfg, launch, page, arguments.COMBINE_REDUCES)
    await_rows, reduce = _await_rows(cfg), _reduce(cfg, options)

    def combine_wait_kernel(output_tokens, recv_buf_p, recv_count_p, ep_counters, my_rank, topk_ids,
                            status, timeout_ns, input_tokens, router_weights_args, epilogue_args):
        if syncthreads_or(has_failed(status)):
            return
        inbox = Inbox(recv_buf_p, recv_count_p, ep_counters, my_rank)
        if await_rows(inbox, Waiter(status, timeout_ns, COMBINE_WAIT)):
            reduce(output_tokens, inbox, topk_ids, input_tokens, (router_weights_args, epilogue_args))

    return PlainKernel(cfg, options, combine_wait_kernel)


def combine_kernel(cfg, launch=None, **page):
    """Makes one kernel of combine_async and combine_wait. All blocks of a launch must be resident together.

    cfg, launch, page: as for combine_wait_kernel. kernel[grid, block, stream](input_tokens, src_info, output_tokens,
    send_buf_p, recv_buf_ptrs, recv_count_ptrs, ep_counters, topk_ids, my_rank): see PlainKernel.
    Source: the combine_kernel page (docs/pages.md).
    """
    options = arguments.options(cfg, launch, page, arguments.COMBINE_REDUCES)
    send_back, await_rows, reduce, world = _send_back(cfg), _await_rows(cfg), _reduce(cfg, options), cfg.p2p_world_size

    def combine_kernel(input_tokens, src_info, output_tokens, send_buf_p, recv_buf_ptrs, recv_count_ptrs, ep_counters,
                       topk_ids, my_rank, status, timeout_ns, router_weights_args, epilogue_args):
        if syncthreads_or(has_failed(status)):
            return
        send_back(input_tokens, src_info, send_buf_p, Peers(recv_buf_ptrs, recv_count_ptrs, my_rank), ep_counters)
        own = my_rank % world
        inbox = Inbox(recv_buf_ptrs[own], recv_count_ptrs[own], ep_counters, my_rank)
        if await_rows(inbox, Waiter(status, timeout_ns, COMBINE_WAIT)):
            reduce(output_tokens, inbox, topk_ids, address_of(input_tokens), (router_weights_args, epilogue_args))

    return PlainKernel(cfg, options, combine_kernel)


def _send_back(cfg):
    """Device function (input_tokens, src_info, send_buf_p, to, ep_counters): the sending half, by all blocks."""
    row_bytes, word = combine_msg_bytes(cfg), counters.words(cfg)
    to_peers, stage = peers.make(cfg, row_bytes), copy_part(row_bytes)
    local, ranks, top_k, max_tokens = cfg.n_local_experts, cfg.n_src_ranks, cfg.top_k, cfg.max_tokens_per_rank
    segment, skip_a2a = word.segment, cfg.skip_a2a

    @device_fn
    def send_row(place, t, k, dst_rank, staged, to):
        """A warp copies the row at `place` to [t, k] of dst_rank, across worlds by way of `staged` in send_buf."""
        lane, offset = i32(lane_id()), u64(t * top_k + k) * u64(row_bytes)
        if not to_peers.is_near(dst_rank, to.my_rank):
            stage(staged, place, 0, 1, lane)
            syncwarp()
            place = staged
        to_peers.write(to, dst_rank, offset, place, lane)

    @device_fn
    def send_rows(input_tokens, src_info, staging, to, first, end, dst_rank):
        """Sends the segment's rows [first, end). staging: its part of send_buf, which has no room for padding rows."""
        rows = u64(address_of(input_tokens))
        row = i32(first + warp_id())
        while row < end:
            t, k = i32(src_info[row, 0]), i32(src_info[row, 1])
            if t >= 0 and t < max_tokens and k >= 0 and k < top_k:      # else the row goes back to nobody
                place, staged = rows + u64(row) * u64(row_bytes), staging + u64(row - first) * u64(row_bytes)
                send_row(u64(place), t, k, dst_rank, u64(staged), to)
            row = i32(row + n_warps())

    @device_fn
    def send_back(input_tokens, src_info, send_buf_p, to, ep_counters):
        i = i32(block_idx())
        while i < local * ranks:
            local_expert, dst_rank = i32(i // ranks), i32(i % ranks)    # the segment's src_rank gets its rows back
            if skip_a2a:
                dst_rank = to.my_rank
            end, count = load_i32(word.a_end(ep_counters, i)) - READY, i32(load_i32(word.a_count(ep_counters, i)))
            staging = u64(send_buf_p) + u64(i * max_tokens) * u64(row_bytes)
            send_rows(input_tokens, src_info, u64(staging), to, i32(end - count), i32(end), dst_rank)
            syncthreads()               # the whole block has written, and has read A
            if thread_idx() == 0:
                to_peers.signal(to, dst_rank, segment(local_expert, to.my_rank), count)
                store_i32(word.a_end(ep_counters, i), i32(0))
                store_i32(word.a_count(ep_counters, i), i32(0))
            i = i32(i + grid_dim())

    return send_back


def _await_rows(cfg):
    """Device function (inbox, waiter) -> whether all rows have come back; by all blocks."""
    word, await_signals = counters.words(cfg), waits.all_signals(cfg, device_fn(lambda ep_counters, i, count: None))

    @device_fn
    def raise_flags(inbox):
        """Block 0 raises a flag for each block. The flags release what its threads acquired before the barrier."""
        block = i32(thread_idx())
        while block < grid_dim():
            st_release_gpu_i32(word.combine_ready(inbox.ep_counters, block), i32(READY))
            block = i32(block + block_dim())

    @device_fn
    def await_rows(inbox, waiter):
        if block_idx() == 0 and await_signals(inbox, waiter):
            raise_flags(inbox)
        ok = True
        if thread_idx() == 0:
            flag = word.combine_ready(inbox.ep_counters, block_idx())
            ok = waits.wait_for_counter(flag, READY, waits.with_longer_timeout(waiter), FOR_REDUCING, block_idx())
            if ok:
                store_i32(flag, i32(0))
        return not syncthreads_or(not ok)

    return await_rows


def _reduce(cfg, options):
    """Device function (output_tokens, inbox, topk_ids, shared_rows, functions_args): all blocks reduce this rank's
    tokens. shared_rows: address of the shared expert's rows. functions_args: (of router_weights, of the epilogue).

    A result is fma(w, x, sum) over ascending k, from +0.0 in float32, rounded once to the output type. Then the shared
    expert's row is added and the sum is rounded. Then the epilogue is applied.
    """
    vectors = elements.make(cfg.combine_dtype)      # 16 bytes of the output type
    clean, share = messages.ids(cfg).clean, receive.shared_expert_share(cfg)
    row_bytes, top_k, local, skip_a2a = combine_msg_bytes(cfg), cfg.top_k, cfg.n_local_experts, cfg.skip_a2a
    n_vectors, fused_shared_expert, per_vector = row_bytes // 16, cfg.fused_shared_expert, vectors.n
    router_weights = device_fn(options.router_weights or arguments.given_weights)
    apply_epilogue, stores = _epilogue(options, vectors)

    @device_fn
    def takes_part(topk_ids, t, k, my_rank):
        expert = clean(topk_ids, t, k)
        return expert >= 0 and (not skip_a2a or expert // local == my_rank)

    @device_fn
    def summed(inbox, topk_ids, t, i, weights_args):
        """Vector i of the weighted sum over the token's rows, in the output type."""
        sums = vectors.zeros()
        k = i32(0)
        while k < top_k:
            if takes_part(topk_ids, t, k, inbox.my_rank):
                row = u64(inbox.recv_buf_p) + u64(t * top_k + k) * u64(row_bytes)
                weight = f32(router_weights(t, k, *weights_args))
                sums = vectors.accumulate(weight, load16(row + u64(16 * i)), sums)
            k = i32(k + 1)
        return vectors.pack(sums)

    @device_fn
    def with_shared_expert(vector, shared_rows, row, n_shared, i):
        """Adds row `row` of the rank's n_shared shared rows. Outside of them it adds +0, which turns -0 into 0."""
        shared = u32(0), u32(0), u32(0), u32(0)
        if row >= 0 and row < n_shared:
            shared = load16(u64(shared_rows) + u64(row) * u64(row_bytes) + u64(16 * i))
        return vectors.pack(vectors.add(vectors.unpack(vector), shared))

    @device_fn
    def reduce(output_tokens, inbox, topk_ids, shared_rows, functions_args):
        num_tokens, out = i32(output_tokens.shape[0]), u64(address_of(output_tokens))
        first, n_shared = share(num_tokens, inbox.my_rank)
        t = i32(block_idx())
        while t < num_tokens:
            i = i32(thread_idx())
            while i < n_vectors:
                q = summed(inbox, topk_ids, t, i, functions_args[0])
                if fused_shared_expert:
                    q = with_shared_expert(q, shared_rows, i32(t - first), n_shared, i)
                q = apply_epilogue(t, i32(i * per_vector), q, functions_args[1])
                if stores:
                    store16(out + u64(t) * u64(row_bytes) + u64(16 * i), q[0], q[1], q[2], q[3])
                i = i32(i + block_dim())
            t = i32(t + grid_dim())

    @device_fn
    def copy_unreduced(output_tokens, inbox, topk_ids, shared_rows, functions_args):
        out = u64(address_of(output_tokens))
        j = i32(block_idx())
        while j < output_tokens.shape[0] * top_k:
            at = u64(j) * u64(row_bytes)
            there = takes_part(topk_ids, i32(j // top_k), i32(j % top_k), inbox.my_rank)
            i = i32(thread_idx())
            while i < n_vectors:
                q = u32(0), u32(0), u32(0), u32(0)
                if there:
                    q = load16(u64(inbox.recv_buf_p) + at + u64(16 * i))
                store16(out + at + u64(16 * i), q[0], q[1], q[2], q[3])
                i = i32(i + block_dim())
            j = i32(j + grid_dim())

    return copy_unreduced if options.router_weights is None else reduce


def _epilogue(options, vectors):
    """(apply, stores). apply: device function (token, col, vector, args) -> vector; stores: whether reduce stores it.

    epilogue_fn returns each element's value. elementwise_lambda_fn stores it itself, and then reduce stores nothing.
    """
    if options.elementwise is None:
        return device_fn(lambda token, col, vector, args: vector), True
    function, stores = device_fn(options.elementwise), not options.elementwise_stores

    @device_fn
    def value_of(at, args):
        return f32(function(at[0], at[1], at[2], *args))

    @device_fn
    def store(at, args):
        function(at[0], at[1], at[2], *args)
        return at[2]

    each = vectors.each(value_of if stores else store)

    @device_fn
    def apply(token, col, vector, args):
        return vectors.pack(each(token, col, vectors.unpack(vector), args))

    return apply, stores
