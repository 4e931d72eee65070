"""All-to-all through torch.distributed as an implementation: the usual way without special kernels.

On GPUs NCCL does the exchange, without them gloo. One rank a process, on two GPUs:

    torchrun --nproc-per-node 2 -m epmoe check nccl
    mpirun -n 2 python -m mpi4py -m epmoe check nccl

Pairs are sorted by expert. all_to_all_single exchanges counts and rows. The rows arrive in the order of src_ranks and
are then sorted by expert. Needs torch.
"""

import numpy as np

from epmoe.check.implementation import Implementation
from epmoe.check.ranks import torch_process_group


class AllToAll(Implementation):
    """bf16 tokens, all combine types, with or without router weights."""

    combine_dtypes = ("bf16", "fp16", "fp32")
    options = frozenset({"unweighted"})
    per_rank = True

    def __init__(self, cfg):
        import torch
        import torch.distributed as dist

        super().__init__(cfg)
        torch_process_group()
        self._torch, self._dist = torch, dist
        self._device = "cuda" if torch.cuda.is_available() else "cpu"

    def dispatch(self, input_tokens, topk_ids):
        torch, cfg = self._torch, self.cfg
        tokens = self._on_device(input_tokens)
        ids = torch.from_numpy(topk_ids).long().to(self._device).reshape(-1)
        self._num_tokens = len(topk_ids)
        # the pairs in the order of their experts; -1 sorts first and is cut off
        expert, self._pairs = ids.sort(stable=True)
        self._pairs = self._pairs[expert >= 0]
        sent = torch.bincount(ids[ids >= 0], minlength=cfg.n_experts)
        received = self._exchange(sent, [cfg.n_local_experts] * cfg.n_ranks, [cfg.n_local_experts] * cfg.n_ranks)
        received = received.reshape(cfg.n_ranks, cfg.n_local_experts)
        self._out, self._in = (x.reshape(cfg.n_ranks, -1).sum(1).tolist() for x in (sent, received))
        src_info = torch.stack([self._pairs // cfg.top_k, self._pairs % cfg.top_k], 1)
        # the rows arrived by src_rank, then expert; they are needed by expert, then src_rank
        segments = torch.arange(received.numel(), device=self._device).reshape(received.shape)
        order = segments % cfg.n_local_experts * cfg.n_ranks + segments // cfg.n_local_experts
        self._order = order.reshape(-1).repeat_interleave(received.reshape(-1)).argsort(stable=True)
        rows = self._exchange(tokens[self._pairs // cfg.top_k], self._out, self._in)[self._order]
        src_info = self._exchange(src_info, self._out, self._in)[self._order]
        row_offsets = np.concatenate([[0], np.cumsum(received.sum(0).cpu().numpy())]).astype(np.uint32)
        return dict(
            output_tokens=self._on_host(rows, input_tokens.dtype),
            row_offsets=row_offsets,
            expert_ids=np.arange(cfg.n_local_experts, dtype=np.int32),
            src_info=src_info.int().cpu().numpy(),
            recv_count=received.T.cpu().numpy(),
        )

    def combine(self, expert_outputs, dispatched, router_weights):
        torch, cfg = self._torch, self.cfg
        outputs = self._on_device(expert_outputs)
        arrived = torch.empty_like(outputs)
        arrived[self._order] = outputs
        num_tokens = self._num_tokens
        recv = outputs.new_zeros(num_tokens * cfg.top_k, cfg.hidden)
        recv[self._pairs] = self._exchange(arrived, self._in, self._out)
        recv = recv.reshape(num_tokens, cfg.top_k, cfg.hidden)
        if router_weights is None:
            return self._on_host(recv, expert_outputs.dtype)
        takes_part = torch.zeros(num_tokens * cfg.top_k, dtype=bool, device=self._device)
        takes_part[self._pairs] = True
        weights = torch.from_numpy(router_weights).to(self._device)
        acc = torch.zeros(num_tokens, cfg.hidden, device=self._device)
        for k in range(cfg.top_k):
            added = fused_multiply_add(torch, weights[:, k, None], recv[:, k].float(), acc)
            acc = torch.where(takes_part.reshape(-1, cfg.top_k)[:, k, None], added, acc)
        return self._on_host(acc.to(recv.dtype), expert_outputs.dtype)

    def _exchange(self, rows, sent, received):
        result = rows.new_empty(sum(received), *rows.shape[1:])
        self._dist.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    def _on_device(self, array):
        """A tensor on the device. torch has no type for ml_dtypes' bfloat16, so its bits go through int16."""
        if array.dtype.itemsize == 2 and array.dtype != np.float16:
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16).to(self._device)
        return self._torch.from_numpy(array).to(self._device)

    def _on_host(self, tensor, dtype):
        if tensor.dtype == self._torch.bfloat16:
            tensor = tensor.view(self._torch.int16)
        return tensor.cpu().numpy().view(dtype)


def fused_multiply_add(torch, a, b, c):
    """a * b + c of float32 tensors with one rounding: the float64 sum is rounded to odd, then to float32."""
    product, c = a.double() * b.double(), c.double()  # the product is exact in float64
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = total.view(torch.int64) & 1 == 0
    toward = torch.where(error > 0, torch.inf, -torch.inf)
    return torch.where((error != 0) & even, torch.nextafter(total, toward.double()), total).float()
