"""Rounds captured into CUDA graphs: replays see what lies in the inputs then, and equal the reference."""

import numpy as np
import pytest
from test_gpu_worlds import LIBRARIES, on_gpu
from worlds_at_hand import batch, config, equal_combine, equal_dispatch

from epmoe import EPStateError, ExpertParallel, LocalWorld

if "torch" in LIBRARIES:
    import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("torch" not in LIBRARIES, reason="captures with torch")]


class Graphs:
    """An ExpertParallel on a torch stream, with inputs that stay where they are."""

    def __init__(self, cfg, ids_dtype=np.int32, **options):
        self.cfg, self.stream, self.ids_dtype = cfg, torch.cuda.Stream(), ids_dtype
        self.ep = ExpertParallel(cfg, LocalWorld(cfg.n_ranks, stream=self.stream), **options)
        self.inputs = None
        self.fill(0)

    def fill(self, seed):
        """New values in the same inputs."""
        counts = [self.cfg.max_tokens_per_rank] * self.cfg.n_ranks
        x, ids, weights = self.host = batch(self.cfg, seed, counts)
        parts = x, [a.astype(self.ids_dtype) for a in ids], weights
        new = [[on_gpu(a) for a in part] for part in parts]
        if self.inputs is None:
            self.inputs = new
        for into, given in zip(sum(self.inputs, []), sum(new, [])):
            into.copy_(given)
        torch.cuda.synchronize()

    def captured(self, function):
        """(graph of what function puts on the stream, its result)."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            result = function()
        return graph, result

    def replay(self, *graphs):
        """Replay graphs one after another, and wait."""
        with torch.cuda.stream(self.stream):
            for graph in graphs:
                graph.replay()
        torch.cuda.synchronize()

    def dispatch(self):
        """Of the inputs."""
        return self.ep.dispatch(*self.inputs[:2])

    def combine(self, d):
        """Of the dispatched rows as they are."""
        return self.ep.combine([a.output_tokens for a in d], d, self.inputs[2])

    def check(self, d, out):
        """What lies in the results equals the reference of what lies in the inputs."""
        x, ids, weights = self.host
        for a in d:
            a.offsets = None  # of an earlier replay
        equal_combine(self.cfg, out, equal_dispatch(self.cfg, d, x, ids), weights)


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_replays_of_a_round_equal_the_reference(fused, ids_dtype):
    cfg = config(n_experts=16, top_k=4, hidden=256, max_tokens_per_rank=32)
    g = Graphs(cfg, ids_dtype, fused=fused)
    with g.ep:
        g.check(d := g.dispatch(), g.combine(d))

        def a_round():
            d = g.dispatch()
            return d, g.combine(d)

        graph, (d, out) = g.captured(a_round)
        for seed in range(1, 4):
            g.fill(seed)
            g.replay(graph)
            g.check(d, out)
            eager = g.dispatch()  # eager rounds in between get other memory
            g.combine(eager)
            g.ep.check()
            g.check(d, out)


def test_dispatch_and_combine_may_be_graphs_of_their_own():
    g = Graphs(config(n_ranks=2, n_experts=8, top_k=2, hidden=64, max_tokens_per_rank=16))
    with g.ep:
        g.check(d := g.dispatch(), g.combine(d))
        first, d = g.captured(g.dispatch)
        with pytest.raises(EPStateError, match="capture its combine too"):
            g.combine(d)
        second, out = g.captured(lambda: g.combine(d))
        for seed in range(1, 4):
            g.fill(seed)
            g.replay(first, second)
            g.check(d, out)
