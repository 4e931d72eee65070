"""Cases of plain and strong accesses, atomics and fences."""

import itertools

import numpy as np
from case_table import DTYPE, OUT, PTX, SCOPES, at_types, case, intrinsic

from epmoe.device import device_fn, kernel, load_i32, load_u32, prefetch, store16, store_i32, store_u32, thread_idx, u64


def by_one_thread(function):
    """A kernel whose first thread calls function(params)."""
    function = device_fn(function)

    @kernel()
    def calls(params, num_tokens, my_rank):
        if thread_idx() == 0:
            function(params)

    return calls


def reads_one(op, load, store):
    return by_one_thread(lambda p: store(p + u64(OUT), op(p + u64(8))))


def writes_one(op, load, store):
    return by_one_thread(lambda p: op(p + u64(OUT), load(p + u64(8))))


def reads_16(op):
    def reads(p):
        q = op(p + u64(16))
        store16(p + u64(OUT), q[0], q[1], q[2], q[3])

    return by_one_thread(reads)


def writes_16(op):
    def writes(p):
        a, b = load_u32(p), load_u32(p + u64(4))
        op(p + u64(OUT), a, b, load_u32(p + u64(8)), load_u32(p + u64(12)))

    return by_one_thread(writes)


SAMPLE = {
    "u8": [7, 0xFE],
    "u16": [7, 0xFFFE],
    "i32": [5, -123456789],
    "u32": [5, 0xFEDCBA98],
    "u64": [5, 0xFEDCBA9876543210],
    "f32": [1.5, -3.25e-41],
}
WIDE = {"u8": "u32", "u16": "u32"}
for _ty in DTYPE:
    _load, _store = at_types(WIDE.get(_ty, _ty))
    _in = np.zeros(64 // DTYPE[_ty]().itemsize, DTYPE[_ty])
    _in[8 // _in.itemsize] = SAMPLE[_ty][1]
    _read, _written = (np.array([SAMPLE[_ty][1]], DTYPE[ty]) for ty in (WIDE.get(_ty, _ty), _ty))
    _reads = reads_one(intrinsic("load_" + _ty), _load, _store)
    _writes = writes_one(intrinsic("store_" + _ty), *at_types(_ty))
    case("load_" + _ty, r"ld\.global\.%s " % PTX[_ty], _reads, _in, _read)
    case("store_" + _ty, r"st\.global\.%s " % PTX[_ty], _writes, _in, _written)
FOUR = np.array([1, 0x80000000, 0xFFFFFFFF, 0x12345678], np.uint32)
for _name, _text in {
    "load16": r"ld\.global\.v4\.u32",
    "load16_nc": r"ld\.global\.nc\.L1::no_allocate\.L2::256B\.v4\.u32",
    "load16_stream": r"ld\.global\.L1::no_allocate\.v4\.u32",
    "load16_relaxed_sys": r"ld\.relaxed\.sys\.global\.v4\.u32",
}.items():
    _behind = np.concatenate([np.zeros(4, np.uint32), FOUR])
    case(_name, _text, reads_16(intrinsic(_name)), _behind, FOUR)


def prefetches(p):
    prefetch(p + u64(8))
    store_u32(p + u64(OUT), load_u32(p + u64(8)))


_numbers = np.arange(8, dtype=np.uint32)
case("prefetch", r"prefetch\.global\.L2", by_one_thread(prefetches), _numbers, _numbers[2:3])
for _name, _text in {
    "store16": r"st\.global\.v4\.u32",
    "store16_stream": r"st\.global\.L1::no_allocate\.v4\.u32",
    "store16_relaxed_sys": r"st\.relaxed\.sys\.global\.v4\.u32",
}.items():
    case(_name, _text, writes_16(intrinsic(_name)), FOUR, FOUR)


def changes_one(op, load, store):
    return by_one_thread(lambda p: store(p + u64(OUT), op(p, load(p + u64(8)))))


def adds_one(op, load, store):
    def adds(p):
        op(p, load(p + u64(8)))
        store(p + u64(OUT), load(p))

    return by_one_thread(adds)


def swaps_twice(op, load, store):
    def swaps(p):
        new = load(p + u64(16))
        store(p + u64(OUT), op(p, load(p + u64(8)), new))  # not expected: stays
        store(p + u64(OUT + 8), op(p, load(p + u64(24)), new))  # expected: changes

    return by_one_thread(swaps)


def words_of(ty, *values):
    """Values of a type, one in each 8 bytes."""
    dtype = DTYPE[ty]
    out = np.zeros(len(values) * (8 // dtype().itemsize), dtype)
    out[:: 8 // dtype().itemsize] = np.array(values, dtype)
    return out


def word_case(name, ptx, made, ty, before, result, after=None):
    """A case whose memory is words of a type, one in each 8 bytes: before, at OUT, and, if given, after."""
    left = after and words_of(ty, *after)
    case(name, ptx, made(intrinsic(name), *at_types(ty)), words_of(ty, *before), words_of(ty, *result), left=left)


FIRST = {"i32": -7, "u32": 0xFFFFFFF0, "u64": 0xFFFFFFFFFFFFFFF0}
SECOND = {"i32": 40, "u32": 0x20, "u64": 0x20}
for _ty in ("i32", "u32", "u64"):
    _a, _b = FIRST[_ty], SECOND[_ty]
    with np.errstate(over="ignore"):
        _sum = DTYPE[_ty](_a) + DTYPE[_ty](_b)
    for _prefix, _text, _orders, _made, _in, _expected, _after in (
        ("ld", "ld", "relaxed acquire", reads_one, (_b, _a), _a, None),
        ("st", "st", "relaxed release", writes_one, (_b, _a), _a, None),
        ("red_add", "red", "relaxed release", adds_one, (_a, _b), _sum, None),
        ("atomic_add", "atom", "relaxed acquire release acq_rel", changes_one, (_a, _b), _a, (_sum, _b)),
    ):
        for _scope, _order in itertools.product(SCOPES, _orders.split()):
            _add = r"\.add" * ("add" in _prefix)
            _ptx = r"%s\.%s\.%s\.global%s\.%s " % (_text, _order, _scope, _add, PTX[_ty])
            word_case(f"{_prefix}_{_order}_{_scope}_{_ty}", _ptx, _made, _ty, _in, [_expected], _after)
    for _scope in ("gpu", "sys"):
        _ptx = r"atom\.relaxed\.%s\.global\.max\.%s " % (_scope, PTX[_ty])
        _name = f"atomic_max_relaxed_{_scope}_{_ty}"
        word_case(_name, _ptx, changes_one, _ty, (_a, _b), [_a], (max(_a, _b), _b))
for _scope in ("gpu", "sys"):
    _ptx = r"atom\.relaxed\.%s\.global\.or\.b32 " % _scope
    _before, _after = (0x80000001, 0x11), (0x80000011, 0x11)
    word_case(f"atomic_or_relaxed_{_scope}_u32", _ptx, changes_one, "u32", _before, _before[:1], _after)
    for _order in ("relaxed", "acq_rel"):
        for _ty, _bits in (("i32", "b32"), ("u64", "b64")):
            _ptx, _a = r"atom\.%s\.%s\.global\.cas\.%s " % (_order, _scope, _bits), FIRST[_ty]
            _name = f"atomic_cas_{_order}_{_scope}_{_ty}"
            word_case(_name, _ptx, swaps_twice, _ty, (_a, 3, 9, _a), (_a, _a), (9, 3, 9, _a))


def fences(op):
    @kernel()
    def fence(params, num_tokens, my_rank):
        store_i32(params + u64(OUT) + u64(4 * thread_idx()), thread_idx())
        op()
        store_i32(params + u64(OUT) + u64(4 * thread_idx()), load_i32(params + u64(OUT) + u64(4 * thread_idx())) + 1)

    return fence


for _name, _text in {
    **{"fence_acq_rel_" + _scope: r"fence\.acq_rel\.%s;" % _scope for _scope in SCOPES},
    "syncwarp": r"bar\.warp\.sync",
    "syncthreads": r"bar\.sync",
    "griddep_wait": r"griddepcontrol\.wait",
    "griddep_launch": r"griddepcontrol\.launch_dependents",
    "fence_proxy_async": r"fence\.proxy\.async;",
}.items():
    _made, _one = fences(intrinsic(_name)), np.zeros(1, np.int32)
    case(_name, _text, _made, _one, np.arange(1, 33, dtype=np.int32))
