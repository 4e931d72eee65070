"""The fused shared expert: the rank's own tokens become the rows of group 0, ahead of all routed rows.

Region F (send_buf_ready) counts the tokens of the share that senders have encoded into send_buf; region G
(shared_expert_started) gives out the rows to the warps that copy them. Where the payload is the input row itself, the
rows come straight from input_tokens and F is not used.
"""

from typing import NamedTuple

from epmoe import layout
from epmoe.device import (atomic_add_relaxed_gpu_i32, device_fn, i32, lane_id, red_add_release_gpu_i32,
                          store_i32, syncthreads_or, thread_idx, u64, warp_broadcast_i32)

from . import counters, formats
from .params import fields_of
from .spin import wait_for_own_blocks
from .status import DISPATCH_WAIT, FOR_SEND_BUF

BF16_BYTES = 2


class SharedExpert(NamedTuple):
    """Device functions; all do nothing without a fused shared expert.

    share(num_tokens, my_rank): (number of rows of group 0, first token of the rank's share).
    encoded(params, n): one thread, when the block has encoded n tokens of the share; behind a barrier.
    pack(params, num_tokens, my_rank): copying blocks write the rows of group 0; returns whether it had to give up.
    """

    share: callable
    encoded: callable
    pack: callable


def share_of(cfg):
    """Device function (num_tokens, my_rank) -> (rows of group 0, first token): all tokens, or the rank's share."""
    fused, divided, world = cfg.fused_shared_expert, cfg.skip_a2a, cfg.allreduce_world_size

    @device_fn
    def share(num_tokens, my_rank):
        n_rows, first = i32(0), i32(0)
        if fused:
            n_rows = i32(num_tokens)
            if divided:
                r = i32(my_rank % world)
                n_rows = i32((num_tokens + world - r - 1) // world)
                first = i32(r * (num_tokens // world) + min(r, i32(num_tokens % world)))
        return n_rows, first

    return share


def make(cfg, block) -> SharedExpert:
    """The functions for one parameter block of the dispatch kernels."""
    fmt, at = formats.of(cfg), counters.words(cfg)
    fused, direct, decode = cfg.fused_shared_expert, fmt.direct, fmt.decode
    row_bytes, msg_bytes = cfg.hidden * BF16_BYTES, layout.message(cfg).msg_bytes
    p_counters, p_status, p_timeout = block.index("ep_counters"), block.index("status"), block.index("timeout_ns")
    p_tokens, p_send = block.index("input_tokens"), block.index("send_buf_p")
    fields, p_src_info = fields_of(block, "format_handler"), block.index("src_info")
    share = share_of(cfg)

    @device_fn
    def encoded(params, n):
        if fused and not direct:
            words = params[p_counters]
            red_add_release_gpu_i32(words + u64(at.f), i32(n))      # acquired by pack

    @device_fn
    def pack(params, num_tokens, my_rank):
        if not fused:
            return False
        lane = lane_id()
        words = params[p_counters]
        n_rows, first = share(num_tokens, my_rank)
        if not direct:
            ok = True
            if thread_idx() == 0:
                ok = wait_for_own_blocks(words + u64(at.f), n_rows, params[p_status],
                                         params[p_timeout], DISPATCH_WAIT, FOR_SEND_BUF, 0)
            if syncthreads_or(not ok):                                  # thread 0 acquired for all
                return True
        tokens, staged = params[p_tokens], params[p_send]
        src_info = params[p_src_info]
        row = i32(0)
        while row < n_rows:
            claimed = i32(0)
            if lane == 0:
                claimed = i32(atomic_add_relaxed_gpu_i32(words + u64(at.g), i32(1)))
            row = i32(warp_broadcast_i32(claimed, 0))
            if row < n_rows:
                if direct:
                    payload = tokens + u64(row_bytes) * u64(first + row)
                else:
                    payload = staged + u64(msg_bytes) * u64(first + row)
                decode(payload, fields(params), row, i32(0), row, i32(0), 0, 1, lane)
                if lane < 2:
                    store_i32(src_info + u64(4) * u64(2 * row + lane), i32(-1))     # it goes back to nobody
        return False

    return SharedExpert(share, encoded, pack)


def formats_with_tiles(fmt) -> bool:
    """Whether the format keeps scales in 128-row tiles, whose places begin_group and finish_group settle."""
    return "scales_offset" in fmt.output_fields
