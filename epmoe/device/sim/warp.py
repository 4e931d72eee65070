"""Barriers of a block, and the operations that the lanes of a warp do together."""

import sys
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
    frame = sys._getframe(2)
    block.arrived.append(t)
    block.calls.append((id(frame.f_code), frame.f_lasti))
    if len(block.arrived) == block.live:
        open_barrier(block)
    else:
        NOW.park(t)
    return votes


def open_barrier(block):
    """All threads have arrived: wake all but the current one."""
    here = getcurrent()
    arrived = block.arrived
    if block.calls.count(block.calls[0]) < len(arrived):
        check_aligned(arrived, block.calls)
    if NOW.detector is not None:
        NOW.detector.barrier([t.actor for t in arrived])
    block.arrived, block.calls, block.votes = [], [], []
    NOW.wake(block, [t for t in arrived if t is not here])
    NOW.looks = 0
    NOW.quiet_since = NOW.steps


def check_aligned(arrived, calls):
    """Raise EPError if lanes of one warp are at different calls. bar.sync is an aligned instruction."""
    first = {}  # warp -> (its first lane here, that lane's call)
    for t, call in zip(arrived, calls):
        other, its_call = first.setdefault(t.warp, (t, call))
        if its_call != call:
            raise EPError(
                "barriers do not match: %s waits at %s, and lane %d of its warp at %s; all lanes of a warp must "
                "reach the same syncthreads: move it out of the branch"
                % (t.name(), " < ".join(t.where()), other.lane, " < ".join(other.where()))
            )


def syncthreads():
    """bar.sync 0: all threads of the block meet, and see what any of them wrote before.

    All lanes of a warp must reach the same call. Threads that have ended are not waited for.
    """
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


class Undefined:
    """What a shuffle returns for a lane that has ended or does not exist: PTX leaves it undefined. To use it is an error."""

    __array_ufunc__ = None  # so that NumPy's numbers leave operations on it to this class

    def __init__(self, t, kind, lane):
        self.text = "%s at %s reads lane %d, which has ended or does not exist" % (
            t.name(),
            " < ".join((kind, *t.where())),
            lane,
        )

    def use(self, *_):
        raise EPError(
            self.text + ": the result is undefined, and it is used; keep all 32 lanes in the shuffle, or ignore "
            "the results of such lanes"
        )


for _name in (
    "add sub mul truediv floordiv mod divmod pow lshift rshift and or xor radd rsub rmul rtruediv rfloordiv rmod "
    "rdivmod rpow rlshift rrshift rand ror rxor eq ne lt le gt ge neg pos abs invert int float index bool hash array"
).split():
    setattr(Undefined, "__%s__" % _name, Undefined.use)


def of_lane(t, vals, lane, kind):
    """The value of a lane, if it takes part."""
    v = vals[lane]
    return Undefined(t, kind, lane) if v is None else v


def shfl_idx(v, lane):
    """v of the given lane (modulo 32). Undefined if that lane has ended."""
    t, vals = meet("shfl_idx", v)
    return of_lane(t, vals, lane & 31, "shfl_idx")


def shfl_xor(v, mask):
    """v of lane (own lane xor mask). Undefined if that lane has ended."""
    t, vals = meet("shfl_xor", v)
    return of_lane(t, vals, (t.lane ^ mask) & 31, "shfl_xor")


def shfl_up(v, d):
    """v of lane (own lane - d); own v if that is below 0. Undefined if that lane has ended."""
    t, vals = meet("shfl_up", v)
    lane = t.lane - d
    return v if lane < 0 else of_lane(t, vals, lane, "shfl_up")


def shfl_down(v, d):
    """v of lane (own lane + d); own v if that is above 31. Undefined if that lane has ended."""
    t, vals = meet("shfl_down", v)
    lane = t.lane + d
    return v if lane > 31 else of_lane(t, vals, lane, "shfl_down")


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
    return [_wrap(x) for x in accumulate([0 if x is None else x for x in vals])]  # above an ended lane: not returned


def _largest(vals):
    return max(_of_live_lanes(vals))


def _or(vals):
    return reduce(or_, _of_live_lanes(vals))


def _max(vals):
    return reduce(max_f32, vals)


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
    """v (i32) of lane src (modulo 32), in every lane. Undefined if that lane has ended."""
    t, vals = meet("warp_broadcast_i32", v)
    return of_lane(t, vals, src & 31, "warp_broadcast_i32")


def warp_broadcast_u64(v, src):
    """v (u64) of lane src (modulo 32), in every lane. Undefined if that lane has ended."""
    t, vals = meet("warp_broadcast_u64", v)
    return of_lane(t, vals, src & 31, "warp_broadcast_u64")


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
    """Sum of v (i32) over this lane and the lanes below it. Undefined if one of those has ended."""
    t, vals = meet("warp_inclusive_sum_i32", v)
    if None in vals[: t.lane]:
        return of_lane(t, vals, vals.index(None), "warp_inclusive_sum_i32")
    return _shared_result(vals, _inclusive_sums)[t.lane]


def warp_max_f32(v):
    """Largest v (f32) over the lanes, in every lane; NaN is ignored unless all are NaN. Undefined if a lane has ended."""
    t, vals = meet("warp_max_f32", v)
    if None in vals:
        return of_lane(t, vals, vals.index(None), "warp_max_f32")
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
