"""`epmoe check deepep` and `deepep_low_latency` over a stand-in of DeepEP: one rank, tensors on the CPU, results right.

DeepEP needs GPUs. The stand-in takes and returns what deep_ep.Buffer of releases 1.2.1 and 2.1.0 does, as far as the
adapters go.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from epmoe.check import check
from epmoe.check.adapters import deepep
from epmoe.check.conformance import RUNS
from epmoe.check.ranks import WholeWorld


class Buffer:
    """deep_ep.Buffer of one rank. made: all that were."""

    made = []

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        explicitly_destroy=False,
    ):
        assert group.size() == 1 and explicitly_destroy and (num_rdma_bytes > 0) == low_latency_mode
        self.alive = True
        self.made.append(self)

    def destroy(self):
        self.alive = False

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
        return num_max_dispatch_tokens_per_rank * hidden * num_ranks * num_experts

    def get_dispatch_layout(self, topk_idx, num_experts):
        of_experts = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        goes = (topk_idx >= 0).any(1, keepdim=True)
        return goes.sum(0).int(), None, of_experts, goes, None

    def dispatch(
        self,
        x,
        num_tokens_per_rank,
        num_tokens_per_rdma_rank,
        is_token_in_rank,
        num_tokens_per_expert,
        topk_idx,
        topk_weights,
    ):
        goes = is_token_in_rank[:, 0]
        ids, probs = topk_idx[goes], topk_weights[goes]
        return (
            x[goes],
            ids,
            torch.where(ids >= 0, probs, torch.zeros_like(probs)),
            num_tokens_per_expert.tolist(),
            (goes, len(x)),
            None,
        )

    def combine(self, x, handle):
        goes, n_tokens = handle
        out = x.new_zeros(n_tokens, x.shape[1])
        out[goes] += x
        return out, None, None

    def low_latency_dispatch(self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, use_fp8=True):
        most = num_max_dispatch_tokens_per_rank
        assert not use_fp8 and most % 4 == 0 and len(x) <= most
        rows = x.new_zeros(num_experts, most, x.shape[1])
        source = torch.zeros(num_experts, most, dtype=torch.int32)
        counts = torch.zeros(num_experts, dtype=torch.int32)
        for expert in range(num_experts):
            tokens = (topk_idx == expert).any(1).nonzero().flatten()
            rows[expert, : len(tokens)], source[expert, : len(tokens)] = x[tokens], tokens.int()
            counts[expert] = len(tokens)
        return (rows, counts, (source, counts.long()[:, None], most, x.shape[1], num_experts), None, None)

    def low_latency_combine(self, x, topk_idx, topk_weights, handle):
        source, layout, *_ = handle
        sums = torch.zeros(len(topk_idx), x.shape[2])
        for (token, slot), expert in zip(
            torch.cartesian_prod(*map(torch.arange, topk_idx.shape)).tolist(), topk_idx.flatten().tolist()
        ):
            if expert >= 0:
                row = int((source[expert, : int(layout[expert, 0])] == token).nonzero()[0, 0])
                product = topk_weights[token, slot].double() * x[expert, row].double()
                sums[token] = (product + sums[token].double()).float()
        return sums.bfloat16(), None, None


@pytest.fixture
def on_the_cpu(monkeypatch, tmp_path):
    """torch as it is with a GPU, without one; deep_ep is the stand-in."""
    zeros = torch.zeros
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **more: zeros(*shape, **more))
    monkeypatch.setattr(Buffer, "made", [])
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Buffer))
    monkeypatch.setattr(deepep, "torch_process_group", lambda: None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("only", ["uneven", "slots without an expert"])
@pytest.mark.parametrize("adapter", [deepep.Rows, deepep.LowLatency])
def test_what_an_adapter_makes_of_deepeps_results_is_right(adapter, only, on_the_cpu):
    report = check(adapter, n_ranks=1, ranks=WholeWorld(1), only=only)
    assert report.passed and report.run, str(report)
    assert not any(buffer.alive for buffer in Buffer.made) and len(Buffer.made) == RUNS * len(report.run)
