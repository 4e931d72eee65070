"""Every intrinsic of the simulator: name -> function."""

from .. import intrinsics
from . import hopper, id_ops, plain_ops, shared, strong_ops, warp  # each registers its intrinsics in OPS
from .ops import OPS, intrinsic

for _name in intrinsics.BLOCK.split() + intrinsics.WARP.split():
    intrinsic(getattr(warp, _name))

INTRINSICS = dict(OPS)
DTYPES = {n: getattr(shared, n) for n in ("int32", "uint32", "uint64", "float32", "uint8")}
assert set(intrinsics.INTRINSICS) == set(INTRINSICS) and all((hopper, id_ops, plain_ops, strong_ops))
