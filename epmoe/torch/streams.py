"""Which stream a call is ordered with: torch's current one, whatever the world's is; and whose memory results have."""

import torch

from epmoe.device import SIM
from epmoe_ref.errors import EPStateError


def in_stream_order(buffer):
    """Order the next call with torch's current stream; returns what its results still need, or None: see Interface.

    The call comes after what that stream has now, and before what it gets next. Where the Buffer has that very stream,
    nothing is needed; else events, which a graph capture may hold too. Who uses several streams may free tensors or take
    their memory away by torch's means, so results are then copied into memory of torch's own; a world whose `copies` is
    True or False says itself whether they are.
    """
    if not SIM:
        ordinal, own = buffer.stream
        current = _raw_stream(ordinal)
        if current != own:
            own = buffer.world.stream_of(buffer.world.ranks[0])
            return _between(own, own.beside(current), buffer.copies)
    return copied if buffer.copies else None


def _between(own, current, copies):
    """The same, where the current stream is another than the world's own: the call comes between two points of it."""
    is_captured = current.capture()
    if is_captured and not own.can_be_captured:
        raise EPStateError(
            "torch's current stream is being captured into a CUDA graph, and the group's world is on "
            "the default stream, which cannot be: make the world with the stream that captures: "
            "ProcessGroupWorld(group, stream=...) before the group's first call, MPIWorld(stream=...)"
        )
    own.wait(current)  # the tensors given are written by then

    def leave(made):
        current.wait(own)  # the results are written; and what they were made of may be used again
        if copies is False:
            return made
        made = copied(made)
        if not is_captured:  # memory that captured calls borrow is not lent again
            own.wait(current)  # the next call, from whatever stream, may be lent what is copied now
        return made

    return leave


def _slow_raw_stream(ordinal):
    return torch.cuda.current_stream(ordinal).cuda_stream


# the handle of torch's current stream: the public way takes the host 4 us more
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_raw_stream)


def copied(made):
    """Tensors in memory of torch's own; also inside lists and tuples."""
    if isinstance(made, (list, tuple)):
        return type(made)(copied(one) for one in made)
    return made.clone() if isinstance(made, torch.Tensor) else made
