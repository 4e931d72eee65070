"""The intrinsics that kernels are written in, by group. The GPU and the simulator both implement all of them.

Memory accesses take 64-bit addresses (shared memory: 32-bit shared-window addresses). Order and scope are part of the
name and mean the same as in PTX. Use the intrinsics under NUMBERS for f32 arithmetic; otherwise the compiler contracts
multiplications and additions.
"""

CASTS = "u64 u32 i32 f32"
IDS = "thread_idx block_idx block_dim grid_dim lane_id warp_id n_warps"
TYPES = ("u8", "u16", "i32", "u32", "u64", "f32")
STRONG_TYPES = ("i32", "u32", "u64")
SCOPES = ("cta", "gpu", "sys")

PLAIN = (
    ["load_%s" % t for t in TYPES]
    + ["store_%s" % t for t in TYPES]
    + "load16 load16_nc load16_stream store16 store16_stream prefetch".split()
)
ORDERS = {
    "ld": ("relaxed", "acquire"),
    "st": ("relaxed", "release"),
    "red_add": ("relaxed", "release"),
    "atomic_add": ("relaxed", "acquire", "release", "acq_rel"),
}
STRONG = [
    "%s_%s_%s_%s" % (op, order, scope, t)
    for op in ORDERS
    for order in ORDERS[op]
    for scope in SCOPES
    for t in STRONG_TYPES
]
STRONG += ["atomic_max_relaxed_%s_%s" % (scope, t) for scope in ("gpu", "sys") for t in STRONG_TYPES]
STRONG += ["atomic_or_relaxed_%s_u32" % scope for scope in ("gpu", "sys")]
STRONG += [
    "atomic_cas_%s_%s_%s" % (order, scope, t)
    for order in ("relaxed", "acq_rel")
    for scope in ("gpu", "sys")
    for t in ("i32", "u64")
]
STRONG += ["load16_relaxed_sys", "store16_relaxed_sys"]
FENCES = ["fence_acq_rel_%s" % scope for scope in SCOPES]
BLOCK = "syncthreads syncthreads_or syncthreads_count"
WARP = (
    "syncwarp shfl_idx shfl_xor shfl_up shfl_down ballot match_any any_lane all_lanes warp_broadcast_i32 "
    "warp_broadcast_u64 warp_sum_i32 warp_max_i32 warp_or_u32 warp_inclusive_sum_i32 warp_max_f32"
)
BITS = "popc ffs clz"
SHARED = (
    "shared_array shared_add_i32 shared_addr dynamic_shared shared_load16 shared_store16 shared_load_i32 "
    "shared_load_u32 shared_load_u64 shared_load_f32 shared_store_i32 shared_store_u32 shared_store_u64 "
    "shared_store_f32"
)
TIME = "globaltimer clock nanosleep"
NUMBERS = (
    "f32_as_u32 u32_as_f32 bf16_lo bf16_hi pack_bf16x2 f16_lo f16_hi pack_f16x2 pack_e4m3x2 e4m3_lo e4m3_hi "
    "mul_rn add_rn sub_rn fma_rn div_rn max_f32 min_f32 abs_f32 exp ex2_approx"
)
HOPPER = (
    "mbar_init mbar_expect_tx mbar_arrive mbar_try_wait bulk_load bulk_store bulk_commit bulk_wait "
    "bulk_wait_read fence_proxy_async elect_one griddep_wait griddep_launch"
)
DTYPES = "int32 uint32 uint64 float32 uint8"

INTRINSICS = tuple(
    PLAIN + STRONG + FENCES + " ".join([CASTS, IDS, BLOCK, WARP, BITS, SHARED, TIME, NUMBERS, HOPPER]).split()
)
