"""Every intrinsic as PTX for sm_90. The GPU's intrinsics are made from these tables.

A line of a table: name, types of result and arguments, PTX ($0, $1, ...: the results, then the arguments). q: four u32.
"""

import math

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


def _over_lanes(text, steps):
    return " ".join(text % step for step in steps)


def _reduced(operation):
    step = "shfl.sync.bfly.b32 t, s, %d, 0x1f, 0xffffffff; " + operation + " s, s, t;"
    steps = _over_lanes(step, (16, 8, 4, 2, 1))
    return "{ .reg .b32 s, t; mov.b32 s, $1; " + steps + " mov.b32 $0, s; }"


_SCAN = "shfl.sync.up.b32 t|p, s, %d, 0x0, 0xffffffff; @p add.s32 s, s, t;"
_MAX = "shfl.sync.bfly.b32 t, m, %d, 0x1f, 0xffffffff; max.f32 m, m, t;"
SCAN, MAX = _over_lanes(_SCAN, (1, 2, 4, 8, 16)), _over_lanes(_MAX, (16, 8, 4, 2, 1))
BELOW = {  # name: (compute capability, PTX for devices below it)
    "load16_nc": ((8, 0), "ld.global.nc.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];"),
    "warp_sum_i32": ((8, 0), _reduced("add.s32")),
    "warp_max_i32": ((8, 0), _reduced("max.s32")),
    "warp_or_u32": ((8, 0), _reduced("or.b32")),
    "pack_bf16x2": ((8, 0), casts.BF16X2),
    "pack_f16x2": ((8, 0), casts.F16X2),
    "pack_e4m3x2": ((8, 9), casts.E4M3X2),
    "e4m3_lo": ((8, 9), casts.from_e4m3(0)),
    "e4m3_hi": ((8, 9), casts.from_e4m3(8)),
}


def _op(name, text, ret, args, **options):
    INTRINSICS[name] = ptx(name, text, ret, args, below=BELOW.get(name), **options)


def _table(lines, *, on_host=False, **options):
    """Intrinsics from a table's lines. on_host: plain Python can call them too, and an overflow gives no warning."""
    for line in lines.strip().splitlines():
        name, form, text = line.split(None, 2)
        ret, _, given = form[:-1].partition("(")
        args = [u for t in filter(None, given.split(",")) for u in (Q if t == "q" else [VALUE_TYPE[t]])]
        if on_host:
            options["python"] = np.errstate(all="ignore")(getattr(arithmetic, name))
        _op(name, text, Q if ret == "q" else VALUE_TYPE.get(ret), args, **options)


# ---------------------------------------------------------------- casts and ids
for _t in ("u64", "u32", "i32", "f32"):
    INTRINSICS[_t] = cast(_t, VALUE_TYPE[_t], python=getattr(arithmetic, _t))
_table(
    """
    thread_idx  i32()  mov.u32 $0, %tid.x;
    block_idx   i32()  mov.u32 $0, %ctaid.x;
    block_dim   i32()  mov.u32 $0, %ntid.x;
    grid_dim    i32()  mov.u32 $0, %nctaid.x;
    lane_id     i32()  mov.u32 $0, %laneid;
    warp_id     i32()  { .reg .u32 t; mov.u32 t, %tid.x; shr.u32 $0, t, 5; }
    n_warps     i32()  { .reg .u32 t; mov.u32 t, %ntid.x; add.u32 t, t, 31; shr.u32 $0, t, 5; }
    """,
    effect="none",
)

# ---------------------------------------------------------------- plain global memory
for _t in PTX_TYPE:
    _op("load_" + _t, "ld.global.%s $0, [$1];" % PTX_TYPE[_t], VALUE_TYPE[_t], [u64])
    _op("store_" + _t, "st.global.%s [$0], $1;" % PTX_TYPE[_t], None, [u64, VALUE_TYPE[_t]])
_table("""
    load16          q(u64)    ld.global.v4.u32 {$0,$1,$2,$3}, [$4];
    load16_stream   q(u64)    ld.global.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];
    store16         (u64,q)   st.global.v4.u32 [$0], {$1,$2,$3,$4};
    store16_stream  (u64,q)   st.global.L1::no_allocate.v4.u32 [$0], {$1,$2,$3,$4};
    prefetch        (u64)     prefetch.global.L2 [$0];
    """)
_nc = "load16_nc  q(u64)  ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {$0,$1,$2,$3}, [$4];"
_table(_nc, effect="reads")


# ---------------------------------------------------------------- strong accesses, atomics, fences
def _strong(name, text, returns, n_values, orders, scopes=("cta", "gpu", "sys"), of=("i32", "u32", "u64")):
    """An intrinsic (address, values) for each order, scope and type. name and text contain them as {o}, {s} and {t}.

    In text {p} is the type in PTX, and {b} a type of the same width for bits.
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
# load16 and store16: four words; each word is accessed atomically, the 16 bytes together are not
_table("""
    fence_acq_rel_cta   ()       fence.acq_rel.cta;
    fence_acq_rel_gpu   ()       fence.acq_rel.gpu;
    fence_acq_rel_sys   ()       fence.acq_rel.sys;
    load16_relaxed_sys  q(u64)   ld.relaxed.sys.global.v4.u32 {$0,$1,$2,$3}, [$4];
    store16_relaxed_sys (u64,q)  st.relaxed.sys.global.v4.u32 [$0], {$1,$2,$3,$4};
    """)

# ---------------------------------------------------------------- block and warp
_TRUE = "{ .reg .pred p; setp.ne.s32 p, $1, 0; "  # p = the argument is not 0
_table(
    f"""
    syncthreads        ()        bar.sync 0;
    syncthreads_or     i32(i32)  {_TRUE}bar.red.or.pred p, 0, p; selp.s32 $0, 1, 0, p; }}
    syncthreads_count  i32(i32)  {_TRUE}bar.red.popc.u32 $0, 0, p; }}
    syncwarp           ()        bar.warp.sync 0xffffffff;
    """,
    convergent=True,
)
for _name, _text in {"idx": "idx", "xor": "bfly", "up": "up", "down": "down"}.items():
    _clamp = "0x0" if _name == "up" else "0x1f"
    _text = "shfl.sync.%s.b32 $0, $1, $2, %s, 0xffffffff;" % (_text, _clamp)
    INTRINSICS["shfl_" + _name] = shuffle("shfl_" + _name, _text)
_table(
    f"""
    ballot                 u32(i32)      {_TRUE}vote.sync.ballot.b32 $0, p, 0xffffffff; }}
    match_any              u32(i32)      match.any.sync.b32 $0, $1, 0xffffffff;
    any_lane               i32(i32)      {_TRUE}vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }}
    all_lanes              i32(i32)      {_TRUE}vote.sync.all.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }}
    warp_broadcast_i32     i32(i32,i32)  shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;
    warp_broadcast_u64     u64(u64,i32)  {{ .reg .b32 lo, hi; mov.b64 {{lo, hi}}, $1; """
    """shfl.sync.idx.b32 lo, lo, $2, 0x1f, 0xffffffff; shfl.sync.idx.b32 hi, hi, $2, 0x1f, 0xffffffff; """
    f"""mov.b64 $0, {{lo, hi}}; }}
    warp_sum_i32           i32(i32)      redux.sync.add.s32 $0, $1, 0xffffffff;
    warp_max_i32           i32(i32)      redux.sync.max.s32 $0, $1, 0xffffffff;
    warp_or_u32            u32(u32)      redux.sync.or.b32 $0, $1, 0xffffffff;
    warp_inclusive_sum_i32 i32(i32)      {{ .reg .s32 s, t; .reg .pred p; mov.s32 s, $1; {SCAN} mov.s32 $0, s; }}
    warp_max_f32           f32(f32)      {{ .reg .f32 m, t; mov.f32 m, $1; {MAX} mov.f32 $0, m; }}
    elect_one              i32()         {{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.s32 $0, 1, 0, p; }}
    """,
    convergent=True,
    effect="volatile",
)

# ---------------------------------------------------------------- shared memory
shared_array = cuda.shared.array
register_global(shared_array, types.Function(Cuda_shared_array))
INTRINSICS["shared_array"] = shared_array
_text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
INTRINSICS["shared_addr"] = _shared_addr = on_array("shared_addr", _text, u32)
_text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; atom.relaxed.cta.shared.add.s32 $0, [t], $2; }"
INTRINSICS["shared_add_i32"] = on_array("shared_add_i32", _text, i32, [i32, i32])


@cuda.jit(device=True, forceinline=True)
def dynamic_shared():
    """Shared-window address (u32) of the launch's dynamic shared memory, 16-byte aligned.

    CUDA 13.0 puts it right after the kernel's shared_arrays and ignores the alignment. CUDA 13.5 respects it.
    """
    return _shared_addr(cuda.shared.array(0, types.uint8, 128))


INTRINSICS["dynamic_shared"] = dynamic_shared
for _t in ("i32", "u32", "u64", "f32"):
    _op("shared_load_" + _t, "ld.shared.%s $0, [$1];" % PTX_TYPE[_t], VALUE_TYPE[_t], [u32])
    _op("shared_store_" + _t, "st.shared.%s [$0], $1;" % PTX_TYPE[_t], None, [u32, VALUE_TYPE[_t]])
_table("""
    shared_load16   q(u32)   ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];
    shared_store16  (u32,q)  st.shared.v4.u32 [$0], {$1,$2,$3,$4};
    """)

# ---------------------------------------------------------------- numbers and bits: functions of registers only
_E4M3 = (
    "{ .reg .b16 t, l, h; .reg .b32 w; cvt.u16.u32 t, $1; cvt.rn.f16x2.e4m3x2 w, t; "
    "mov.b32 {l, h}, w; cvt.f32.f16 $0, %s; }"
)
_table(
    f"""
    popc         i32(u32)          popc.b32 $0, $1;
    ffs          i32(u32)          {{ .reg .u32 t; brev.b32 t, $1; bfind.shiftamt.u32 t, t; add.s32 $0, t, 1; }}
    clz          i32(u32)          clz.b32 $0, $1;
    f32_as_u32   u32(f32)          mov.b32 $0, $1;
    u32_as_f32   f32(u32)          mov.b32 $0, $1;
    bf16_lo      f32(u32)          {{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }}
    bf16_hi      f32(u32)          {{ .reg .b32 t; and.b32 t, $1, 0xffff0000; mov.b32 $0, t; }}
    pack_bf16x2  u32(f32,f32)      cvt.rn.bf16x2.f32 $0, $2, $1;
    f16_lo       f32(u32)          {{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.f32.f16 $0, l; }}
    f16_hi       f32(u32)          {{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.f32.f16 $0, h; }}
    pack_f16x2   u32(f32,f32)      cvt.rn.f16x2.f32 $0, $2, $1;
    pack_e4m3x2  u32(f32,f32)      {{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $2, $1; cvt.u32.u16 $0, t; }}
    e4m3_lo      f32(u32)          {_E4M3 % "l"}
    e4m3_hi      f32(u32)          {_E4M3 % "h"}
    mul_rn       f32(f32,f32)      mul.rn.f32 $0, $1, $2;
    add_rn       f32(f32,f32)      add.rn.f32 $0, $1, $2;
    sub_rn       f32(f32,f32)      sub.rn.f32 $0, $1, $2;
    div_rn       f32(f32,f32)      div.rn.f32 $0, $1, $2;
    fma_rn       f32(f32,f32,f32)  fma.rn.f32 $0, $1, $2, $3;
    max_f32      f32(f32,f32)      max.f32 $0, $1, $2;
    min_f32      f32(f32,f32)      min.f32 $0, $1, $2;
    abs_f32      f32(f32)          abs.f32 $0, $1;
    ex2_approx   f32(f32)          ex2.approx.f32 $0, $1;
    """,
    on_host=True,
    effect="none",
)
_f32 = INTRINSICS["f32"]


@cuda.jit(device=True, forceinline=True)
def exp(a):
    """e to the power a, within 2 units in the last place. Not bit-exact."""
    return _f32(math.exp(_f32(a)))


INTRINSICS["exp"] = exp

# ---------------------------------------------------------------- time, Hopper
_BULK = "complete_tx::bytes [$0], [$1], $2, [$3];"
_table(
    f"""
    globaltimer        u64()              mov.u64 $0, %globaltimer;
    clock              u64()              mov.u64 $0, %clock64;
    nanosleep          (u32)              nanosleep.u32 $0;
    mbar_init          (u32,u32)          mbarrier.init.shared::cta.b64 [$0], $1;
    mbar_expect_tx     (u32,u32)          mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;
    mbar_arrive        (u32)              mbarrier.arrive.shared::cta.b64 _, [$0];
    mbar_try_wait      i32(u32,u32)       {{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; """
    f"""selp.s32 $0, 1, 0, p; }}
    bulk_load          (u32,u64,u32,u32)  cp.async.bulk.shared::cluster.global.mbarrier::{_BULK}
    bulk_store         (u64,u32,u32)      cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;
    bulk_commit        ()                 cp.async.bulk.commit_group;
    bulk_wait          ()                 cp.async.bulk.wait_group 0;
    bulk_wait_read     ()                 cp.async.bulk.wait_group.read 0;
    fence_proxy_async  ()                 fence.proxy.async;
    griddep_wait       ()                 griddepcontrol.wait;
    griddep_launch     ()                 griddepcontrol.launch_dependents;
    """
)

DTYPES = {name: getattr(types, name) for name in ("int32", "uint32", "uint64", "float32", "uint8")}
