"""Every word of the device layer, as the simulator does it: name -> function."""
from . import hopper, shared, warp
from .ops import OPS, word

for _f in (warp.syncthreads, warp.syncthreads_or, warp.syncthreads_count, warp.syncwarp, warp.shfl_idx, warp.shfl_xor,
           warp.shfl_up, warp.shfl_down, warp.ballot, warp.match_any, warp.any_lane, warp.all_lanes, warp.warp_broadcast_i32,
           warp.warp_broadcast_u64, warp.warp_sum_i32, warp.warp_inclusive_sum_i32, warp.warp_max_f32):
    word(_f)

WORDS = dict(OPS)
DTYPES = {n: getattr(shared, n) for n in ("int32", "uint32", "uint64", "float32", "uint8")}
assert hopper.bulk_load.__name__ in WORDS
