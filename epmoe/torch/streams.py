"""Which stream a call is ordered with: torch's current one, whatever stream the world has; and what graphs need."""

import weakref
from contextlib import contextmanager

import torch

from epmoe import device
from epmoe.arrays import DeviceArray

_captured = weakref.WeakKeyDictionary()     # world -> memory that graphs write when they are replayed


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


def kept_for_replays(group, made):
    """Results as they are; if torch's current stream is being captured, their memory is theirs as long as the world is.

    Every replay writes it again, whoever looks at it by then.
    """
    if not device.SIM and torch.cuda.is_current_stream_capturing():
        _captured.setdefault(group, []).extend(_memory(made))
    return made


def _memory(made):
    if isinstance(made, (list, tuple)):
        for one in made:
            yield from _memory(one)
    elif isinstance(made, DeviceArray):
        yield made
    elif hasattr(made, "loans"):        # a handle; not the handle itself, which keeps the world
        yield from made.loans
