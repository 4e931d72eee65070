"""torch: permute rows by expert, all_to_all_single, permute again. This is the usual way without a special kernel.

Counts and permutations are made in advance. Exchanging them would need another all-to-all and a host synchronisation
for each call, so the time measured here is less than a user pays.
"""

import numpy as np

from benchmarks import traffic
from benchmarks.torch_peer import TorchPeer


class Nccl(TorchPeer):
    """Phases dispatch and combine (weighted), one message for each (token, expert)."""

    name = "nccl all-to-all"
    needs = "NCCL"
    phases = ("dispatch", "combine")
    matrix = staticmethod(traffic.pairs_matrix)

    def __init__(self, world, shape):
        super().__init__(world, shape)
        import torch.distributed as dist

        torch, self._dist = self._torch, dist
        self._out = self._messages[world.rank].tolist()
        self._in = self._messages[:, world.rank].tolist()
        sent, arrived = permutations(self._ids_of_all, world.rank, shape.experts // world.n_ranks)
        with torch.cuda.stream(self._on):
            self._token = torch.from_numpy(sent // shape.top_k).cuda()
            self._pair = torch.from_numpy(sent).cuda()
            self._arrived = torch.from_numpy(arrived).cuda()
            self._back = torch.from_numpy(np.argsort(arrived)).cuda()
            self._slot = torch.from_numpy(np.argsort(sent)).cuda()
            # fp8: values and scales of a token as one row of bytes
            row_bytes = traffic.payload_bytes(shape, shape.format)
            self._x = torch.zeros(shape.tokens, row_bytes, dtype=torch.uint8, device="cuda")
            if shape.format == "bf16":
                self._x = torch.randn(shape.tokens, shape.hidden, device="cuda").bfloat16()
            self._y = torch.randn(len(arrived), shape.hidden, device="cuda").bfloat16()
            self._weights = torch.rand(shape.tokens, shape.top_k, 1, device="cuda").bfloat16()
        torch.cuda.synchronize()
        dist.barrier(device_ids=[torch.cuda.current_device()])  # otherwise it guesses, and says so

    def dispatch(self):
        """Put a dispatch on torch's current stream."""
        self._exchange(self._x[self._token], self._out, self._in)[self._arrived]

    def combine(self):
        """Put a combine on torch's current stream."""
        shape = self.shape
        rows = self._exchange(self._y[self._back], self._in, self._out)[self._slot]
        (rows.view(shape.tokens, shape.top_k, shape.hidden) * self._weights).sum(1)

    def close(self):
        """Free everything."""
        self.check()
        self._x = self._y = None
        self._torch.cuda.empty_cache()

    def _exchange(self, rows, sent, received):
        result = rows.new_empty(sum(received), rows.shape[1])
        self._dist.all_to_all_single(result, rows, received, sent)
        return result


def permutations(ids, rank, n_local_experts):
    """(pairs of this rank in expert order; arrived rows by expert, then src_rank)."""
    sent = np.argsort(ids[rank].ravel(), kind="stable")
    # rows arrive by src_rank, then by expert
    experts = [np.sort(i.ravel()) for i in ids]
    arrived = np.concatenate([e[e // n_local_experts == rank] for e in experts])
    return sent, np.argsort(arrived, kind="stable")
