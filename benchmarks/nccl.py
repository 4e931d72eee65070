"""torch: rows permuted by expert, all_to_all_single, rows permuted again; how people do it without a kernel for it.

Counts and permutations are made beforehand: exchanging them would need another all-to-all and a host synchronisation a
call, so what is timed here is less than what a user pays.
"""

import numpy as np
from epmoe import device
from epmoe.check.ranks import torch_process_group
from epmoe_ref.errors import UnavailableError

from benchmarks import traffic


class Nccl:
    """Phases dispatch and combine (weighted), one message for each (token, expert)."""

    name = "nccl all-to-all"
    phases = ("dispatch", "combine")
    capturable = False

    def __init__(self, world, shape):
        if world.lists or device.SIM:
            raise UnavailableError("NCCL needs a GPU for each rank: mpirun -n N python -m mpi4py -m benchmarks")
        import torch
        import torch.distributed as dist

        torch.cuda.set_device(world.machine.ordinal)
        torch_process_group()
        torch.cuda.set_device(world.machine.ordinal)
        self._torch, self._dist = torch, dist
        self.world, self.shape, self.stream = world, shape, world.stream_of(world.rank)
        self._on = torch.cuda.ExternalStream(int(self.stream.handle))
        ids = traffic.topk_ids(shape, world.n_ranks)
        matrix = traffic.pairs_matrix(shape, ids)
        self._row_bytes = traffic.payload_bytes(shape, shape.format)
        self.bytes = {"dispatch": traffic.busiest_bytes(matrix, self._row_bytes),
                      "combine": traffic.busiest_bytes(matrix.T, traffic.payload_bytes(shape, "bf16"))}
        self._out, self._in = matrix[world.rank].tolist(), matrix[:, world.rank].tolist()
        sent, arrived = permutations(ids, world.rank, shape.experts // world.n_ranks)
        with torch.cuda.stream(self._on):
            self._token = torch.from_numpy(sent // shape.top_k).cuda()
            self._pair = torch.from_numpy(sent).cuda()
            self._arrived = torch.from_numpy(arrived).cuda()
            self._back = torch.from_numpy(np.argsort(arrived)).cuda()
            self._slot = torch.from_numpy(np.argsort(sent)).cuda()
            # fp8: values and scales of a token as one row of bytes
            self._x = torch.zeros(shape.tokens, self._row_bytes, dtype=torch.uint8, device="cuda")
            if shape.format == "bf16":
                self._x = torch.randn(shape.tokens, shape.hidden, device="cuda").bfloat16()
            self._y = torch.randn(len(arrived), shape.hidden, device="cuda").bfloat16()
            self._weights = torch.rand(shape.tokens, shape.top_k, 1, device="cuda").bfloat16()
        torch.cuda.synchronize()
        dist.barrier()

    def launch(self, phase):
        """Put a phase on the stream."""
        torch, shape = self._torch, self.shape
        with torch.cuda.stream(self._on):
            if phase == "dispatch":
                self._exchange(self._x[self._token], self._out, self._in)[self._arrived]
            else:
                rows = self._exchange(self._y[self._back], self._in, self._out)[self._slot]
                (rows.view(shape.tokens, shape.top_k, shape.hidden) * self._weights).sum(1)

    def check(self):
        """Wait for the kernels."""
        self._torch.cuda.synchronize()

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
    """(pairs of this rank in the order of their experts; arrived rows in the order of experts, then source ranks)."""
    sent = np.argsort(ids[rank].ravel(), kind="stable")
    # what arrives: by source rank, there by expert
    experts = [np.sort(i.ravel()) for i in ids]
    arrived = np.concatenate([e[e // n_local_experts == rank] for e in experts])
    return sent, np.argsort(arrived, kind="stable")
