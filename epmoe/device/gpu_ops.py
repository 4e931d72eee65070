"""Every intrinsic as PTX for sm_90. The GPU's intrinsics are made from these tables.

A line of a table: name, types of result and arguments, PTX ($0, $1, ...: the results, then the arguments). q: four u32.
"""

import math

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.cudadecl import Cuda_shared_array, register_global

from . import arithmetic, casts
from .intrinsics import CASTS, ORDERS, SCOPES, STRONG_TYPES, TYPES
from .ptx_factory import cast, f32, i32, on_array, ptx, shuffle, u32, u64

INTRINSICS = {}
VALUE_TYPE = {"i32": i32, "u32": u32, "u64": u64, "f32": f32, "u8": u32, "u16": u32}
Q = [u32] * 4
CHOICES = {  # a line of a table with one of these marks makes an intrinsic for each choice
    "<type>": TYPES,
    "<number>": CASTS.split(),
    "<word>": STRONG_TYPES,
    "<scope>": SCOPES,
    "<far>": ("gpu", "sys"),
    "<ld>": ORDERS["ld"],
    "<st>": ORDERS["st"],
    "<add>": ORDERS["atomic_add"],
    "<cas>": ("relaxed", "acq_rel"),
}


def _over_lanes(text, steps):
    return " ".join(text % step for step in steps)


def _reduced(operation):
    step = "shfl.sync.bfly.b32 t, s, %d, 0x1f, 0xffffffff; " + operation + " s, s, t;"
    steps = _over_lanes(step, (16, 8, 4, 2, 1))
    return "{ .reg .b32 s, t; mov.b32 s, $1; " + steps + " mov.b32 $0, s; }"


SCAN = _over_lanes("shfl.sync.up.b32 t|p, s, %d, 0x0, 0xffffffff; @p add.s32 s, s, t;", (1, 2, 4, 8, 16))
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


def _expanded(line):
    for mark, words in CHOICES.items():
        if mark in line:
            return [made for word in words for made in _expanded(line.replace(mark, word))]
    return [line]


def _table(lines, *, on_host=False, **options):
    """Intrinsics from a table's lines. on_host: plain Python can call them too, and an overflow gives no warning."""
    for line in (made for one in lines.strip().splitlines() for made in _expanded(one)):
        name, form, text = line.split(None, 2)
        ret, _, given = form[:-1].partition("(")
        args = [u for t in filter(None, given.split(",")) for u in (Q if t == "q" else [VALUE_TYPE[t]])]
        if on_host:
            options["python"] = np.errstate(all="ignore")(getattr(arithmetic, name))
        results = Q if ret == "q" else VALUE_TYPE.get(ret)
        text = text.replace(".i32", ".s32")  # as PTX calls it
        INTRINSICS[name] = ptx(name, text, results, args, below=BELOW.get(name), **options)


# ---------------------------------------------------------------- casts and ids
for _t in CASTS.split():
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
_table("""
    load_<type>     <type>(u64)   ld.global.<type> $0, [$1];
    store_<type>    (u64,<type>)  st.global.<type> [$0], $1;
    load16          q(u64)        ld.global.v4.u32 {$0,$1,$2,$3}, [$4];
    load16_stream   q(u64)        ld.global.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];
    store16         (u64,q)       st.global.v4.u32 [$0], {$1,$2,$3,$4};
    store16_stream  (u64,q)       st.global.L1::no_allocate.v4.u32 [$0], {$1,$2,$3,$4};
    prefetch        (u64)         prefetch.global.L2 [$0];
    """)
_nc = "load16_nc  q(u64)  ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {$0,$1,$2,$3}, [$4];"
_table(_nc, effect="reads")

# ---------------------------------------------------------------- strong accesses, atomics, fences
# load16 and store16: four words; each word is accessed atomically, the 16 bytes together are not
_table("""
    ld_<ld>_<scope>_<word>          <word>(u64)         ld.<ld>.<scope>.global.<word> $0, [$1];
    st_<st>_<scope>_<word>          (u64,<word>)        st.<st>.<scope>.global.<word> [$0], $1;
    red_add_<st>_<scope>_<word>     (u64,<word>)        red.<st>.<scope>.global.add.<word> [$0], $1;
    atomic_add_<add>_<scope>_<word> <word>(u64,<word>)  atom.<add>.<scope>.global.add.<word> $0, [$1], $2;
    atomic_max_relaxed_<far>_<word> <word>(u64,<word>)  atom.relaxed.<far>.global.max.<word> $0, [$1], $2;
    atomic_or_relaxed_<far>_u32     u32(u64,u32)        atom.relaxed.<far>.global.or.b32 $0, [$1], $2;
    atomic_cas_<cas>_<far>_i32      i32(u64,i32,i32)    atom.<cas>.<far>.global.cas.b32 $0, [$1], $2, $3;
    atomic_cas_<cas>_<far>_u64      u64(u64,u64,u64)    atom.<cas>.<far>.global.cas.b64 $0, [$1], $2, $3;
    fence_acq_rel_<scope>           ()                  fence.acq_rel.<scope>;
    load16_relaxed_sys              q(u64)              ld.relaxed.sys.global.v4.u32 {$0,$1,$2,$3}, [$4];
    store16_relaxed_sys             (u64,q)             st.relaxed.sys.global.v4.u32 [$0], {$1,$2,$3,$4};
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
    warp_max_f32           f32(f32)      {_reduced("max.f32")}
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
_table("""
    shared_load_<number>   <number>(u32)   ld.shared.<number> $0, [$1];
    shared_store_<number>  (u32,<number>)  st.shared.<number> [$0], $1;
    shared_load16          q(u32)          ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];
    shared_store16         (u32,q)         st.shared.v4.u32 [$0], {$1,$2,$3,$4};
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
