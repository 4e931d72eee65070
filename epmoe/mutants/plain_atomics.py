"""Read-modify-writes as a plain load and a plain store. They replace an atomic in a "plain" mutant."""

from epmoe import device

PLAIN_ATOMICS = {}


def _enter(op, kind, change):
    load, store = getattr(device, f"load_{kind}"), getattr(device, f"store_{kind}")

    def rmw(address, *operands):
        old = load(address)
        store(address, change(old, *operands))
        return old

    PLAIN_ATOMICS[f"plain_{op}_{kind}"] = rmw


for _kind in ("i32", "u32", "u64"):
    _enter("red_add", _kind, lambda old, v: old + v)
    _enter("atomic_add", _kind, lambda old, v: old + v)
    _enter("atomic_max", _kind, max)
    _enter("atomic_or", _kind, lambda old, v: old | v)
    _enter("atomic_cas", _kind, lambda old, expected, new: new if old == expected else old)


def plain_shared_add_i32(array, i, v):
    """array[i] += v"""
    old = array[i]
    array[i] = old + v
    return old


PLAIN_ATOMICS["plain_shared_add_i32"] = plain_shared_add_i32
