"""The base of contenders that use torch, with a GPU and a process for each rank."""

import sys

from benchmarks import traffic
from epmoe import device
from epmoe.check.ranks import torch_process_group
from epmoe_ref.errors import UnavailableError


class TorchPeer:
    """One rank of such a contender: torch's process group, and the world's stream as torch's.

    needs: its name where there are no GPUs. matrix(shape, ids): messages from each rank to each, of traffic.py.
    """

    capturable = False
    needs, matrix = None, None

    def __init__(self, world, shape):
        if world.lists or device.SIM:
            raise UnavailableError(
                f"{self.needs} needs GPUs, one for each rank: mpirun -n N python -m mpi4py -m benchmarks"
            )
        import torch

        torch.cuda.set_device(world.machine.ordinal)
        torch_process_group()
        torch.cuda.set_device(world.machine.ordinal)
        self._torch = torch
        self.world, self.shape, self.stream = world, shape, world.stream_of(world.rank)
        self._on = torch.cuda.ExternalStream(int(self.stream.handle))
        self._ids_of_all = traffic.topk_ids(shape, world.n_ranks)
        self._messages = messages = self.matrix(shape, self._ids_of_all)
        self.bytes = {
            "dispatch": traffic.busiest_bytes(messages, traffic.payload_bytes(shape, shape.format)),
            "combine": traffic.busiest_bytes(messages.T, traffic.payload_bytes(shape, "bf16")),
        }

    def on_stream(self):
        """Context: the world's stream is torch's current one."""
        return self._torch.cuda.stream(self._on)

    def launch(self, phase):
        """Put a phase on the stream."""
        with self.on_stream():
            self.dispatch() if phase == "dispatch" else self.combine()

    def check(self):
        """Wait for the kernels."""
        self._torch.cuda.synchronize()


def leave():
    """Leave the process group, as torch requires, if a peer had one made; collective."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
