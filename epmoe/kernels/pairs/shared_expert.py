"""The fused shared expert: the rank's own tokens become the rows of group 0, ahead of all routed rows.

Region F (send_buf_ready) counts the tokens of the share that senders have encoded into send_buf. Region G
(shared_expert_started) assigns the rows to the warps that copy them. If the payload is the input row itself, the rows
are copied straight from input_tokens, and F is not used.
"""

from epmoe import layout
from epmoe.device import (atomic_add_relaxed_gpu_i32, device_fn, i32, lane_id, red_add_release_gpu_i32, store_i32,
                          syncthreads_or, thread_idx, u64, warp_broadcast_i32)

from .. import formats
from ..params import BF16_BYTES, namespace
from ..plain import counters
from ..plain.receive import shared_expert_share
from ..wait import wait_for_own_blocks
from ..status import DISPATCH_WAIT, FOR_SEND_BUF


def make(cfg):
    """Namespace "shared_expert" of device functions; they do nothing without a fused shared expert.

    encoded(call, token): one thread counts a token as encoded, after the barrier that follows the encoding.
    put_shared(call) -> whether it had to give up: receiving blocks write the rows of group 0.
    """
    fmt, word, share = formats.of(cfg), counters.words(cfg), shared_expert_share(cfg)
    fused, direct, decode = cfg.fused_shared_expert, fmt.direct, fmt.decode
    row_bytes, msg_bytes = cfg.hidden * BF16_BYTES, layout.message(cfg).msg_bytes

    @device_fn
    def encoded(call, token):
        if fused and not direct:
            first, n_shared = share(call.num_tokens, call.my_rank)
            if token >= first and token < first + n_shared:
                red_add_release_gpu_i32(word.f(call.ep_counters, 0), i32(1))      # acquired by put_shared

    @device_fn
    def put_shared(call):
        if not fused:
            return False
        (first, n_shared), lane, row = share(call.num_tokens, call.my_rank), lane_id(), i32(0)
        if not direct:
            ok = True
            if thread_idx() == 0:
                ok = wait_for_own_blocks(word.f(call.ep_counters, 0), n_shared, call.status, call.timeout_ns,
                                         DISPATCH_WAIT, FOR_SEND_BUF, 0)
            if syncthreads_or(not ok):                                  # thread 0 acquired for all
                return True
        while row < n_shared:
            claimed = i32(atomic_add_relaxed_gpu_i32(word.g(call.ep_counters, 0), i32(1))) if lane == 0 else i32(0)
            row = i32(warp_broadcast_i32(claimed, 0))
            if row < n_shared:
                payloads = call.input_tokens if direct else call.send_buf_p
                payload = payloads + u64(row_bytes if direct else msg_bytes) * u64(first + row)
                decode(payload, call.format_handler, formats.RowPlace(row, i32(0), row, i32(0)), 0, 1, lane)
                if lane < 2:
                    store_i32(call.src_info + u64(4) * u64(2 * row + lane), i32(-1))     # no rank gets it back
        return False

    return namespace("shared_expert", encoded=encoded, put_shared=put_shared)
