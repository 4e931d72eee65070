"""Combine of small batches without signals: each 32-bit word of a row is its own ready flag.

Until a row arrives, every 32-bit word of the buffer is the sentinel ABSENT, all ones, which is a NaN in every output
type. Rows are stored relaxed at system scope. Their receiver polls the words that it is going to sum until none is
ABSENT. By the PTX memory model each of the four words of a 16-byte access is read and written as a whole, so a thread
that sees another value sees the word itself. No order between words is needed. No release waits for acknowledgements,
no signal follows the row, and no second load fetches it. The name "Lamport" for these buffers is NCCL's and TensorRT-LLM's,
after Lamport's queue without locks.

Conditions. A row that contains the word ABSENT gets NAN instead. This gives the same sum, as the bits of a NaN result
are unspecified; rows that are not summed use signals. A thread that has taken a vector restores ABSENT. This is safe
because the next round's rows arrive only after this rank has dispatched again. A rank without rows for a peer must
still tell it that it has left the dispatch. So its combine begins with a word in recv_count at [0, my_rank], BEGUN,
released, which the receiver waits for last, and resets. The last block that has read region A resets it. The other
words of recv_count are neither written nor read.

A row whose src_info is invalid is not sent. Its receiver cannot know this, and its wait expires.
"""

from epmoe import layout
from epmoe.device import (any_lane, atomic_or_relaxed_gpu_u32, block_idx, device_fn, globaltimer, grid_dim, i32, lane_id,
                          ld_acquire_sys_u64, load16_relaxed_sys, nanosleep, store16, store16_relaxed_sys,
                          store_u64, u32, u64, warp_id)
from epmoe.layout import MAX_FINITE

from .reducers import Taking
from .spin import POLLS_PER_LOOK, gives_up
from .status import COMBINE_WAIT, FOR_ROWS, MISSING_RANKS, record_expired

ABSENT = layout.ABSENT
NAN = 0x7FFF7FFF        # not ABSENT, and a NaN wherever ABSENT is one: in bf16, fp16 and float32
BEGUN = 1
NAP_NS = 100            # between two looks at rows that have not come
VECTOR = 16             # bytes


def applies(cfg, wanted, router_weights):
    """Whether a fused combine may use this, if requested."""
    return wanted and layout.has_lamport_buf(cfg) and router_weights is not None


def recv_buf_name(cfg, wanted, router_weights):
    """The region of epmoe.layout that recv_buf_ptrs of that combine are of."""
    return "combine_lamport_buf" if applies(cfg, wanted, router_weights) else "combine_recv_buf"


@device_fn
def store_row(place, a, b, c, d):
    """Stores 16 bytes of a row at its receiver's."""
    store16_relaxed_sys(place, _present(a), _present(b), _present(c), _present(d))


@device_fn
def _present(word):
    if word == u32(ABSENT):
        word = u32(NAN)
    return word


@device_fn
def is_absent(q):
    """Whether a word of a vector has not arrived."""
    return q[0] == u32(ABSENT) or q[1] == u32(ABSENT) or q[2] == u32(ABSENT) or q[3] == u32(ABSENT)


def ending(cfg, block):
    """Device function await_begun(params, status): one warp of the launch waits until all ranks have begun."""
    p_count, p_timeout, n_ranks = block.index("recv_count_p"), block.index("timeout_ns"), cfg.n_ranks

    @device_fn
    def await_begun(params, status):
        if block_idx() == grid_dim() - 1 and warp_id() == 0 and lane_id() < n_ranks:
            word = params[p_count] + u64(8) * u64(lane_id())
            timeout_ns, since, polls, goes_on = params[p_timeout], u64(globaltimer()), 0, True
            # acquire: what that rank has read in the dispatch before, which this rank's next one overwrites
            while goes_on and u64(ld_acquire_sys_u64(word)) == u64(MAX_FINITE):
                polls += 1
                if polls % POLLS_PER_LOOK == 0 and gives_up(status, since, timeout_ns):
                    atomic_or_relaxed_gpu_u32(status + u64(4 * MISSING_RANKS), u32(u32(1) << u32(lane_id())))
                    record_expired(status, COMBINE_WAIT, FOR_ROWS, -1, 0, -1)
                    goes_on = False
            if goes_on:
                store_u64(word, u64(MAX_FINITE))

    return await_begun


def taking(cfg, block):
    """The Taking of reducers.py: each lane polls its own vectors. Rows that are not summed have none."""
    bytes_a_row, top_k, n_ranks = layout.combine_msg_bytes(cfg), cfg.top_k, cfg.n_src_ranks
    p_status, p_timeout = block.index("status"), block.index("timeout_ns")

    def slot(j):
        """Two device functions for slot first + j: (late) -> whether it is late; its vector, put back if it has come."""
        bit = 1 << j

        @device_fn
        def look(late, q, place, first):
            if j < top_k:
                if u32(late) & u32(bit) != u32(0):
                    q = load16_relaxed_sys(place + u64(first + j) * u64(bytes_a_row))
            return q

        @device_fn
        def come(late, q, place, first):
            if j < top_k:
                if u32(late) & u32(bit) != u32(0) and not is_absent(q):
                    late = u32(late & u32(~bit & 0xFF))
                    store16(place + u64(first + j) * u64(bytes_a_row), u32(ABSENT), u32(ABSENT), u32(ABSENT),
                            u32(ABSENT))
            return late

        return look, come

    (look0, come0), (look1, come1), (look2, come2), (look3, come3) = (slot(j) for j in range(4))
    (look4, come4), (look5, come5), (look6, come6), (look7, come7) = (slot(j) for j in range(4, 8))

    @device_fn
    def give_up(params, late, entry, first):
        """Records the ranks whose rows are missing."""
        status, k, lane = params[p_status], i32(0), i32(lane_id())
        while k < 8:
            if any_lane(((u32(late) >> u32(k)) & u32(1)) != u32(0)):
                if lane == first + k:
                    atomic_or_relaxed_gpu_u32(status + u64(4 * MISSING_RANKS),
                                              u32(u32(1) << u32(u32(entry) % u32(n_ranks))))
                    record_expired(status, COMBINE_WAIT, FOR_ROWS, entry, 0, -1)
            k = i32(k + 1)

    @device_fn
    def has_to_end(params, since):
        return gives_up(params[p_status], since, params[p_timeout])

    @device_fn
    def take(params, flags, entry, wanted, first, place, is_own):
        none = (u32(0), u32(0), u32(0), u32(0))
        q0, q1, q2, q3, q4, q5, q6, q7 = none, none, none, none, none, none, none, none
        late, polls, since, ok = u32(u32(wanted) >> u32(first) & u32(0xFF)), 0, u64(0), True
        if not is_own:              # whose lane puts ABSENT back as soon as it has seen it
            late = u32(0)
        while ok and late != u32(0):
            q0, q1, q2 = look0(late, q0, place, first), look1(late, q1, place, first), look2(late, q2, place, first)
            q3, q4, q5 = look3(late, q3, place, first), look4(late, q4, place, first), look5(late, q5, place, first)
            q6, q7 = look6(late, q6, place, first), look7(late, q7, place, first)
            late = come0(come1(late, q1, place, first), q0, place, first)
            late = come2(come3(late, q3, place, first), q2, place, first)
            late = come4(come5(late, q5, place, first), q4, place, first)
            late = come6(come7(late, q7, place, first), q6, place, first)
            polls += 1
            if late != u32(0):
                nanosleep(u32(NAP_NS))
                if polls % POLLS_PER_LOOK == 0:
                    if since == u64(0):
                        since = u64(globaltimer())
                    elif has_to_end(params, since):
                        ok = False
        failed = any_lane(not ok)
        if failed != 0:
            give_up(params, late, entry, first)
        return q0, q1, q2, q3, q4, q5, q6, q7, failed == 0

    return Taking(take, None)
