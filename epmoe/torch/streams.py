"""Which stream a call is ordered with: torch's current one, whatever stream the world has."""

from contextlib import contextmanager

import torch

from epmoe import device


@contextmanager
def in_stream_order(group):
    """Context of one call: it comes after what torch's current stream has now, and before what that gets next.

    Where the world has that very stream, nothing is needed; else two events, which a graph capture may hold too. What
    is put on the current stream inside is not waited for: tensors are made readable before.
    """
    own = None if device.SIM else _stream_of(group)
    if own is None:
        yield
        return
    current = torch.cuda.current_stream(group.machine.ordinal)
    if current.cuda_stream == own.cuda_stream:
        yield
        return
    own.wait_stream(current)        # the tensors given are written by then
    yield
    current.wait_stream(own)        # the results are; and what they were made of may be used again


def _stream_of(group):
    """The world's stream as torch's: the ranks of a process are ordered by one."""
    ordinal, handle = group.machine.ordinal, int(group.stream_of(group.ranks[0]).handle)
    return torch.cuda.ExternalStream(handle, device=ordinal) if handle else torch.cuda.default_stream(ordinal)
