"""The GPU's machine (-m gpu): memory, streams, launches, refusals."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from case_table import OUT

from benchmarks.host_time import time_piece
from epmoe import device
from epmoe.device import dynamic_shared, kernel, shared_load_i32, store_i32, syncthreads, thread_idx, u32, u64
from epmoe_ref.errors import EPValueError, UnavailableError

pytestmark = pytest.mark.gpu

FAST_PIECE_US = 1.0  # time_piece() on a fast CPU of an H200 host


@kernel(max_threads=256)
def adds_one(params, num_tokens, my_rank):
    """Writes thread + num_tokens + my_rank."""
    store_i32(params + u64(4 * thread_idx()), thread_idx() + num_tokens + my_rank)


@pytest.fixture
def machine():
    return device.machine(1)


@pytest.fixture
def a(machine):
    buffer = machine.alloc(2 * OUT, "a")
    buffer.fill(0)
    yield buffer
    buffer.free()


def test_a_gpu_that_is_too_old_is_refused(monkeypatch):
    from epmoe.device import gpu_machine

    monkeypatch.setattr(gpu_machine, "OLDEST", (99, 0))
    with pytest.raises(UnavailableError, match="need 99.0 or newer: EPMOE_DEVICE=sim"):
        device.machine(1)


def test_buffers(machine):
    a = machine.alloc(1000, "a")
    assert a.address % 256 == 0
    a.fill(0xA5)
    a.write(np.arange(6, dtype=np.float32).reshape(2, 3), offset=100)
    assert a.read(np.float32, (2, 3), 100).tolist() == [[0, 1, 2], [3, 4, 5]]
    a.fill(7, offset=990, nbytes=5)
    assert a.read(np.uint8, 10, 990).tolist() == [7] * 5 + [0xA5] * 5
    part = SimpleNamespace(__cuda_array_interface__=dict(data=(a.address + 16, False)))
    assert machine.adopt(part, "part") == a.address + 16
    with pytest.raises(EPValueError, match="which has 1000 bytes"):
        a.read(np.int32, 251)
    with pytest.raises(EPValueError, match="not in the GPU's memory"):
        machine.adopt(np.zeros(3), "host array")
    a.free()
    a.free()


def test_launches_take_their_arguments_and_follow_one_another(machine, a):
    stream = machine.stream()
    for n in range(50):
        machine.launch(adds_one, 1, 256, (a.address, n, -3), stream=stream)
    assert (a.read(np.int32, 256) == np.arange(256) + 49 - 3).all()


def test_a_stream_of_the_caller(machine, a):
    from cuda.bindings import driver

    error, handle = driver.cuStreamCreate(1)
    assert int(error) == 0
    stream = machine.stream(0, handle=int(handle))
    machine.launch(adds_one, 1, 256, (a.address, 5, 0), stream=stream)
    stream.synchronize()
    assert a.read(np.int32, 1)[0] == 5


def test_what_could_not_be_resident_is_refused(machine):
    stream = machine.stream()
    limit = machine.max_resident_blocks(adds_one, 256)
    assert limit >= machine.n_sms
    # ranks that wait for each other share it
    assert device.machine(4).max_resident_blocks(adds_one, 256) == limit
    for grid, block, why in (
        (limit + 1, 256, "cannot be resident at once"),
        (1, 257, "takes 1 to 256"),
        (0, 32, "at least 1"),
    ):
        with pytest.raises(EPValueError, match=why):
            machine.launch(adds_one, grid, block, (0, 0, 0), stream=stream)
    with pytest.raises(EPValueError, match="a block has at most"):
        machine.launch(adds_one, 1, 32, (0, 0, 0), stream=stream, shared_bytes=300 * 1024)


@kernel()
def ping_pong(params, num_tokens, my_rank):
    """Two launches that wait for each other 100 times."""
    if thread_idx() == 0:
        for n in range(100):
            while device.ld_acquire_sys_i32(params) != 2 * n + my_rank:
                pass
            device.st_release_sys_i32(params, 2 * n + my_rank + 1)


def test_ranks_run_at_the_same_time():
    machine = device.machine(2)
    a = machine.alloc(256, "flag")
    a.fill(0)
    streams = [machine.stream(r) for r in range(2)]
    with machine.hold():
        for r in range(2):
            machine.launch(ping_pong, 1, 32, (a.address, 0, r), stream=streams[r])
    assert a.read(np.int32, 1)[0] == 200
    a.free()


@kernel()
def uses_much_shared(params, num_tokens, my_rank):
    base = dynamic_shared()
    device.shared_store_i32(base + u32(200 * 1024) + u32(4 * thread_idx()), thread_idx())
    syncthreads()
    store_i32(
        params + u64(OUT + 4 * thread_idx()), shared_load_i32(base + u32(200 * 1024) + u32(4 * (63 - thread_idx())))
    )


@pytest.mark.parametrize("options", [{}, dict(programmatic=True)])
def test_much_shared_memory_and_launch_attributes(machine, a, options):
    stream = machine.stream()
    launch = machine.prepared(uses_much_shared, 1, 64, (), 0, 0, stream=stream, shared_bytes=220 * 1024, **options)
    for _ in range(2):
        a.fill(0)
        launch.start(a.address)
        assert (a.read(np.int32, 64, OUT) == np.arange(64)[::-1]).all()


def test_a_launch_starts_in_a_thread_without_a_context(machine, a):
    from cuda.bindings import driver

    launch = machine.prepared(adds_one, 1, 64, (), 1, 0, stream=machine.stream())

    def elsewhere():
        assert int(driver.cuCtxSetCurrent(None)[0]) == 0
        launch.start(a.address)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(elsewhere).result()
    assert (a.read(np.int32, 64) == np.arange(64) + 1).all()


def test_description(machine):
    assert machine.name in machine.describe()


def test_a_launch_costs_the_host_little(machine, a):
    launch = machine.prepared(adds_one, 1, 32, (), 1, 0, stream=machine.stream())
    launch.start(a.address)
    machine.synchronize()

    def seconds_of(call):
        start = time.thread_time()  # without the time of other programs
        for _ in range(50):
            call()
        return (time.thread_time() - start) / 50

    costs, pieces = [], []
    for _ in range(20):
        costs.append(seconds_of(lambda: launch.start(a.address)))
        pieces.append(time_piece())
        machine.synchronize()
    cost, slowness = np.median(costs), max(1, np.median(pieces) / FAST_PIECE_US)
    assert cost < 15e-6 * slowness, f"{1e6 * cost:.1f} us, where all Python takes {slowness:.1f} times as long as usual"
