"""Models of several layers: handles of all of them are alive at once, and each gradient goes through its own.

One rank seen as one rank a process. A layer weighs every token by its probs' sum, so that the model is a product that
torch computes by itself too; numbers are whole and small, so every sum is exact.
"""

import gc

import pytest
import torch
from small_tensors import DEVICE
from test_torch_as_users_call import EXPERTS, HIDDEN, TOKENS, TOP_K, by_expert, by_rows, chosen, whole
from torch.utils.checkpoint import checkpoint

from epmoe.fused_a2a.buffers import hybrid_ep_buffer
from epmoe.torch import get_buffer

LAYERS = by_rows, by_expert, by_rows
pytestmark = pytest.mark.filterwarnings("error")


class Model:
    """Layers, each with routing and probs of its own; probs are 1 or 2."""

    def __init__(self, draw, kinds=LAYERS):
        self.kinds, self.routing = kinds, [chosen(draw) for _ in kinds]
        shapes = [(TOKENS, TOP_K if layer is by_rows else EXPERTS) for layer in kinds]
        self.probs = [
            torch.randint(1, 3, shape, generator=draw).float().to(DEVICE).requires_grad_() for shape in shapes
        ]

    def layers(self):
        """(function, where tokens go, probs) of each layer."""
        for layer, (ids, routing_map), probs in zip(self.kinds, self.routing, self.probs):
            yield layer, ids if layer is by_rows else routing_map, probs

    def __call__(self, group, x, through=lambda layer, *given: layer(*given)):
        for layer, goes, probs in self.layers():
            x = through(layer, group, x, goes, probs)
        return x

    def by_torch_alone(self, x):
        """What the model gives."""
        for layer, goes, probs in self.layers():
            weights = probs if layer is by_rows else probs * goes
            x = (x * weights.sum(1, keepdim=True)).to(x.dtype)
        return x

    def gradients(self):
        """Those of the probs; they are forgotten."""
        made = [p.grad for p in self.probs]
        for p in self.probs:
            p.grad = None
        return made


@pytest.fixture
def model(draw):
    return Model(draw)


def batches(draw, n):
    """(x, gradient of the model's output) of each microbatch."""
    return [(whole(draw, TOKENS, HIDDEN).requires_grad_(), whole(draw, TOKENS, HIDDEN)) for _ in range(n)]


def wanted_of(model, given):
    """(outputs, gradients of x, gradients of the probs) of all microbatches by torch alone, one after another."""
    outputs = [model.by_torch_alone(x) for x, _ in given]
    for out, (_, gradient) in zip(outputs, given):
        out.backward(gradient)
    of_x = [x.grad for x, _ in given]
    for x, _ in given:
        x.grad = None
    return [out.detach() for out in outputs], of_x, model.gradients()


def assert_equal(model, given, outputs, wanted):
    assert all(map(torch.equal, outputs, wanted[0]))
    assert all(map(torch.equal, [x.grad for x, _ in given], wanted[1]))
    assert all(map(torch.equal, model.gradients(), wanted[2]))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1, 2), (2, 1, 0)], ids=str)
def test_gradients_of_microbatches_add_up_in_whatever_order_they_come(group, draw, model, order):
    """Every forward comes before the first backward, as in a pipeline: nine handles are alive."""
    given = batches(draw, 3)
    wanted = wanted_of(model, given)
    outputs = [model(group, x) for x, _ in given]
    for number in order:
        outputs[number].backward(given[number][1])
    assert_equal(model, given, outputs, wanted)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_layers_that_are_computed_again_have_the_same_gradients(group, draw, model, use_reentrant):
    """Each backward makes its layer's dispatch and combine once more, between those of other layers' gradients."""
    given = batches(draw, 2)
    wanted = wanted_of(model, given)
    outputs = [model(group, x, lambda *layer: checkpoint(*layer, use_reentrant=use_reentrant)) for x, _ in given]
    for out, (_, gradient) in zip(outputs, given):
        out.backward(gradient)
    assert_equal(model, given, outputs, wanted)


def test_an_evaluation_between_forward_and_backward_changes_nothing(group, draw, model):
    given, (other, _) = batches(draw, 1), *batches(draw, 1)
    wanted = wanted_of(model, given)
    outputs = [model(group, x) for x, _ in given]
    with torch.no_grad():
        evaluated = model(group, other)
    outputs[0].backward(given[0][1])
    assert_equal(model, given, outputs, wanted)
    assert torch.equal(evaluated, model.by_torch_alone(other)) and not evaluated.requires_grad


def test_a_graph_that_is_kept_gives_its_gradients_again(group, draw, model):
    given = batches(draw, 1)
    wanted = wanted_of(model, given)
    ((x, gradient),) = given
    out = model(group, x)
    out.backward(gradient, retain_graph=True)
    assert_equal(model, given, [out], wanted)
    x.grad = None
    out.backward(gradient)
    assert_equal(model, given, [out], wanted)


def in_use(group):
    """Bytes of both buffers that results and handles have."""
    gc.collect()
    buffers = get_buffer(group, 0), hybrid_ep_buffer(group)
    return sum(buffer.ranks[0].arena.lent_bytes for buffer in buffers)


def test_memory_comes_back_with_the_graph(group, draw, model):
    """A step that ends, an output that nobody asks for a gradient, and an exception leave nothing in use."""
    ((x, gradient),) = batches(draw, 1)
    out = model(group, x)
    assert in_use(group) > 0
    out.backward(gradient)
    del out
    x.grad = None  # gradients are results too
    model.gradients()
    assert in_use(group) == 0
    for with_gradients in (True, False):
        with torch.set_grad_enabled(with_gradients):
            out = model(group, x)
        del out
        assert in_use(group) == 0
    with pytest.raises(ZeroDivisionError):
        model(group, x, lambda layer, *given: layer(*given) if layer is by_rows else 1 // 0)
    assert in_use(group) == 0
