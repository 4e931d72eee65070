"""What calls of epmoe.torch cost the host besides those of epmoe.fused_a2a, on a CUDA driver that runs nothing.

`python checks_of_torch_calls.py [check_...]` runs those, or all. torch's CPU tensors pass for tensors on a GPU:
addresses, shapes and lifetimes are as there.
"""

import os
import sys
from itertools import repeat
from pathlib import Path

os.environ["EPMOE_DEVICE"] = "gpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "host"))

import torch
from counted_driver import counted_machine
from counted_rounds import run
from host_cost import STREAM, OneRankHere, python_calls, without_python
from torch.utils._python_dispatch import TorchDispatchMode

current = {0: STREAM}  # GPU -> handle of torch's current stream
torch._C._cuda_getCurrentRawStream = current.__getitem__
torch.Tensor.is_cuda, torch.Tensor.get_device = True, repeat(0).__next__

import epmoe.torch  # noqa: E402
from epmoe import fused_a2a  # noqa: E402
from epmoe.fused_a2a import buffers  # noqa: E402
from epmoe.torch import tensors  # noqa: E402


def over_storage(form, storage):
    """What torch makes for a GPU, for a CPU."""
    made = torch.empty(0, dtype=form["dtype"])
    return made.set_(storage, form["storage_offset"], form["size"], form["stride"])


tensors._device = lambda ordinal: torch.device("cpu")
tensors._tensor = over_storage
BUFFERS = buffers.buffer_of, buffers.hybrid_ep_buffer
EXPERTS, ROWS = 16, 64
MOST_MORE = {"dispatch": 6, "combine": 5, "by expert": 5, "sums": 4}  # Python functions


class Calls:
    """Calls of a package with functions of Megatron's names, on a world of its own."""

    def __init__(self, package):
        machine, self.driver = counted_machine(2, 0)
        without_python(self.driver)
        self.world, self.package = OneRankHere(machine, 2), package
        for of in BUFFERS:
            of(self.world).want_tokens(4)  # as an earlier batch would have told
        self.x, self.probs = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(4, 8)
        self.ids, self.dense = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, EXPERTS)
        self.rows, self.sorted = (torch.zeros(n, 64, dtype=torch.bfloat16) for n in (2 * 4, ROWS))
        self.dispatch(), self.by_expert()

    def dispatch(self):
        made = self.package.fused_dispatch_on_device(self.x, self.ids, self.probs, EXPERTS, self.world)
        self.handle = made[-1]
        return made

    def combine(self):
        return self.package.fused_combine(self.rows, self.world, self.handle)

    def by_expert(self):
        made = self.package.hybrid_ep_dispatch(
            self.x, self.dense > 1, self.dense, self.world, EXPERTS // 2, num_permuted_tokens=ROWS
        )
        self.experts = made[-1]
        return made

    def sums(self):
        return self.package.hybrid_ep_combine(self.sorted, self.experts)

    def lent(self):
        """Pieces of memory that results lie in."""
        buffers = [of(self.world) for of in BUFFERS]
        return [(b.ranks[0].arena.lent_bytes, sum(heap.lent_bytes for heap in b.heaps.values())) for b in buffers]

    def close(self):
        self.handle = self.experts = None
        for of in BUFFERS:
            of(self.world).close()


def python_functions(package):
    """{call: how many Python functions it runs}, the third time."""
    calls, found = Calls(package), {}
    for name in ("dispatch", "combine", "by_expert", "sums"):
        for _ in range(3):
            found[name.replace("_", " ")], *_ = python_calls(getattr(calls, name))
    calls.close()
    return found


def check_calls_cost_little_more_than_those_of_fused_a2a():
    plain, under_torch = map(python_functions, (fused_a2a, epmoe.torch))
    more = {name: n - plain[name] for name, n in under_torch.items()}
    assert all(n <= MOST_MORE[name] for name, n in more.items()), more


def check_the_first_call_of_a_form_takes_tensors_that_are_not_contiguous():
    calls = Calls(epmoe.torch)
    everywhere = torch.zeros(1, dtype=torch.bfloat16)
    x, probs = torch.zeros(64, 3, dtype=torch.bfloat16).T, torch.zeros(3, 1).expand(3, 8)
    ids = torch.zeros(8, 3, dtype=torch.int64).T
    *_, handle = epmoe.torch.fused_dispatch_on_device(x, ids, probs, EXPERTS, calls.world)
    epmoe.torch.fused_combine(everywhere.expand(2 * 4, 64), calls.world, handle)
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    rows, _, received, *_ = epmoe.torch.fused_dispatch_on_device(x, ids, probs, EXPERTS, calls.world)
    (rows.sum() + received.sum(1).sum()).backward()  # whose gradients are expanded
    assert x.grad.shape == x.shape and probs.grad.shape == probs.shape
    calls.close()


def check_memory_comes_back_when_the_last_tensor_over_it_has_ended():
    calls = Calls(epmoe.torch)
    calls.handle = calls.experts = None
    before = calls.lent()
    assert before == [(0, 0)] * 2, before
    rows, ids, probs, counts, handle = calls.dispatch()
    calls.handle = None
    del handle
    address, part = ids.data_ptr(), ids.detach()[1:]
    del rows, ids, probs
    assert calls.lent()[0][1], "a part of the ids is kept"
    assert part.data_ptr() == address + 8 * 8
    per_expert = counts.data
    del counts, part
    assert calls.lent()[0][0] > 0 and not calls.lent()[0][1], "counts are kept, rows are not"
    del per_expert
    assert calls.lent() == before
    calls.close()


class Zeros(TorchDispatchMode):
    """Counts tensors of zeros that torch makes."""

    n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += "zero" in str(function) or function is torch.ops.aten.new_zeros.default
        return function(*args, **(kwargs or {}))


def check_a_backward_makes_no_zeros_for_what_has_no_gradient():
    calls = Calls(epmoe.torch)
    for probs_too, most in ((False, 0), (True, 1)):
        calls.x = calls.x.detach().requires_grad_()
        calls.probs = calls.probs.detach().requires_grad_(probs_too)
        rows, *_ = calls.dispatch()
        with Zeros() as zeros:
            rows.backward(torch.ones_like(rows))
        assert zeros.n == most, zeros.n
        assert (calls.probs.grad is not None) == probs_too and calls.x.grad is not None
        assert not probs_too or not calls.probs.grad.any()
        del rows, _
    calls.close()


def check_a_call_on_another_stream_waits_and_is_waited_for_by_events_alone():
    """No objects of torch's: the handle of its current stream is enough. Results are copies."""
    calls = Calls(epmoe.torch)
    driver, order = calls.driver, []
    driver.cuEventRecord = lambda event, stream: order.append(("record", int(stream))) or (0,)
    driver.cuStreamWaitEvent = lambda stream, event, _: order.append(("wait", int(stream))) or (0,)
    launch = driver.cuLaunchKernelEx
    driver.cuLaunchKernelEx = lambda *given: order.append("launch") or launch(*given)
    calls.combine()
    assert "launch" in order and len(order) == 1, order
    for handle in (88, 99, 88):
        current[0] = handle
        order.clear()
        out, _ = calls.combine()
        before = ("record", handle), ("wait", STREAM)  # and when the copies have been made
        assert order == [*before, "launch", ("record", STREAM), ("wait", handle), *before], order
        assert out.untyped_storage().resizable(), "a copy"
    current[0] = STREAM
    calls.close()


if __name__ == "__main__":
    run(globals())
