"""DeepEP V1 as implementations, through deep_ep.Buffer: its rows (normal kernels) and its low-latency kernels.

Needs DeepEP (https://github.com/deepseek-ai/DeepEP), torch and GPUs. epmoe does not depend on them. Release 1.2.1
equals the reference in every case that these classes serve, on 4 H200 of one host. They are also written for 2.1.0, but
have not been run with it. docs/measured.md says what low latency needs. One rank a process:

    torchrun --nproc-per-node 2 -m epmoe check deepep
    torchrun --nproc-per-node 2 -m epmoe check deepep_low_latency
"""

import numpy as np

from epmoe.check.implementation import Implementation, RowsImplementation
from epmoe.check.ranks import torch_process_group
from epmoe_ref.errors import UnavailableError


def deep_ep():
    """The modules deep_ep and torch, and the group of all ranks."""
    torch_process_group()
    try:
        import deep_ep
    except ImportError:
        raise UnavailableError("deep_ep is not installed: build https://github.com/deepseek-ai/DeepEP") from None
    import torch

    return deep_ep, torch, torch.distributed.group.WORLD


def to_torch(torch, array):
    """A NumPy array on the GPU. bf16 is copied by its bits, since torch does not know ml_dtypes."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(array).cuda()


def to_bf16(torch, tensor, dtype):
    """A bf16 tensor as a NumPy array of `dtype`, ml_dtypes' bfloat16."""
    return tensor.contiguous().view(torch.int16).cpu().numpy().view(dtype)


class Rows(RowsImplementation):
    """Buffer.dispatch and Buffer.combine of ranks that share NVLink."""

    per_rank = True
    dtypes = ("bf16",)
    NVL_BYTES = 1 << 28

    def __init__(self):
        package, self._torch, group = deep_ep()
        self._buffer = package.Buffer(group, self.NVL_BYTES, 0, explicitly_destroy=True)

    def dispatch(self, x, token_indices, token_probs, num_experts):
        torch, buffer = self._torch, self._buffer
        tokens, ids, probs = (to_torch(torch, a) for a in (x, token_indices, token_probs))
        per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, num_experts)
        recv_x, recv_ids, recv_probs, counts, handle, _ = buffer.dispatch(
            tokens,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=probs,
        )
        return (
            to_bf16(torch, recv_x, x.dtype),
            recv_ids.cpu().numpy(),
            recv_probs.cpu().numpy(),
            np.array(counts, np.int64),
            handle,
        )

    def combine(self, x, handle):
        combined, _, _ = self._buffer.combine(to_torch(self._torch, x), handle)
        return to_bf16(self._torch, combined, x.dtype)

    def close(self):
        self._buffer.destroy()


class LowLatency(Implementation):
    """Buffer.low_latency_dispatch (bf16) and Buffer.low_latency_combine.

    An expert's rows are separate for each src_rank, in arrival order, and name the token but not k. The adapter sorts
    segments by rank and looks up k in all ranks' topk_ids.
    """

    per_rank = True
    hidden = 7168  # one of the hidden sizes that its kernels are compiled for
    max_top_k = 11  # kNumMaxTopK of its dispatch
    MULTIPLE = 4  # n_ranks times the most tokens a rank must be a multiple of this

    def __init__(self, cfg):
        super().__init__(cfg)
        package, self._torch, self._group = deep_ep()
        self._most = -(-cfg.max_tokens_per_rank // self.MULTIPLE) * self.MULTIPLE
        nbytes = package.Buffer.get_low_latency_rdma_size_hint(self._most, cfg.hidden, cfg.n_ranks, cfg.n_experts)
        self._buffer = package.Buffer(
            self._group, 0, nbytes, low_latency_mode=True, num_qps_per_rank=cfg.n_local_experts, explicitly_destroy=True
        )

    def dispatch(self, input_tokens, topk_ids):
        cfg, torch = self.cfg, self._torch
        self._ids = to_torch(torch, topk_ids.astype(np.int64))
        recv_x, recv_count, self._handle, _, _ = self._buffer.low_latency_dispatch(
            to_torch(torch, input_tokens), self._ids, self._most, cfg.n_experts, use_fp8=False
        )
        self._places = self._rows_by_rank(self._handle[1].cpu().numpy())
        counts = np.diff(self._places[1]).reshape(cfg.n_local_experts, cfg.n_ranks)
        token = self._handle[0].cpu().numpy().reshape(-1)[self._places[0]]
        per_expert = recv_count.cpu().numpy().astype(np.int64)
        return dict(
            output_tokens=to_bf16(torch, recv_x.reshape(-1, cfg.hidden)[self._places[0]], input_tokens.dtype),
            row_offsets=np.concatenate([[0], np.cumsum(per_expert)]).astype(np.uint32),
            src_info=np.stack([token, self._slots(token, counts)], axis=1),
            recv_count=counts,
        )

    def combine(self, expert_outputs, dispatched, router_weights):
        cfg, torch = self.cfg, self._torch
        places = self._places[0]
        outputs = torch.zeros(
            cfg.n_local_experts, cfg.n_ranks * self._most, cfg.hidden, dtype=torch.bfloat16, device="cuda"
        )
        outputs.view(-1, cfg.hidden)[places] = to_torch(torch, expert_outputs)
        combined, _, _ = self._buffer.low_latency_combine(
            outputs, self._ids, to_torch(torch, router_weights), self._handle
        )
        return to_bf16(torch, combined, expert_outputs.dtype)

    def close(self):
        self._buffer.destroy()

    def _rows_by_rank(self, layout_range):
        """(places in [expert, row] flattened, by expert and src_rank; where each segment starts in that list)."""
        capacity = self.cfg.n_ranks * self._most
        begin, count = layout_range.reshape(-1) >> 32, layout_range.reshape(-1) & 0xFFFFFFFF
        begin = begin + np.repeat(np.arange(self.cfg.n_local_experts), self.cfg.n_ranks) * capacity
        starts = np.concatenate([[0], np.cumsum(count)])
        return np.repeat(begin - starts[:-1], count) + np.arange(starts[-1]), starts

    def _slots(self, token, counts):
        """k of each row: the position of the row's expert among its token's ids."""
        all_ids = [None] * self.cfg.n_ranks
        self._torch.distributed.all_gather_object(all_ids, self._ids.cpu().numpy())
        L, rank = self.cfg.n_local_experts, self._torch.distributed.get_rank()
        expert = np.repeat(rank * L + np.repeat(np.arange(L), self.cfg.n_ranks), counts.reshape(-1))
        src_rank = np.repeat(np.tile(np.arange(self.cfg.n_ranks), L), counts.reshape(-1))
        return np.array(
            [np.flatnonzero(all_ids[r][t] == e)[0] for r, t, e in zip(src_rank, token, expert)], np.int32
        ).reshape(-1)
