"""Barriers of a block, and the operations that the lanes of a warp do together."""

from functools import reduce
from itertools import accumulate
from operator import or_

from greenlet import getcurrent

from epmoe_ref.errors import EPError

from ..arithmetic import max_f32
from .scheduler import NOW

MASK32 = 0xFFFFFFFF


# ---------------------------------------------------------------- block barriers
def barrier(vote=None):
    """Wait for every live thread of the block; returns the list of all votes."""
    NOW.fuel -= 1
    if NOW.fuel < 0:
        NOW.preempt()
    t = getcurrent()
    block = t.block
    votes = block.votes
    votes.append(vote)
    block.arrived.append(t)
    if len(block.arrived) == block.live:
        open_barrier(block)
    else:
        NOW.park(t)
    return votes


def open_barrier(block):
    """All threads have arrived: wake all but the current one."""
    here = getcurrent()
    arrived = block.arrived
    if NOW.detector is not None:
        NOW.detector.barrier([t.actor for t in arrived])
    block.arrived, block.votes = [], []
    NOW.wake(block, [t for t in arrived if t is not here])
    NOW.looks = 0
    NOW.quiet_since = NOW.steps


def syncthreads():
    """bar.sync 0: all threads of the block meet, and see what any of them wrote before."""
    barrier()


def syncthreads_or(p):
    """1 if p is true in any thread of the block; a barrier as well."""
    return 1 if any(barrier(bool(p))) else 0


def syncthreads_count(p):
    """The number of threads of the block in which p is true; a barrier as well."""
    return sum(barrier(bool(p)))


# ---------------------------------------------------------------- warp operations
def meet(kind, value):
    """Wait until every live lane of the warp is at the same operation. Returns (thread, values by lane)."""
    NOW.fuel -= 1
    if NOW.fuel < 0:
        NOW.preempt()
    t = getcurrent()
    warp = t.warp
    if warp.count == 0:
        warp.kind = kind
        warp.vals = vals = [None] * 32
    else:
        vals = warp.vals
        if warp.kind != kind:
            mismatch(t, kind)
    vals[t.lane] = value
    warp.count += 1
    if warp.count == warp.live:
        release_warp(warp)
    else:
        warp.waiting.append(t)
        # NOW.park(t), inlined: this is the most frequent switch
        t.operations += NOW.mark - NOW.fuel
        following = NOW.pick()
        if following is not t:
            following.switch()
        NOW.mark = NOW.fuel
    return t, vals


def release_warp(warp):
    """All lanes have arrived, so wake the waiting ones. syncwarp also orders their memory."""
    if NOW.detector is not None and warp.kind == "syncwarp":
        lanes = warp.block.actors[32 * warp.index : 32 * warp.index + 32]
        NOW.detector.barrier([lanes[i] for i, here in enumerate(warp.vals) if here])
    NOW.wake(warp.block, warp.waiting)
    warp.waiting = []
    warp.count = 0
    NOW.looks = 0
    NOW.quiet_since = NOW.steps


def mismatch(t, kind):
    """Raise EPError because lanes of one warp are at different warp operations."""
    other = t.warp.waiting[0]
    raise EPError(
        "warp operations do not match: %s is at %s (%s) while lane %d waits at %s (%s); all lanes of a warp "
        "must reach the same one"
        % (t.name(), kind, " < ".join(t.where()), other.lane, t.warp.kind, " < ".join(other.where()))
    )


def syncwarp():
    """bar.warp.sync: all lanes meet, and see what any of them wrote before."""
    meet("syncwarp", True)


def shfl_idx(v, lane):
    """v of the given lane (modulo 32)."""
    t, vals = meet("shfl_idx", v)
    w = vals[lane & 31]
    return v if w is None else w


def shfl_xor(v, mask):
    """v of lane (own lane xor mask)."""
    t, vals = meet("shfl_xor", v)
    w = vals[(t.lane ^ mask) & 31]
    return v if w is None else w


def shfl_up(v, d):
    """v of lane (own lane - d); own v if there is no such lane."""
    t, vals = meet("shfl_up", v)
    lane = t.lane - d
    w = vals[lane] if lane >= 0 else None
    return v if w is None else w


def shfl_down(v, d):
    """v of lane (own lane + d); own v if there is no such lane."""
    t, vals = meet("shfl_down", v)
    lane = t.lane + d
    w = vals[lane] if lane < 32 else None
    return v if w is None else w


def _shared_result(vals, compute):
    """The result that all lanes share. The first lane computes it and stores it after the values."""
    if len(vals) == 32:
        vals.append(compute(vals))
    return vals[32]


def _ballot(vals):
    return sum([1 << i for i, x in enumerate(vals) if x])


def _match(vals):
    masks = {}
    for i, x in enumerate(vals):
        masks[x] = masks.get(x, 0) | 1 << i
    return masks


def _of_live_lanes(vals):
    return [x for x in vals if x is not None]


def _sum(vals):
    return _wrap(sum(_of_live_lanes(vals)))


def _inclusive_sums(vals):
    return [_wrap(x) for x in accumulate([0 if x is None else x for x in vals])]


def _largest(vals):
    return max(_of_live_lanes(vals))


def _or(vals):
    return reduce(or_, _of_live_lanes(vals))


def _max(vals):
    out = vals[0]
    for x in vals[1:]:
        if x is not None:
            out = max_f32(out, x)
    return out


def ballot(p):
    """Bit i is set if p is true in lane i."""
    t, vals = meet("ballot", 1 if p else 0)
    return _shared_result(vals, _ballot)


def match_any(v):
    """Mask of the lanes whose v (i32) equals this lane's."""
    t, vals = meet("match_any", v)
    return _shared_result(vals, _match)[v]


def any_lane(p):
    """1 if p is true in any lane."""
    t, vals = meet("any_lane", bool(p))
    return 1 if True in vals else 0


def all_lanes(p):
    """1 if p is true in all lanes."""
    t, vals = meet("all_lanes", bool(p))
    return 0 if False in vals else 1


def warp_broadcast_i32(v, src):
    """v (i32) of lane src, in every lane."""
    t, vals = meet("warp_broadcast_i32", v)
    return vals[src]


def warp_broadcast_u64(v, src):
    """v (u64) of lane src, in every lane."""
    t, vals = meet("warp_broadcast_u64", v)
    return vals[src]


def warp_sum_i32(v):
    """Sum of v (i32) over the lanes, in every lane."""
    t, vals = meet("warp_sum_i32", v)
    return _shared_result(vals, _sum)


def warp_max_i32(v):
    """Largest v (i32) over the lanes, in every lane."""
    t, vals = meet("warp_max_i32", v)
    return _shared_result(vals, _largest)


def warp_or_u32(v):
    """All bits of v (u32) of any lane, in every lane."""
    t, vals = meet("warp_or_u32", v)
    return _shared_result(vals, _or)


def warp_inclusive_sum_i32(v):
    """Sum of v (i32) over this lane and the lanes below it."""
    t, vals = meet("warp_inclusive_sum_i32", v)
    return _shared_result(vals, _inclusive_sums)[t.lane]


def warp_max_f32(v):
    """Largest v (f32) over the lanes, in every lane; NaN is ignored unless all are NaN."""
    t, vals = meet("warp_max_f32", v)
    return _shared_result(vals, _max)


def _wrap(v):
    return (v + 0x80000000 & MASK32) - 0x80000000


# ---------------------------------------------------------------- a thread ends
def leave(t):
    """Thread t has returned from the kernel: barriers and warp operations no longer wait for it."""
    block, warp = t.block, t.warp
    block.live -= 1
    warp.live -= 1
    if warp.waiting and warp.count == warp.live:
        release_warp(warp)
    if block.arrived and len(block.arrived) == block.live:
        open_barrier(block)
