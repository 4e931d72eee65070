"""What the torch tests share: small groups, random tensors over ranks, tensors as NumPy with their bits."""

import sys
import weakref
from pathlib import Path

import numpy as np
import torch

from epmoe import LocalWorld, device
from epmoe.fused_a2a import buffers
from epmoe.fused_a2a.buffer import Buffer

sys.path.append(str(Path(__file__).parents[1] / "fused_a2a"))
import rows_group
from rows_group import BF16, group_of

__all__ = ["group_of"]
DEVICE = torch.device("cpu" if device.SIM else "cuda:0")


class OneRank(rows_group.OneRank):
    """A world of one rank seen as one rank a process: tensors instead of lists over ranks."""

    def __init__(self):
        super().__init__(LocalWorld(1))
        if device.SIM:
            for of_kind in (buffers._buffer, buffers._hybrid_ep_buffer):
                of_kind[self] = Buffer(weakref.proxy(self), launch=rows_group.SMALL_LAUNCH)


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


def leaves(values, dtype=torch.bfloat16):
    """NumPy arrays as new tensors on the tests' device that require gradients."""
    return [torch.from_numpy(np.array(v)).to(DEVICE, dtype).requires_grad_() for v in values]


def integers(rng, shapes):
    """Small whole numbers of each rank, whose sums are exact."""
    return [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]


def indices(rng, num_tokens, num_experts, top_k):
    """token_indices int64 [T, K] of each rank, some of them -1."""
    ids, _ = rows_group.routing(rng, num_tokens, num_experts, top_k)
    return [torch.from_numpy(a).to(DEVICE) for a in ids]


def assert_same(got, want, name):
    """Same dtype, shape and values, to the bit but for the sign of zero; lists are over ranks."""
    if isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{name}: {len(got)} ranks, wanted {len(want)}"
        for rank, (one, other) in enumerate(zip(got, want)):
            assert_same(one, other, f"{name}[{rank}]")
        return
    got = array(got) if isinstance(got, torch.Tensor) else got
    kinds = (got.dtype, got.shape), (want.dtype, want.shape)
    assert kinds[0] == kinds[1], (name, *kinds)
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64), err_msg=name)
