"""Training steps of four layers: memory stays flat, results that are kept stay, and a second thread works beside it."""

import gc
import threading
from collections import deque

import pytest
import torch
from small_tensors import DEVICE, OneRank
from test_torch_as_users_call import by_expert, by_rows
from test_torch_several_layers import Model, assert_equal, batches, in_use, wanted_of

from epmoe import device
from epmoe.fused_a2a.buffers import hybrid_ep_buffer
from epmoe.torch import fused_combine, fused_dispatch, get_buffer

LAYERS = by_rows, by_expert, by_rows, by_expert
# bytes: how many results there are at once depends on threads; a step that leaks one takes 256
ROOM = 16 << 10
WAYS_TO_KEEP = (
    lambda out: out,
    lambda out: out.detach(),
    lambda out: out.data,
    lambda out: out.detach()[1:],
    lambda out: out.detach().view(-1)[3:],
)
MOST_KEPT = 2
pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.timeout(600)]


def used(group):
    """Bytes of epmoe, of them lent, of torch on the device; and how many tensors Python knows."""
    if not device.SIM:
        torch.cuda.synchronize()
    lent = in_use(group)
    return (
        sum(b.allocated_bytes for b in (get_buffer(group, 0), hybrid_ep_buffer(group))),
        lent,
        0 if device.SIM else torch.cuda.memory_allocated(),
        sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()),
    )


def heaps_in_use(group):
    """Whether a result lies in the memory that peers write."""
    buffers = get_buffer(group, 0), hybrid_ep_buffer(group)
    return any(heap.lent_bytes for b in buffers for heap in b.heaps.values())


def step(group, model, x, gradient):
    """The output of a training step, whose gradients are as torch alone has them."""
    given = [(x, gradient)]
    wanted = wanted_of(model, given)
    out = model(group, x)
    out.backward(gradient)
    assert_equal(model, given, [out], wanted)
    x.grad = None
    return out


class Beside:
    """Another thread that trains a group of its own until the block ends; what it raised is raised there."""

    def __init__(self):
        self.n_steps, self.failure, self._end = 0, None, threading.Event()
        self._thread = threading.Thread(target=self._train)

    def _train(self):
        draw, group = torch.Generator().manual_seed(2), OneRank()
        model = Model(draw, LAYERS[:1])
        try:
            while not self._end.is_set():
                for x, gradient in batches(draw, 1):
                    step(group, model, x, gradient)
                self.n_steps += 1
        except BaseException as error:
            self.failure = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()
        if self.failure:
            raise self.failure


@pytest.mark.parametrize("steps", [4, pytest.param(1000, marks=pytest.mark.nightly)], ids=["few", "a thousand"])
def test_memory_stays_flat_and_what_is_kept_stays(group, draw, steps):
    model, data = Model(draw, LAYERS), batches(draw, 3)
    kept, seen = deque(), []
    with Beside() as other:
        for number in range(steps):
            out = step(group, model, *data[number % len(data)])
            mine = WAYS_TO_KEEP[number % len(WAYS_TO_KEEP)](out)
            kept.append((mine, mine.detach().clone()))
            del out, mine
            if len(kept) > MOST_KEPT:
                assert torch.equal(*kept.popleft()), f"step {number}"
            if number in (steps // 2, steps - 1):
                seen.append(used(group))
    assert other.n_steps > 0
    before, after = seen
    assert after[0] <= before[0] + ROOM and after[1] <= before[1] + ROOM, seen
    assert after[2] <= before[2] + (1 << 20) and after[3] <= before[3] + 100, seen
    assert all(torch.equal(*one) for one in kept)
    kept.clear()
    assert in_use(group) == 0 and not heaps_in_use(group)


@pytest.mark.by_day
@pytest.mark.parametrize("way", WAYS_TO_KEEP[1:], ids=["detach", "data", "part", "view"])
@pytest.mark.parametrize("which", range(3), ids=["rows", "ids", "probs"])
def test_memory_stays_lent_while_anything_of_one_result_is_kept(group, draw, which, way):
    model = Model(draw, LAYERS[:1])
    ((x, _),) = batches(draw, 1)
    ((_, ids, probs),) = model.layers()
    with torch.no_grad():
        made = fused_dispatch(x, ids, probs, 4, group)
        part = way(made[which])
        wanted = part.clone()
        del made
        assert heaps_in_use(group)
        for _ in range(3):
            rows, *_, handle = fused_dispatch(x * 2, (ids + 1) % 4, probs * 3, 4, group)
            fused_combine(rows * 1, group, handle)  # the last array that was given is held
    assert torch.equal(part, wanted) and part.device == DEVICE
    del part, rows, handle, _
    assert not heaps_in_use(group)
