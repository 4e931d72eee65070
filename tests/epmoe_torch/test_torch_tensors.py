"""Tensors go in and come out without a copy, stay alive as long as they are looked at, and the program of docs/torch.md runs."""

import gc
import queue
import re
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands_shown import ROOT, python
from small_tensors import DEVICE, array, group_of

from epmoe import device
from epmoe.host.memory_pool import Arrangement, MemoryPool
from epmoe.torch import fused_combine, fused_dispatch, get_buffer, get_hidden_bytes
from epmoe.torch.tensors import readable, tensors

PAGE = ROOT / "docs" / "torch.md"


def world_of_ones():
    """Two ranks whose tokens all go to expert 1 of 2, on rank 1."""
    x = [torch.full((6, 8), rank + 1, dtype=torch.bfloat16, device=DEVICE) for rank in range(2)]
    ids = [torch.ones(6, 1, dtype=torch.int64, device=DEVICE) for _ in x]
    probs = [torch.ones(6, 1, device=DEVICE) for _ in x]
    return group_of(2), x, ids, probs


KEPT_TO_THE_END = """
import numpy as np, torch
from epmoe.torch.tensors import tensors
class Holder: pass
torch.kept = Holder()
torch.kept.itself, torch.kept.tensor = torch.kept, tensors(np.arange(6, dtype=np.float32))
print(torch.kept.tensor.tolist())
"""


def test_a_tensor_may_outlive_the_interpreter():
    done = python("-c", KEPT_TO_THE_END, EPMOE_DEVICE="sim")
    assert (done.returncode, done.stdout) == (0, "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]\n"), done.stderr


def test_an_exception_passes_by_tensors_that_end_on_its_way():
    seen = []
    with pytest.raises(ValueError, match="invalid literal") as raised:
        seen.append((tensors(np.arange(6, dtype=np.float32)), int("x")))
    assert raised.value.__cause__ is None and not seen


def test_what_kernels_can_read_is_not_copied():
    x = torch.zeros(4, 8, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    assert readable("x", x).data_ptr() == x.data_ptr() and not readable("x", x).requires_grad
    assert readable("x", [x, None])[1] is None
    for other in (x.T, x.expand(4, 8)[:, :3], x.view(-1)[3:11].view(1, 8)):
        seen = readable("x", other)
        assert seen.data_ptr() % 16 == 0 and seen.is_contiguous() and torch.equal(seen, other)


def test_results_of_the_simulator_are_tensors_over_the_same_memory():
    made = np.arange(12, dtype=np.float32).reshape(3, 4)
    seen = tensors([made, None, "handle"])
    made[1, 2] = 77
    assert seen[0].data_ptr() == made.ctypes.data and seen[0][1, 2] == 77
    assert seen[1:] == [None, "handle"]
    assert tensors(np.zeros((0, 4), np.int64)).shape == (0, 4)


def test_results_stay_while_they_are_looked_at_and_their_memory_is_used_again():
    group, x, ids, probs = world_of_ones()
    kept = [fused_dispatch(x, ids, probs, 2, group)[0][1] for _ in range(3)]
    for number in range(30):
        more = [t + 2 + number for t in x]
        rows = fused_dispatch(more, ids, probs, 2, group)[0][1]
        assert torch.equal(rows, torch.cat(more))
        if number == 4:
            gc.collect()
            settled = get_buffer(group, 0).allocated_bytes
    assert get_buffer(group, 0).allocated_bytes == settled
    assert all(torch.equal(rows, torch.cat(x)) for rows in kept)


def test_results_can_be_changed_in_place():
    group, x, ids, probs = world_of_ones()
    x = [t.requires_grad_() for t in x]
    rows, *_, handle = fused_dispatch(x, ids, probs, 2, group)
    out, _ = fused_combine(rows, group, handle)
    out[0] += 1
    out[1].mul_(3)
    torch.autograd.backward(out, [torch.ones_like(o) for o in out])
    assert torch.equal(out[0], x[0] + 1) and torch.equal(out[1], x[1] * 3)
    assert torch.equal(x[0].grad, torch.ones_like(x[0]))
    assert torch.equal(x[1].grad, torch.full_like(x[1], 3))


def test_memory_of_results_may_come_back_in_another_thread():
    """As in torch's backward; whatever comes back when, all of it is there in the end."""
    interval = sys.getswitchinterval()
    heap = MemoryPool(SimpleNamespace(), part=(Silent(), 0, 64 * 256))
    loans = queue.Queue(maxsize=8)

    def drop():
        for loan in iter(loans.get, "end"):
            del loan

    threads = [threading.Thread(target=drop) for _ in range(2)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for number in range(2000):
            loan = heap.lend(Arrangement("x", {"x": ((256 * (1 + number % 5),), np.uint8)}))
            loans.put(loan)
            del loan
    finally:
        for _ in threads:
            loans.put("end")
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert heap.lend(Arrangement("x", {"x": ((64 * 256,), np.uint8)})) is not None


class Silent:
    """A Buffer that nobody writes."""

    address, nbytes = 0, 64 * 256

    def fill(self, byte, offset, nbytes):
        pass


def test_hidden_bytes_are_megatrons():
    assert get_hidden_bytes(torch.zeros(3, 16, dtype=torch.float8_e4m3fn)) == 32
    assert get_hidden_bytes(torch.zeros(0, 16, dtype=torch.float32)) == 64


def test_errors_name_the_tensor():
    group, x, ids, probs = world_of_ones()
    with pytest.raises(ValueError, match="token_probs of rank 0 has dtype float64"):
        fused_dispatch(x, ids, [p.double() for p in probs], 2, group)
    if not device.SIM:
        with pytest.raises(ValueError, match="x of rank 0 is on the CPU"):
            fused_dispatch([t.cpu() for t in x], ids, probs, 2, group)


def test_the_program_of_one_process_runs():
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    block = next(b for b in blocks if "LocalWorld(2)" in b)
    assert len(block.splitlines()) <= 13
    if not device.SIM:
        block = f"import torch\ntorch.set_default_device({str(DEVICE)!r})\n" + block
    names = {}
    try:
        exec(compile(block, "torch.md", "exec"), names)
    finally:
        torch.set_default_device(None)
    out, x, y = array(names["out"]), names["x"], array(names["y"])
    assert [o.shape for o in out] == [(5, 64), (3, 64)]
    assert all(t.grad.any() for t in [*x, *names["probs"]])
    sums = [sum(a.astype(float).sum() for a in of) for of in (out, y)]
    assert np.isclose(*sums, rtol=2e-2, atol=2)
