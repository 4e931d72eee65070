"""Arrays from anywhere: NumPy of any strides, torch-like, DLPack, __cuda_array_interface__; and DeviceArray."""

import ctypes
import gc
from types import SimpleNamespace
from weakref import WeakSet

import ml_dtypes
import numpy as np
import pytest
from worlds_at_hand import BF16, config, equal_round, parallel

from epmoe import DeviceArray, EPValueError
from epmoe.host.arrays import PEEKS, Field, first, to_numpy, view
from epmoe.host.dlpack import capsule


class WithDlpack:
    """An array of host memory that shows itself by DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnGpu:
    """Something in GPU memory, as __cuda_array_interface__ describes it."""

    def __init__(self, shape, typestr, address=256, strides=None, device=None):
        self.__cuda_array_interface__ = dict(
            shape=shape, typestr=typestr, data=(address, False), strides=strides, version=3
        )
        if device is not None:
            self.device = type("Device", (), {"id": device})()


def test_numpy_is_seen_where_it_lies():
    a = np.arange(6, dtype=np.int32).reshape(2, 3)
    seen = view(a, "a")
    assert seen.host is a and seen.address == a.ctypes.data and seen.strides is None
    assert view(a.T, "a").strides is not None


def test_dlpack_of_host_memory_is_not_copied():
    a = np.arange(6, dtype=np.int64)
    assert view(WithDlpack(a), "a").address == a.ctypes.data


def test_cuda_array_interface_is_read_without_a_gpu():
    seen = view(OnGpu((2, 8), "<V2", address=4096, device=3), "x")
    assert (seen.host, seen.address, seen.shape, seen.device) == (None, 4096, (2, 8), 3)
    assert seen.dtype == np.dtype(BF16)
    assert view(OnGpu((2, 8), "<f4", strides=(32, 4)), "x").strides is None
    assert view(OnGpu((2, 8), "<f4", strides=(64, 4)), "x").strides is not None


def test_gpu_memory_in_the_simulator_is_refused_with_the_remedy(ep, x, ids):
    with pytest.raises(EPValueError, match="input_tokens of rank 0 is in GPU memory.*simulator.*doctor"):
        ep.dispatch([OnGpu((4, 16), "<V2"), x[1]], ids)


def strided(a):
    return np.repeat(a, 2, axis=1)[:, ::2]


def shifted(a):
    """Its copy at an odd address."""
    raw = np.frombuffer(b"?" + a.tobytes(), np.uint8)
    return raw[1:].view(a.dtype).reshape(a.shape)


@pytest.mark.parametrize("laid", [strided, shifted])
def test_strided_and_unaligned_host_arrays_are_taken(laid, ep, x, ids, weights):
    equal_round(ep, [laid(a) for a in x], *([np.asfortranarray(a) for a in of] for of in (ids, weights)))


def test_one_array_may_be_given_for_several_ranks():
    whole = np.random.default_rng(0).standard_normal((6, 16)).astype(BF16)
    ids = [np.zeros((6, 2), int) + [0, 1], np.zeros((3, 2), int) + [1, 2]]
    with parallel(config(max_tokens_per_rank=6)) as ep:
        d = ep.dispatch([whole, whole[:3]], ids)  # two arrays that begin at one place
        assert [a.n_rows for a in d] == [15, 3]


def made(array):
    """A DeviceArray over host memory: what it says of itself can be tested without a GPU."""

    def read(dtype, shape, offset):
        raw = (ctypes.c_uint8 * shape[0]).from_address(array.ctypes.data + offset)
        return np.frombuffer(raw, dtype)

    memory = SimpleNamespace(base=array.ctypes.data, ordinal=0, buffer=SimpleNamespace(read=read), start=0)
    return DeviceArray(memory, Field(array.shape, array.dtype, 0))


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.uint32, ml_dtypes.float8_e4m3fn])
def test_device_arrays_read_and_cut(dtype):
    a = np.arange(24).reshape(4, 6).astype(dtype)
    d = made(a)
    assert np.array_equal(d.numpy().view(np.uint8), a.view(np.uint8))
    assert d.nbytes == a.nbytes and len(d) == 4
    assert np.array_equal(to_numpy(first(d, 2)).astype(float), a[:2].astype(float))
    assert np.array_equal(to_numpy(first(d, 2, axis=1)).astype(float), a[:, :2].astype(float))
    assert to_numpy(first(d, 0)).shape == (0, 6)
    assert view(d, "d").address == a.ctypes.data and view(first(d, 2), "d").strides is None
    assert view(first(d, 2, axis=1), "d").strides is not None


def test_device_arrays_name_bf16_in_the_cuda_array_interface():
    a = np.zeros((2, 8), BF16)
    interface = made(a).__cuda_array_interface__
    assert interface["shape"] == (2, 8) and interface["typestr"] == "<V2"
    assert interface["data"] == (a.ctypes.data, False)


def test_a_dlpack_capsule_holds_the_owner_until_it_is_gone():
    a, owners = np.arange(12, dtype=np.float32).reshape(3, 4), WeakSet()

    class Owner:
        pass

    class OnHost:
        def __dlpack__(self, **_):
            owner = Owner()
            owners.add(owner)
            return capsule(a.ctypes.data, (3, 4), None, a.dtype, (1, 0), owner)

        def __dlpack_device__(self):
            return (1, 0)

    taken = np.from_dlpack(OnHost())
    assert np.array_equal(taken, a) and taken.ctypes.data == a.ctypes.data
    gc.collect()
    assert len(owners) == 1
    del taken
    OnHost().__dlpack__()  # used by nobody
    gc.collect()
    assert not owners


@pytest.mark.parametrize("thing", [None, 3, "x", [1, 2], object(), np.ndarray], ids=lambda a: type(a).__name__)
def test_what_is_no_array_is_refused(thing):
    with pytest.raises(EPValueError, match="weights is a .*NumPy"):
        view(thing, "weights")


def test_a_masked_array_is_refused(ep, x, ids):
    masked = np.ma.masked_array(ids[1], ids[1] == 0)
    with pytest.raises(EPValueError, match=r"topk_ids of rank 1 is a masked array.*filled"):
        ep.dispatch(x, [ids[0], masked, *ids[2:]])


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_tensors_without_plain_memory_are_refused(kind):
    torch = pytest.importorskip("torch")
    t = torch.zeros(2, 2, device="meta") if kind == "meta" else torch.zeros(2, 2).to_sparse()
    with pytest.raises(EPValueError, match="weights is a tensor with layout .* give a dense one"):
        view(t, "weights")
    with pytest.raises(EPValueError, match="weights is a tensor that NumPy cannot view"):
        view(torch._neg_view(torch.zeros(2)), "weights")


def test_forms_of_device_arrays_differ_by_gpu():
    forms = set()
    for ordinal in (0, 1):
        piece = SimpleNamespace(pool=SimpleNamespace(machine=SimpleNamespace(ordinal=ordinal)))
        loan = SimpleNamespace(base=256, piece=piece)
        form, address, _ = PEEKS[DeviceArray](DeviceArray(loan, Field((2, 3), np.float32, 64)), "x")
        assert address == 320 and form[:3] == ((2, 3), np.float32, None)
        forms.add(form)
    assert len(forms) == 2
