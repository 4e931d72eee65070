"""The contenders of `benchmarks loop`: our interfaces as users call them, and other libraries in the same loop.

Arrays are torch's tensors on a GPU. In the simulator they are NumPy's, except for epmoe.torch. Experts are the
identity: combine gets the rows that dispatch returned.
"""

import contextlib
from importlib import import_module

import numpy as np

from benchmarks import graph, traffic
from benchmarks.pairs import BF16, config, random_tokens
from benchmarks.torch_peer import TorchPeer
from epmoe import device, fused_a2a
from epmoe.expert_parallel import ExpertParallel
from epmoe.provenance import install
from epmoe_ref.errors import UnavailableError

HYBRID_SMS = 132
POOL = 2048  # number of addresses that inputs(i) uses in turn


class _Ours:
    """A world's inputs, and the common part of all our interfaces.

    varies: inputs(i) have other addresses for each i. keeps: layers() keeps results. capturable: pairs can be in a CUDA graph.
    has_backward: autograd's threads take part.
    """

    varies = keeps = True
    capturable = has_backward = False
    on_torch = True  # tensors in the simulator too

    def __init__(self, world, shape):
        self.world, self.shape = world, shape
        ids = traffic.topk_ids(shape, world.n_ranks)
        self._pools = [self._pool(rank, ids[rank]) for rank in world.ranks]
        self._made = {}

    def _pool(self, rank, ids):
        """Inputs of one rank, repeated one after another, so that views of them begin at POOL addresses."""
        more = 64 if device.SIM else POOL
        shape, weights = self.shape, np.full(ids.shape, 1 / self.shape.top_k, np.float32)
        x = np.resize(random_tokens((shape.tokens, shape.hidden), rank), (shape.tokens + more, shape.hidden))
        pool = (
            x,
            np.resize(ids.astype(np.int64), (shape.tokens + more, shape.top_k)),
            np.resize(weights, (shape.tokens + more, shape.top_k)),
        )
        return self._as_torch(pool) if self.on_torch or not device.SIM else pool

    def _as_torch(self, arrays):
        try:
            import torch
        except ImportError:
            raise UnavailableError(f"torch is not installed: {install('torch')}") from None
        where = "cpu" if device.SIM else f"cuda:{self.world.machine.ordinal}"
        return [
            torch.from_numpy(a.view(np.int16)).view(torch.bfloat16).to(where)
            if a.dtype == BF16
            else torch.from_numpy(a).to(where)
            for a in arrays
        ]

    def inputs(self, i):
        """x, ids and weights (or the inputs of this interface) of pair i; lists over ranks if the world has lists."""
        at = i % (len(self._pools[0][0]) - self.shape.tokens)
        views = [self.views(pool, at) for pool in self._pools]
        return [list(of_ranks) for of_ranks in zip(*views)] if self.world.lists else views[0]

    def views(self, pool, at):
        """One rank's inputs that begin at row `at` of its pool: the same tokens in another order."""
        x, ids, weights = pool
        n = self.shape.tokens
        return x[at : at + n], ids[at : at + n], weights[at : at + n]

    def of_ranks(self, made):
        """[value of each rank here]."""
        return made if self.world.lists else [made]

    def like_world(self, values):
        """A list over ranks, or this rank's own."""
        return values if self.world.lists else values[0]

    def layers(self, inputs):
        """Run pairs, each with the tokens that the one before returned; results are kept until all have run."""
        kept, (x, *_) = [], inputs[0]
        for _, *routing in inputs:
            x = self.pair((x, *routing))
            kept.append(x)

    @contextlib.contextmanager
    def on_stream(self):
        """Context: the world's stream is torch's current one."""
        if device.SIM:
            yield
            return
        import torch

        handle = int(self.world.stream_of(self.world.ranks[0]).handle)
        with torch.cuda.stream(torch.cuda.ExternalStream(handle, device=self.world.machine.ordinal)):
            yield

    def synchronize(self):
        """Wait for the device."""
        self.world.machine.synchronize()

    def captured(self, n):
        """A function that replays a graph of n pairs, each with the tokens that the one before returned."""
        stream, given = self.world.stream_of(self.world.ranks[0]), self.inputs(0)
        self.pair(given)
        self.synchronize()

        def pairs():
            x, *routing = given
            for _ in range(n):
                x = self.pair((x, *routing))

        made = graph.capture(stream, pairs)
        return lambda: graph.replay(made, stream)


class Pairs(_Ours):
    """ExpertParallel, fused kernels, router weights."""

    name = "ExpertParallel"
    capturable, on_torch = True, False

    def __init__(self, world, shape):
        super().__init__(world, shape)
        self._ep = ExpertParallel(config(shape, world.n_ranks), world)

    def pair(self, given):
        """Dispatch and combine."""
        x, ids, weights = given
        d = self._ep.dispatch(x, ids)
        rows = [of_rank.output_tokens for of_rank in d] if self.world.lists else d.output_tokens
        return self._ep.combine(rows, d, weights)

    def check(self):
        """Raise the errors that the kernels recorded."""
        self._ep.check()

    def close(self):
        """Free everything."""
        self._ep.close()


class _Buffered(_Ours):
    """Interfaces that use a Buffer of fused_a2a."""

    def check(self):
        """Raise the errors that the kernels recorded."""
        fused_a2a.get_buffer(self.world, 0).check()

    def close(self):
        """Free everything."""
        self.synchronize()
        self._pools = None
        fused_a2a.get_buffer(self.world, 0).close()


class RowsOnDevice(_Buffered):
    """fused_a2a's functions. The host does not wait."""

    name = "fused_a2a on device"
    capturable, on_torch = True, False
    dispatch = "fused_dispatch_on_device"
    package = "epmoe.fused_a2a"

    def __init__(self, world, shape):
        super().__init__(world, shape)
        package = import_module(self.package)
        self._dispatch, self._combine = getattr(package, self.dispatch), package.fused_combine

    def pair(self, given):
        """Dispatch and combine."""
        x, ids, probs = given
        rows, _, _, _, handle = self._dispatch(x, ids, probs, self.shape.experts, self.world)
        return self._combine(rows, self.world, handle)[0]


class TorchOnDevice(RowsOnDevice):
    """epmoe.torch without gradients. The host does not wait."""

    name = "epmoe.torch on device"
    on_torch = True
    package = "epmoe.torch"


class TorchExact(TorchOnDevice):
    """epmoe.torch as Megatron calls it. The host waits for the number of rows."""

    name = "epmoe.torch exact"
    capturable = False
    dispatch = "fused_dispatch"


class _Training:
    """Forward and backward of one dispatch and one combine. layers: forward of all, then backward of all."""

    capturable, has_backward = False, True

    def pair(self, given):
        """Forward and backward."""
        return self.layers([given])

    def layers(self, inputs):
        """Forward of all pairs, each with the tokens that the one before returned, then backward of all."""
        import torch

        x = given = self._leaves(inputs[0][0])
        for _, ids, probs in inputs:
            x = super().pair((x, ids, self._leaves(probs)))
        torch.autograd.backward(self.of_ranks(x), [leaf.detach() for leaf in self.of_ranks(given)])

    def _leaves(self, tensors):
        return self.like_world([t.detach().requires_grad_() for t in self.of_ranks(tensors)])


class TrainingOnDevice(_Training, TorchOnDevice):
    """A training step. The host does not wait."""

    name = "epmoe.torch training step, on device"


class TrainingExact(_Training, TorchExact):
    """A training step as Megatron calls it."""

    name = "epmoe.torch training step, exact"


class TorchHybrid(_Buffered):
    """epmoe.torch HybridEP with a budget of rows. The host does not wait."""

    name = "epmoe.torch HybridEP, budget"
    capturable, budget = True, True

    def __init__(self, world, shape):
        super().__init__(world, shape)
        import epmoe.torch

        self._dispatch = epmoe.torch.hybrid_ep_dispatch
        self._combine = epmoe.torch.hybrid_ep_combine
        self.local = shape.experts // world.n_ranks
        matrix = traffic.pairs_matrix(shape, traffic.topk_ids(shape, world.n_ranks))
        self.rows = int(matrix.sum(axis=0).max()) if self.budget else None
        fused_a2a.init_hybrid_ep_buffer(world, shape.hidden, shape.tokens, self.local, HYBRID_SMS, HYBRID_SMS, False)

    def _pool(self, rank, ids):
        x, ids, weights = super()._pool(rank, ids)
        import torch

        chosen = torch.zeros(len(ids), self.shape.experts, dtype=torch.bool, device=x.device).scatter_(1, ids, True)
        return x, chosen, chosen.float() / self.shape.top_k

    def pair(self, given):
        """Dispatch and combine."""
        x, chosen, probs = given
        made = self._dispatch(
            x, chosen, probs, self.world, self.local, HYBRID_SMS, HYBRID_SMS, num_permuted_tokens=self.rows
        )
        return self._combine(made[0], made[-1], self.rows)

    def check(self):
        """Raise the errors that the kernels recorded."""
        fused_a2a.buffers.hybrid_ep_buffer(self.world).check()

    def close(self):
        """Free everything."""
        self.synchronize()
        self._pools = None
        fused_a2a.reset_hybrid_ep_buffer(self.world)


class TorchHybridExact(TorchHybrid):
    """epmoe.torch HybridEP with exact results. The host waits."""

    name = "epmoe.torch HybridEP, exact"
    capturable, budget = False, False


class _Peer:
    """Another library's pair. It gets the same arrays every time."""

    varies = keeps = capturable = has_backward = False

    def __init__(self, world, shape):
        self._peer = self.make(world, shape)
        self.shape = shape

    def make(self, world, shape):
        """The device-time contender that it wraps."""
        raise NotImplementedError

    def inputs(self, i):
        """The argument of pair(): nothing."""
        return None

    def pair(self, given):
        """Dispatch and combine."""
        self._peer.dispatch()
        self._peer.combine()

    def on_stream(self):
        """Context: the world's stream is torch's current one."""
        return self._peer.on_stream()

    def synchronize(self):
        """Wait for the device."""
        self._peer.check()

    check = synchronize

    def close(self):
        """Free everything; collective."""
        self._peer.close()


def _peer(name, module, kind, **options):
    """A _Peer of benchmarks.<module>.<kind>, which is imported when the peer is made."""

    def make(self, world, shape):
        return getattr(import_module(f"benchmarks.{module}"), kind)(world, shape, **options)

    return type(kind, (_Peer,), {"name": name, "make": make, "__doc__": f"{name}, in the same loop."})


class AllGather(TorchPeer):
    """All tokens to all ranks by all-gather; sums back by reduce-scatter. Serving engines' default, but for the routing."""

    name = needs = "NCCL"
    matrix = staticmethod(traffic.rows_matrix)

    def __init__(self, world, shape):
        super().__init__(world, shape)
        with self.on_stream():
            self._x, self._sums, self._all = [
                self._torch.zeros(n, shape.hidden, dtype=self._torch.bfloat16, device="cuda")
                for n in (shape.tokens, shape.tokens, world.n_ranks * shape.tokens)
            ]

    def dispatch(self):
        """Send all tokens to all ranks."""
        self._torch.distributed.all_gather_into_tensor(self._all, self._x)

    def combine(self):
        """Send the sums over ranks back to each rank."""
        self._torch.distributed.reduce_scatter_tensor(self._sums, self._all)

    def close(self):
        """Free everything."""
        self.check()
        self._x = self._sums = self._all = None
        self._torch.cuda.empty_cache()


OURS = (Pairs, RowsOnDevice, TorchOnDevice, TorchExact, TorchHybrid, TorchHybridExact, TrainingOnDevice, TrainingExact)
PEERS = {
    "nccl": (
        _peer("NCCL all-to-all", "nccl", "Nccl"),
        _peer("NCCL all-gather + reduce-scatter", "loop_contenders", "AllGather"),
    ),
    "deepep": (
        _peer("DeepEP V1, host waits", "deepep", "V1", host_waits=True),
        _peer("DeepEP V1", "deepep", "V1"),
        _peer("DeepEP low latency", "deepep", "LowLatency"),
    ),
}


def names():
    """Names of our contenders."""
    return [kind.name for kind in OURS]


def chosen(words, against):
    """Our contenders whose names contain one of the words (None: all), then other libraries'."""
    ours = [kind for kind in OURS if words is None or any(word in kind.name for word in words)]
    return ours + [kind for library in against for kind in PEERS[library]]
