"""Every word of the device layer, as the simulator does it: name -> function."""

from .. import names
from . import hopper, id_ops, plain_ops, shared, strong_ops, warp  # each enters its words into OPS
from .ops import OPS, word

for _name in names.BLOCK.split() + names.WARP.split():
    word(getattr(warp, _name))

WORDS = dict(OPS)
DTYPES = {n: getattr(shared, n) for n in ("int32", "uint32", "uint64", "float32", "uint8")}
assert set(names.WORDS) == set(WORDS) and all((hopper, id_ops, plain_ops, strong_ops))
