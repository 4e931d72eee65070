"""Every intrinsic as PTX for sm_90: the table from which the GPU's intrinsics are made."""

import math
from functools import partial

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.cudadecl import Cuda_shared_array, register_global

from . import arithmetic, casts
from .ptx_factory import cast, f32, i32, on_array, ptx, shuffle, u32, u64

INTRINSICS = {}
PTX_TYPE = {"i32": "s32", "u32": "u32", "u64": "u64", "f32": "f32", "u8": "u8", "u16": "u16"}
VALUE_TYPE = {"i32": i32, "u32": u32, "u64": u64, "f32": f32, "u8": u32, "u16": u32}
Q = [u32] * 4


def _enter(name, intrinsic):
    INTRINSICS[name] = intrinsic


def _op(name, text, ret, args, **options):
    INTRINSICS[name] = ptx(name, text, ret, args, **options)


def _number(name, text, ret, args, **options):
    """A pure function of registers. Plain Python can call it too; an overflow gives no warning."""
    _op(
        name,
        text,
        ret,
        args,
        effect="none",
        **options,
        python=np.errstate(all="ignore")(getattr(arithmetic, name)),
    )


# ---------------------------------------------------------------- casts and ids
_enter("u64", cast("u64", u64, python=arithmetic.u64))
_enter("u32", cast("u32", u32, python=arithmetic.u32))
_enter("i32", cast("i32", i32, python=arithmetic.i32))
_enter("f32", cast("f32", f32, python=arithmetic.f32))
for _name, _text in {
    "thread_idx": "mov.u32 $0, %tid.x;",
    "block_idx": "mov.u32 $0, %ctaid.x;",
    "block_dim": "mov.u32 $0, %ntid.x;",
    "grid_dim": "mov.u32 $0, %nctaid.x;",
    "lane_id": "mov.u32 $0, %laneid;",
    "warp_id": "{ .reg .u32 t; mov.u32 t, %tid.x; shr.u32 $0, t, 5; }",
    "n_warps": "{ .reg .u32 t; mov.u32 t, %ntid.x; add.u32 t, t, 31; shr.u32 $0, t, 5; }",
}.items():
    _op(_name, _text, i32, [], effect="none")

# ---------------------------------------------------------------- plain global memory
for _t in PTX_TYPE:
    _op("load_" + _t, "ld.global.%s $0, [$1];" % PTX_TYPE[_t], VALUE_TYPE[_t], [u64])
    _op("store_" + _t, "st.global.%s [$0], $1;" % PTX_TYPE[_t], None, [u64, VALUE_TYPE[_t]])
_op("load16", "ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", Q, [u64])
_op(
    "load16_nc",
    "ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {$0,$1,$2,$3}, [$4];",
    Q,
    [u64],
    effect="reads",
    below=((8, 0), "ld.global.nc.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];"),
)
_op("load16_stream", "ld.global.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];", Q, [u64])
_op("store16", "st.global.v4.u32 [$0], {$1,$2,$3,$4};", None, [u64] + Q)
_op("prefetch", "prefetch.global.L2 [$0];", None, [u64])
_op("store16_stream", "st.global.L1::no_allocate.v4.u32 [$0], {$1,$2,$3,$4};", None, [u64] + Q)


# ---------------------------------------------------------------- strong accesses, atomics, fences
def _strong(
    name, text, returns, n_values, orders, scopes=("cta", "gpu", "sys"), of=("i32", "u32", "u64")
):
    """An intrinsic (address, values) for each order, scope and type, which name and text take as {o}, {s} and {t}.

    text takes the type in PTX as {p}, and as {b} if its bits alone matter.
    """
    for t in of:
        value, bits = VALUE_TYPE[t], "b64" if t == "u64" else "b32"
        for o in orders.split():
            for s in scopes:
                made = [one.format(o=o, s=s, t=t, p=PTX_TYPE[t], b=bits) for one in (name, text)]
                _op(*made, value if returns else None, [u64] + n_values * [value])


FAR, ATOMIC = ("gpu", "sys"), "atom.{o}.{s}.global."
_strong("ld_{o}_{s}_{t}", "ld.{o}.{s}.global.{p} $0, [$1];", True, 0, "relaxed acquire")
_strong("st_{o}_{s}_{t}", "st.{o}.{s}.global.{p} [$0], $1;", False, 1, "relaxed release")
_red = "red.{o}.{s}.global.add.{p} [$0], $1;"
_strong("red_add_{o}_{s}_{t}", _red, False, 1, "relaxed release")
_add, _orders = ATOMIC + "add.{p} $0, [$1], $2;", "relaxed acquire release acq_rel"
_strong("atomic_add_{o}_{s}_{t}", _add, True, 1, _orders)
_max, _or = ATOMIC + "max.{p} $0, [$1], $2;", ATOMIC + "or.{b} $0, [$1], $2;"
_strong("atomic_max_{o}_{s}_{t}", _max, True, 1, "relaxed", FAR)
_strong("atomic_or_{o}_{s}_{t}", _or, True, 1, "relaxed", FAR, ("u32",))
_cas = ATOMIC + "cas.{b} $0, [$1], $2, $3;"
_strong("atomic_cas_{o}_{s}_{t}", _cas, True, 2, "relaxed acq_rel", FAR, ("i32", "u64"))
for _scope in ("cta", "gpu", "sys"):
    _op("fence_acq_rel_" + _scope, "fence.acq_rel.%s;" % _scope, None, [])
# four words; each is accessed at once, but not the 16 bytes together
_op("load16_relaxed_sys", "ld.relaxed.sys.global.v4.u32 {$0,$1,$2,$3}, [$4];", Q, [u64])
_op("store16_relaxed_sys", "st.relaxed.sys.global.v4.u32 [$0], {$1,$2,$3,$4};", None, [u64] + Q)

# ---------------------------------------------------------------- block and warp
TRUE = "{ .reg .pred p; setp.ne.s32 p, $1, 0; "  # p = the argument is not 0
_block = partial(_op, convergent=True)
_warp = partial(_block, effect="volatile")
_block("syncthreads", "bar.sync 0;", None, [])
_block("syncthreads_or", TRUE + "bar.red.or.pred p, 0, p; selp.s32 $0, 1, 0, p; }", i32, [i32])
_block("syncthreads_count", TRUE + "bar.red.popc.u32 $0, 0, p; }", i32, [i32])
_block("syncwarp", "bar.warp.sync 0xffffffff;", None, [])
_enter("shfl_idx", shuffle("shfl_idx", "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"))
_enter("shfl_xor", shuffle("shfl_xor", "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;"))
_enter("shfl_up", shuffle("shfl_up", "shfl.sync.up.b32 $0, $1, $2, 0x0, 0xffffffff;"))
_enter("shfl_down", shuffle("shfl_down", "shfl.sync.down.b32 $0, $1, $2, 0x1f, 0xffffffff;"))
_warp("ballot", TRUE + "vote.sync.ballot.b32 $0, p, 0xffffffff; }", u32, [i32])
_warp("match_any", "match.any.sync.b32 $0, $1, 0xffffffff;", u32, [i32])
_warp("any_lane", TRUE + "vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }", i32, [i32])
_warp(
    "all_lanes", TRUE + "vote.sync.all.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }", i32, [i32]
)
_warp("warp_broadcast_i32", "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", i32, [i32, i32])
_warp(
    "warp_broadcast_u64",
    "{ .reg .b32 lo, hi; mov.b64 {lo, hi}, $1; shfl.sync.idx.b32 lo, lo, $2, 0x1f, 0xffffffff; "
    "shfl.sync.idx.b32 hi, hi, $2, 0x1f, 0xffffffff; mov.b64 $0, {lo, hi}; }",
    u64,
    [u64, i32],
)
_warp(
    "warp_sum_i32",
    "redux.sync.add.s32 $0, $1, 0xffffffff;",
    i32,
    [i32],
    below=(
        (8, 0),
        (
            "{ .reg .s32 s, t; mov.s32 s, $1; "
            + " ".join(
                "shfl.sync.bfly.b32 t, s, %d, 0x1f, 0xffffffff; add.s32 s, s, t;" % d
                for d in (16, 8, 4, 2, 1)
            )
            + " mov.s32 $0, s; }"
        ),
    ),
)
_warp(
    "warp_inclusive_sum_i32",
    "{ .reg .s32 s, t; .reg .pred p; mov.s32 s, $1; "
    + " ".join(
        "shfl.sync.up.b32 t|p, s, %d, 0x0, 0xffffffff; @p add.s32 s, s, t;" % d
        for d in (1, 2, 4, 8, 16)
    )
    + " mov.s32 $0, s; }",
    i32,
    [i32],
)
_warp(
    "warp_max_f32",
    "{ .reg .f32 m, t; mov.f32 m, $1; "
    + " ".join(
        "shfl.sync.bfly.b32 t, m, %d, 0x1f, 0xffffffff; max.f32 m, m, t;" % d
        for d in (16, 8, 4, 2, 1)
    )
    + " mov.f32 $0, m; }",
    f32,
    [f32],
)
_number("popc", "popc.b32 $0, $1;", i32, [u32])
_number(
    "ffs", "{ .reg .u32 t; brev.b32 t, $1; bfind.shiftamt.u32 t, t; add.s32 $0, t, 1; }", i32, [u32]
)
_number("clz", "clz.b32 $0, $1;", i32, [u32])

# ---------------------------------------------------------------- shared memory
shared_array = cuda.shared.array
register_global(shared_array, types.Function(Cuda_shared_array))
_enter("shared_array", shared_array)
_enter(
    "shared_addr",
    on_array("shared_addr", "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }", u32),
)
_enter(
    "shared_add_i32",
    on_array(
        "shared_add_i32",
        "{ .reg .u64 t; cvta.to.shared.u64 t, $1; atom.relaxed.cta.shared.add.s32 $0, [t], $2; }",
        i32,
        [i32, i32],
    ),
)
_shared_addr = INTRINSICS["shared_addr"]


@cuda.jit(device=True, forceinline=True)
def dynamic_shared():
    """Shared-window address (u32) of the launch's dynamic shared memory, 16-byte aligned.

    CUDA 13.0 puts it right behind the kernel's shared_arrays and ignores the alignment; 13.5 respects it.
    """
    return _shared_addr(cuda.shared.array(0, types.uint8, 128))


_enter("dynamic_shared", dynamic_shared)
for _t in ("i32", "u32", "u64", "f32"):
    _op("shared_load_" + _t, "ld.shared.%s $0, [$1];" % PTX_TYPE[_t], VALUE_TYPE[_t], [u32])
    _op("shared_store_" + _t, "st.shared.%s [$0], $1;" % PTX_TYPE[_t], None, [u32, VALUE_TYPE[_t]])
_op("shared_load16", "ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", Q, [u32])
_op("shared_store16", "st.shared.v4.u32 [$0], {$1,$2,$3,$4};", None, [u32] + Q)

# ---------------------------------------------------------------- time
_op("globaltimer", "mov.u64 $0, %globaltimer;", u64, [])
_op("clock", "mov.u64 $0, %clock64;", u64, [])
_op("nanosleep", "nanosleep.u32 $0;", None, [u32])

# ---------------------------------------------------------------- numbers
_number("f32_as_u32", "mov.b32 $0, $1;", u32, [f32])
_number("u32_as_f32", "mov.b32 $0, $1;", f32, [u32])
_number("bf16_lo", "{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }", f32, [u32])
_number("bf16_hi", "{ .reg .b32 t; and.b32 t, $1, 0xffff0000; mov.b32 $0, t; }", f32, [u32])
_number(
    "pack_bf16x2", "cvt.rn.bf16x2.f32 $0, $2, $1;", u32, [f32, f32], below=((8, 0), casts.BF16X2)
)
_number("f16_lo", "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }", f32, [u32])
_number("f16_hi", "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }", f32, [u32])
_number("pack_f16x2", "cvt.rn.f16x2.f32 $0, $2, $1;", u32, [f32, f32], below=((8, 0), casts.F16X2))
_number(
    "pack_e4m3x2",
    "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $2, $1; cvt.u32.u16 $0, t; }",
    u32,
    [f32, f32],
    below=((8, 9), casts.E4M3X2),
)
for _name, _half, _shift in (("e4m3_lo", "l", 0), ("e4m3_hi", "h", 8)):
    _number(
        _name,
        "{ .reg .b16 t, l, h; .reg .b32 w; cvt.u16.u32 t, $1; cvt.rn.f16x2.e4m3x2 w, t; mov.b32 {l, h}, w; "
        "cvt.f32.f16 $0, %s; }" % _half,
        f32,
        [u32],
        below=((8, 9), casts.from_e4m3(_shift)),
    )
for _name in ("mul", "add", "sub", "div"):
    _number(_name + "_rn", "%s.rn.f32 $0, $1, $2;" % _name, f32, [f32, f32])
_number("fma_rn", "fma.rn.f32 $0, $1, $2, $3;", f32, [f32, f32, f32])
_number("max_f32", "max.f32 $0, $1, $2;", f32, [f32, f32])
_number("min_f32", "min.f32 $0, $1, $2;", f32, [f32, f32])
_number("abs_f32", "abs.f32 $0, $1;", f32, [f32])
_number("ex2_approx", "ex2.approx.f32 $0, $1;", f32, [f32])
_f32 = INTRINSICS["f32"]


@cuda.jit(device=True, forceinline=True)
def exp(a):
    """e to the power a, within 2 units in the last place; no part of the bit-exact promise."""
    return _f32(math.exp(_f32(a)))


_enter("exp", exp)

# ---------------------------------------------------------------- Hopper
_op("mbar_init", "mbarrier.init.shared::cta.b64 [$0], $1;", None, [u32, u32])
_op("mbar_expect_tx", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", None, [u32, u32])
_op("mbar_arrive", "mbarrier.arrive.shared::cta.b64 _, [$0];", None, [u32])
_op(
    "mbar_try_wait",
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.s32 $0, 1, 0, p; }",
    i32,
    [u32, u32],
)
_op(
    "bulk_load",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    None,
    [u32, u64, u32, u32],
)
_op(
    "bulk_store",
    "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;",
    None,
    [u64, u32, u32],
)
_op("bulk_commit", "cp.async.bulk.commit_group;", None, [])
_op("bulk_wait", "cp.async.bulk.wait_group 0;", None, [])
_op("bulk_wait_read", "cp.async.bulk.wait_group.read 0;", None, [])
_op("fence_proxy_async", "fence.proxy.async;", None, [])
_warp("elect_one", "{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.s32 $0, 1, 0, p; }", i32, [])
_op("griddep_wait", "griddepcontrol.wait;", None, [])
_op("griddep_launch", "griddepcontrol.launch_dependents;", None, [])

DTYPES = {name: getattr(types, name) for name in ("int32", "uint32", "uint64", "float32", "uint8")}
