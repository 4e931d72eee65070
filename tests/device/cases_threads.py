"""Cases of ids, time, warp operations and votes."""

import numpy as np
from case_table import FLOATS, LONG, OUT, VALUES, case, intrinsic
from cases_numbers import number

from epmoe import device
from epmoe.device import globaltimer, kernel, load_f32, load_i32, load_u32, nanosleep, store_i32, thread_idx, u32, u64


def tells_id(op):
    @kernel()
    def tells(params, num_tokens, my_rank):
        store_i32(params + u64(OUT) + u64(4 * (thread_idx() + device.block_idx() * device.block_dim())), op())

    return tells


_thread = np.tile(np.arange(80), 3)
for _name, _text, _expected in (
    ("thread_idx", r"%tid\.x", _thread),
    ("block_idx", r"%ctaid\.x", np.repeat(np.arange(3), 80)),
    ("block_dim", r"%ntid\.x", np.full(240, 80)),
    ("grid_dim", r"%nctaid\.x", np.full(240, 3)),
    ("lane_id", r"%laneid", _thread % 32),
    ("warp_id", r"mov\.u32 t, %tid\.x; shr\.u32", _thread // 32),
    ("n_warps", r"mov\.u32 t, %ntid\.x; add\.u32 t, t, 31", np.full(240, 3)),
):
    _made, _expected = tells_id(intrinsic(_name)), _expected.astype(np.int32)
    case(_name, _text, _made, np.zeros(1, np.int32), _expected, grid=3, block=80)


def advances(op):
    @kernel()
    def clock_advances(params, num_tokens, my_rank):
        if thread_idx() == 0:
            start = op()
            for _ in range(1000):
                store_i32(params, 1)
            nanosleep(u32(100000))
            store_i32(params + u64(OUT), 1 if u64(op()) > u64(start) else 0)

    return clock_advances


for _name, _text in {"globaltimer": r"%globaltimer", "clock": r"%clock64"}.items():
    case(_name, _text, advances(intrinsic(_name)), np.zeros(1, np.int32), np.ones(1, np.int32))


@kernel()
def sleeps(params, num_tokens, my_rank):
    if thread_idx() == 0:
        start = globaltimer()
        for _ in range(100):
            nanosleep(u32(10000))
        store_i32(params + u64(OUT), 1 if u64(globaltimer()) - u64(start) > u64(200000) else 0)


case("nanosleep", r"nanosleep\.u32", sleeps, np.zeros(1, np.int32), np.ones(1, np.int32))


def shuffles_all(op, other):
    """i32, u32 and f32 in one kernel, since a shuffle takes all three."""

    @kernel()
    def apply(params, num_tokens, my_rank):
        i = thread_idx()
        store_i32(params + u64(OUT) + u64(4 * i), op(load_i32(params + u64(4 * i)), other))
        device.store_u32(params + u64(OUT + 256) + u64(4 * i), op(load_u32(params + u64(4 * i)), other))
        device.store_f32(params + u64(OUT + 512) + u64(4 * i), op(load_f32(params + u64(4 * i)), other))

    return apply


LANE, BASE = np.arange(64) % 32, np.arange(64) // 32 * 32
for _name, _text, _other, _source in (
    ("shfl_idx", r"shfl\.sync\.idx\.b32", 5, BASE + 5),
    ("shfl_xor", r"shfl\.sync\.bfly\.b32", 6, BASE + (LANE ^ 6)),
    ("shfl_up", r"shfl\.sync\.up\.b32", 3, np.where(LANE >= 3, BASE + LANE - 3, BASE + LANE)),
    ("shfl_down", r"shfl\.sync\.down\.b32", 3, np.where(LANE < 29, BASE + LANE + 3, BASE + LANE)),
):
    _made, _expected = shuffles_all(intrinsic(_name), _other), np.tile(VALUES[_source], 3)
    case(_name, _text, _made, VALUES, _expected, block=64)


ODD = (np.arange(64) * 7 // 3 % 2).astype(np.int32)
_ballots = [sum(int(ODD[w * 32 + i]) << i for i in range(32)) for w in (0, 1)]
number("ballot", r"vote\.sync\.ballot\.b32", "i32", "u32", ODD, np.repeat(_ballots, 32))
KEYS = (np.arange(64) * np.arange(64) % 5 - 2).astype(np.int32)
_same = [sum(1 << j for j in range(32) if KEYS[i // 32 * 32 + j] == KEYS[i]) for i in range(64)]
number("match_any", r"match\.any\.sync\.b32", "i32", "u32", KEYS, _same)
_some = np.concatenate([np.arange(32) == 9, np.zeros(32)]).astype(np.int32)
number("any_lane", r"vote\.sync\.any\.pred", "i32", "i32", _some, np.repeat([1, 0], 32))
number("all_lanes", r"vote\.sync\.all\.pred", "i32", "i32", 1 - _some, np.repeat([0, 1], 32))
WARPS = VALUES.reshape(2, 32)
_or = np.bitwise_or.reduce(WARPS.view(np.uint32), axis=1)
for _name, _text, _ty, _in, _expected, *_lane in (
    ("broadcast_i32", r"shfl\.sync\.idx\.b32", "i32", VALUES, np.repeat(VALUES[7::32], 32), 7),
    ("broadcast_u64", r"shfl\.sync\.idx\.b32 hi", "u64", LONG, np.repeat(LONG[31::32], 32), 31),
    ("sum_i32", r"redux\.sync\.add\.s32", "i32", VALUES, np.repeat(WARPS.sum(1), 32)),
    ("max_i32", r"redux\.sync\.max\.s32", "i32", VALUES, np.repeat(WARPS.max(1), 32)),
    ("or_u32", r"redux\.sync\.or\.b32", "u32", VALUES.view(np.uint32), np.repeat(_or, 32)),
    ("inclusive_sum_i32", r"@p add\.s32 s, s, t", "i32", VALUES, WARPS.cumsum(1).ravel()),
    ("max_f32", r"shfl\.sync\.bfly\.b32 t, m", "f32", FLOATS, np.repeat(np.nanmax(FLOATS.reshape(2, 32), 1), 32)),
):
    number("warp_" + _name, _text, _ty, _ty, _in, _expected, *_lane)


number("syncthreads_or", r"bar\.red\.or\.pred", "i32", "i32", _some, np.ones(64))
number("syncthreads_count", r"bar\.red\.popc\.u32", "i32", "i32", ODD, np.full(64, ODD.sum()))
