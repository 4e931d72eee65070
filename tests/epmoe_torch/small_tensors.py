"""What the torch tests share: small groups, random tensors over ranks, tensors as NumPy with their bits."""

import weakref

import ml_dtypes
import numpy as np
import torch

from epmoe import LaunchConfig, LocalWorld, device
from epmoe.fused_a2a import buffers
from epmoe.fused_a2a.buffer import Buffer

BF16 = np.dtype(ml_dtypes.bfloat16)
DEVICE = torch.device("cpu" if device.SIM else "cuda:0")


def group_of(n_ranks, **options):
    """A LocalWorld whose buffers use few threads in the simulator; on a GPU, the GPU's own."""
    group = LocalWorld(n_ranks, **options)
    if device.SIM:
        for of_kind in (buffers._buffer, buffers._hybrid_ep_buffer):
            buffer = of_kind[group] = Buffer(
                weakref.proxy(group), launch=LaunchConfig(n_sms=2, num_threads=32)
            )
            weakref.finalize(group, buffer.close, collective=False)
    return group


class OneRank:
    """A world of one rank seen as one rank a process: tensors instead of lists over ranks."""

    lists = False

    def __init__(self):
        self._world = LocalWorld(1)
        if device.SIM:
            for of_kind in (buffers._buffer, buffers._hybrid_ep_buffer):
                of_kind[self] = Buffer(
                    weakref.proxy(self), launch=LaunchConfig(n_sms=2, num_threads=32)
                )

    def launching(self, fused):
        """As LocalWorld's, without streams of its own."""
        return self._world.launching(False)

    def __getattr__(self, name):
        return getattr(self._world, name)


def array(tensor):
    """A tensor, or lists of them, as NumPy copies; None stays None."""
    if isinstance(tensor, (list, tuple)):
        return [array(one) for one in tensor]
    if tensor is None:
        return None
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BF16).copy()
    return tensor.numpy().copy()


def leaves(values, dtype=torch.bfloat16, gradient=True):
    """NumPy arrays as new tensors on the tests' device that require gradients."""
    return [
        torch.from_numpy(np.array(v)).to(DEVICE, dtype).requires_grad_(gradient) for v in values
    ]


def integers(rng, shapes):
    """Small whole numbers of each rank, whose sums are exact."""
    return [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]


def indices(rng, num_tokens, num_experts, top_k, dropped=0.2):
    """token_indices int64 [T, K] of each rank, some of them -1."""
    ids = [
        np.argsort(rng.random((n, num_experts)), axis=1)[:, :top_k].astype(np.int64)
        for n in num_tokens
    ]
    return [
        torch.from_numpy(np.where(rng.random(a.shape) < dropped, -1, a)).to(DEVICE) for a in ids
    ]


def inner(one, other):
    """<one, other> over the world, in float64: exact on small integers."""
    return sum((a.detach().double() * b.detach().double()).sum().item() for a, b in zip(one, other))


def assert_same(got, want, name):
    """Same dtype, shape and values, to the bit but for the sign of zero; lists are over ranks."""
    if isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{name}: {len(got)} ranks, wanted {len(want)}"
        for rank, (one, other) in enumerate(zip(got, want)):
            assert_same(one, other, f"{name}[{rank}]")
        return
    got = array(got) if isinstance(got, torch.Tensor) else got
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (
        name,
        got.dtype,
        got.shape,
        want.dtype,
        want.shape,
    )
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64), err_msg=name)
