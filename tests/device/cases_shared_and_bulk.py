"""Cases of shared memory, mbarriers and bulk copies."""

import numpy as np
from case_table import FLOATS, LONG, OUT, PTX, VALUES, at_types, case, intrinsic

from epmoe import device
from epmoe.device import dynamic_shared, kernel, load_u32, shared_array, store_i32, syncthreads, thread_idx, u32, u64
from epmoe.device import int32 as shared_int32

NONE = np.zeros(1, np.int32)  # the inputs of kernels that read none


@kernel()
def reverses(params, num_tokens, my_rank):
    a = shared_array(64, shared_int32)
    i = thread_idx()
    a[i] = device.load_i32(params + u64(4 * i))
    syncthreads()
    store_i32(params + u64(OUT) + u64(4 * i), a[63 - i])


case("shared_array", r"ld\.shared\.u32", reverses, VALUES, VALUES[::-1].copy(), block=64)


def counts_in_shared(op):
    @kernel()
    def counts(params, num_tokens, my_rank):
        a = shared_array(4, shared_int32)
        i = thread_idx()
        if i < 4:
            a[i] = 10
        syncthreads()
        op(a, i % 2 + 1, 1 + i % 2)
        syncthreads()
        if i < 4:
            store_i32(params + u64(OUT) + u64(4 * i), a[i])

    return counts


_made, _counted = counts_in_shared(intrinsic("shared_add_i32")), np.array([10, 42, 74, 10], np.int32)
case("shared_add_i32", r"atom\.relaxed\.cta\.shared\.add\.s32", _made, NONE, _counted, block=64)


def goes_through_shared(load, store, op_load, op_store, size):
    """Write with a store to a shared-window address, read with the matching load, in reverse order."""

    @kernel()
    def through(params, num_tokens, my_rank):
        base = dynamic_shared()
        i = thread_idx()
        op_store(base + u32(size * i), load(params + u64(size * i)))
        syncthreads()
        store(params + u64(OUT) + u64(size * i), op_load(base + u32(size * (63 - i))))

    return through


INSTRUCTION = {"load": "ld", "store": "st"}
for _ty, _data in {"i32": VALUES, "u32": VALUES.view(np.uint32), "u64": LONG, "f32": FLOATS}.items():
    _through = intrinsic("shared_load_" + _ty), intrinsic("shared_store_" + _ty)
    _made, _reversed = goes_through_shared(*at_types(_ty), *_through, _data.itemsize), _data[::-1].copy()
    for _kind, _text in INSTRUCTION.items():
        _ptx = r"%s\.shared\.%s" % (_text, PTX[_ty])
        case(f"shared_{_kind}_{_ty}", _ptx, _made, _data, _reversed, block=64, shared_bytes=1024)


def sixteen_through_shared(op_load, op_store):
    @kernel()
    def through(params, num_tokens, my_rank):
        base = dynamic_shared()
        i = thread_idx()
        p = params + u64(16 * i)
        op_store(base + u32(16 * i), load_u32(p), load_u32(p + u64(4)), load_u32(p + u64(8)), load_u32(p + u64(12)))
        syncthreads()
        q = op_load(base + u32(16 * (15 - i)))
        device.store16(params + u64(OUT) + u64(16 * i), q[0], q[1], q[2], q[3])

    return through


_made = sixteen_through_shared(intrinsic("shared_load16"), intrinsic("shared_store16"))
_reversed = VALUES.reshape(16, 4)[::-1].copy()
for _kind, _text in INSTRUCTION.items():
    _ptx = r"%s\.shared\.v4\.u32" % _text
    case(f"shared_{_kind}16", _ptx, _made, VALUES, _reversed, block=16, shared_bytes=256)


@kernel()
def tells_addresses(params, num_tokens, my_rank):
    a, b = shared_array(8, shared_int32), shared_array(8, shared_int32)
    if thread_idx() == 0:
        a[3] = 7
        b[3] = 9
        store_i32(params + u64(OUT), device.shared_load_i32(device.shared_addr(a) + u32(12)))
        store_i32(params + u64(OUT + 4), device.shared_load_i32(device.shared_addr(b) + u32(12)))


case("shared_addr", r"cvta\.to\.shared\.u64", tells_addresses, NONE, np.array([7, 9], np.int32))


@kernel()
def tells_dynamic(params, num_tokens, my_rank):
    a = shared_array(8, shared_int32)
    base = dynamic_shared()
    i = thread_idx()
    if i < 8:
        a[i] = 1
    device.shared_store_i32(base + u32(4 * i), i)
    syncthreads()
    aligned = 1 if base % u32(16) == u32(0) else 0
    store_i32(params + u64(OUT) + u64(4 * i), device.shared_load_i32(base + u32(4 * i)) + aligned)


_places = np.arange(1, 33, dtype=np.int32)
case("dynamic_shared", r"\.extern \.shared \.align 128", tells_dynamic, NONE, _places, shared_bytes=128)


@kernel()
def copies_in_bulk(params, num_tokens, my_rank):
    """Two phases: load 256 bytes, add 1 to each word, store them, with two arrivals a phase."""
    stage = dynamic_shared()
    bar = stage + u32(256)
    i = thread_idx()
    if i == 0:
        device.mbar_init(bar, u32(2))
        device.fence_proxy_async()
    syncthreads()
    for phase in range(2):
        if i == 0:
            device.mbar_expect_tx(bar, u32(256))
            device.bulk_load(stage, params + u64(256 * phase), u32(256), bar)
        if i == 1:
            device.mbar_arrive(bar)
        while device.mbar_try_wait(bar, u32(phase)) == 0:
            pass
        device.shared_store_i32(stage + u32(4 * i), device.shared_load_i32(stage + u32(4 * i)) + 1)
        device.fence_proxy_async()
        syncthreads()
        if i == 0:
            device.bulk_store(params + u64(OUT + 256 * phase), stage, u32(256))
            device.bulk_commit()
            device.bulk_wait_read()
        syncthreads()
    if i == 0:
        device.bulk_wait()


_bulk = np.arange(128, dtype=np.int32) * 3
for _name, _text in {
    "mbar_init": r"mbarrier\.init\.shared::cta\.b64",
    "mbar_expect_tx": r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64",
    "mbar_arrive": r"mbarrier\.arrive\.shared::cta\.b64",
    "mbar_try_wait": r"mbarrier\.try_wait\.parity\.shared::cta\.b64",
    "bulk_load": r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes",
    "bulk_store": r"cp\.async\.bulk\.global\.shared::cta\.bulk_group",
    "bulk_commit": r"cp\.async\.bulk\.commit_group",
    "bulk_wait": r"cp\.async\.bulk\.wait_group 0",
    "bulk_wait_read": r"cp\.async\.bulk\.wait_group\.read 0",
}.items():
    case(_name, _text, copies_in_bulk, _bulk, _bulk + 1, block=64, shared_bytes=512)


@kernel()
def elects(params, num_tokens, my_rank):
    chosen = device.elect_one()
    if chosen:
        store_i32(params + u64(OUT) + u64(4 * (thread_idx() // 32)), 1)
    how_many = device.popc(device.ballot(chosen))
    if thread_idx() % 32 == 0:
        store_i32(params + u64(OUT + 8) + u64(4 * (thread_idx() // 32)), how_many)


case("elect_one", r"elect\.sync", elects, NONE, np.array([1, 1, 1, 1], np.int32), block=64)
