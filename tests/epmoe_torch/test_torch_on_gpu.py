"""epmoe.torch with tensors in GPU memory: the other files' tests, the order of streams, and CUDA graphs."""

import inspect

import pytest
import test_torch_as_users_call as of_users
import test_torch_gradients as of_gradients
import test_torch_many_steps as of_steps
import test_torch_several_layers as of_layers
import test_torch_tensors as of_tensors
import test_torch_training as of_training
import torch
from small_tensors import DEVICE, array, assert_same, group_of
from test_torch_several_layers import model

from epmoe import LocalWorld
from epmoe.torch import fused_combine, fused_dispatch, hybrid_ep_combine, hybrid_ep_dispatch, init_hybrid_ep_buffer
from epmoe_ref import fused_a2a as reference
from epmoe_ref.errors import EPStateError

__all__ = ["model"]
SIMULATED = "test_results_of_the_simulator_are_tensors_over_the_same_memory"
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
LONG = 50_000_000  # cycles: some tens of milliseconds


def laws(module, *without):
    """Names of the tests of a module."""
    return [name for name in vars(module) if name.startswith("test_") and name not in without]


def cases(law):
    """The arguments beside `sizes` with which a test of gradients runs on a CPU, as dicts."""
    for mark in getattr(law, "pytestmark", []):
        name, values = mark.args
        return [{name: value} for value in values]
    return [{}]


OF_GRADIENTS = [
    pytest.param(law, case, id="-".join([law.__name__, *map(str, case.values())]))
    for law in (getattr(of_gradients, name) for name in laws(of_gradients))
    for case in cases(law)
]


@pytest.mark.parametrize(("law", "case"), OF_GRADIENTS)
@pytest.mark.parametrize("sizes", of_gradients.WORLDS.values(), ids=list(of_gradients.WORLDS))
def test_laws_of_gradients(law, case, sizes, monkeypatch):
    wants_it = "monkeypatch" in inspect.signature(law).parameters
    law(sizes, *[monkeypatch] * wants_it, **case)


AS_THEY_ARE = of_tensors, of_training, of_users, of_layers, of_steps
globals().update({law: vars(of)[law] for of in AS_THEY_ARE for law in laws(of, SIMULATED)})


def test_real_gradients_are_adjoint_within_their_rounding():
    """Rows are copies; a gradient is a sum, or a sum of sums, and each is rounded to bfloat16.

    Numbers are positive, and rows so few that one that is missing is more than all rounding.
    """
    draw, group, n_tokens = torch.Generator(device=DEVICE).manual_seed(1), group_of(2), (30, 20)

    def positive(shape):
        return torch.randn(shape, generator=draw, device=DEVICE).bfloat16().abs()

    def total(one, other):
        return sum((a.double() * b.double()).sum() for a, b in zip(one, other))

    ids = [torch.rand(n, 8, generator=draw, device=DEVICE).topk(4).indices for n in n_tokens]
    maps = [torch.zeros(n, 8, dtype=torch.bool, device=DEVICE).scatter(1, i, True) for n, i in zip(n_tokens, ids)]
    probs = [torch.ones(n, 4, device=DEVICE) for n in n_tokens]
    for roundings, dispatch, combine in (
        (
            1,
            lambda x: fused_dispatch(x, ids, probs, 8, group),
            lambda rows, handle: fused_combine(rows, group, handle)[0],
        ),
        (2, lambda x: hybrid_ep_dispatch(x, maps, None, group, 4), hybrid_ep_combine),
    ):
        x = [positive((n, 512)).requires_grad_() for n in n_tokens]
        rows, *_, handle = dispatch(x)
        given = [positive(r.shape) for r in rows]
        torch.autograd.backward(rows, given)
        with torch.no_grad():
            room = roundings * 2**-8 * total(rows, given)
            assert abs(total(rows, given) - total(x, [t.grad for t in x])) <= room
        leaves = [g.clone().requires_grad_() for g in given]
        out = combine(leaves, handle)
        torch.autograd.backward(out, [t.detach() for t in x])
        with torch.no_grad():
            assert abs(total(out, x) - total(given, [t.grad for t in leaves])) <= room


@pytest.mark.parametrize("streams", ["the caller's is another", "the world's is another", "both are"])
def test_a_call_comes_after_its_producer_and_before_its_consumer(streams):
    """The current stream is busy for long before x is written; what reads a result is put on it at once."""
    own = torch.cuda.Stream() if streams != "the caller's is another" else torch.cuda.default_stream()
    current = torch.cuda.Stream() if streams != "the world's is another" else torch.cuda.default_stream()
    group = LocalWorld(2, stream=own)
    maps = [torch.rand(n, 4, device=DEVICE) < 0.5 for n in (300, 200)]
    ids = [torch.randint(0, 4, (n, 1), device=DEVICE) for n in (300, 200)]
    x = [torch.zeros(n, 512, dtype=torch.bfloat16, device=DEVICE, requires_grad=True) for n in (300, 200)]
    probs = [torch.ones(n, 1, device=DEVICE) for n in (300, 200)]
    init_hybrid_ep_buffer(group, 512, 300, 2, 24, 24, False)
    torch.cuda.synchronize()
    for number in range(1, 4):
        with torch.cuda.stream(current):
            torch.cuda._sleep(LONG)
            with torch.no_grad():
                for t in x:
                    t.fill_(number)
            rows, *_, handle = hybrid_ep_dispatch(x, maps, None, group, 2, num_permuted_tokens=1100)
            out = hybrid_ep_combine(rows, handle)
            torch.autograd.backward(out, [torch.full_like(o, number) for o in out])
            seen = [o.detach().clone() for o in out] + [t.grad.clone() for t in x]
            received, *_, handle = fused_dispatch(x, ids, probs, 4, group)
            seen += [c.detach().clone() for c in fused_combine(received, group, handle)[0]]
            for t in x:
                t.grad = None
        current.synchronize()
        wanted = [m.sum(1, keepdim=True).expand(-1, 512) * number for m in maps]
        once = [torch.full_like(w, number) for w in wanted]
        assert all(torch.equal(s.float(), w.float()) for s, w in zip(seen, wanted + wanted + once))


def test_a_graph_of_a_training_step_runs_again_with_new_data():
    stream = torch.cuda.Stream()
    group = LocalWorld(1, stream=stream)
    draw = torch.Generator(device=DEVICE).manual_seed(0)
    x = torch.randn(40, 512, generator=draw, device=DEVICE).bfloat16().requires_grad_()
    probs = torch.rand(40, 8, generator=draw, device=DEVICE).requires_grad_()
    routing_map = torch.rand(40, 8, generator=draw, device=DEVICE) < 0.4
    init_hybrid_ep_buffer(group, 512, 40, 8, 24, 24, False)

    def step():
        rows, row_probs, _, _, handle = hybrid_ep_dispatch(
            [x * 1], [routing_map], [probs * 1], group, 8, num_permuted_tokens=200, pad_multiple=4
        )
        (out,) = hybrid_ep_combine([rows[0] * 2], handle)
        torch.autograd.backward([out, row_probs[0]], [out.detach(), row_probs[0].detach()])
        return out

    with torch.cuda.stream(stream):
        for _ in range(3):
            x.grad = probs.grad = None
            step()
    torch.cuda.synchronize()
    x.grad = probs.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step()
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn(40, 512, generator=draw, device=DEVICE))
            probs.copy_(torch.rand(40, 8, generator=draw, device=DEVICE))
            routing_map.copy_(torch.rand(40, 8, generator=draw, device=DEVICE) < 0.4)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        rows, row_probs, *_, known = reference.hybrid_dispatch_forward(
            [array(x)], [array(routing_map)], [array(probs)], 8, num_permuted_tokens=200, pad_multiple=4
        )
        wanted = reference.hybrid_combine_forward([rows[0] * 2], known)
        grad_rows = reference.hybrid_combine_backward(known, wanted)
        grads = reference.hybrid_dispatch_backward(known, [grad_rows[0] * 2], row_probs)
        assert_same([out], wanted, "replayed")
        assert_same([x.grad], grads[0], "gradient of x")
        assert_same([probs.grad], grads[1], "gradient of probs")


def test_a_capture_that_leaves_the_world_out_is_refused():
    group, x = LocalWorld(1), torch.ones(4, 64, dtype=torch.bfloat16, device=DEVICE)
    goes, graph = torch.ones(4, 2, dtype=torch.bool, device=DEVICE), torch.cuda.CUDAGraph()
    hybrid_ep_dispatch([x], [goes], None, group, 2, num_permuted_tokens=8)
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        x + 1
        with pytest.raises(EPStateError, match="make the world with the stream that captures"):
            hybrid_ep_dispatch([x], [goes], None, group, 2, num_permuted_tokens=8)
    rows, *_ = hybrid_ep_dispatch([x], [goes], None, group, 2, num_permuted_tokens=8)
    assert torch.equal(rows[0], torch.ones(8, 64, dtype=torch.bfloat16, device=DEVICE))


def test_tensors_of_the_gpu_are_used_where_they_lie():
    group = group_of(2)
    x = [torch.ones(4, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    ids, probs = ([torch.zeros(4, 1, dtype=t, device=DEVICE) for _ in x] for t in (torch.int64, torch.float32))
    rows, indices, row_probs, counts, handle = fused_dispatch(x, ids, probs, 2, group)
    assert {t.device for t in (*rows, *indices, *row_probs)} == {DEVICE} and {n.device.type for n in counts} == {"cpu"}
    out, _ = fused_combine(rows, group, handle)
    assert out[0].is_cuda and out[0].dtype == torch.bfloat16 and torch.equal(out[1], x[1])
