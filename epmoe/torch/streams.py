"""Which stream a call is ordered with: torch's current one, whatever the world's is; and whose memory results have."""

from functools import partial

import torch

from epmoe.device import SIM
from epmoe_ref.errors import EPStateError


def in_stream_order(buffer):
    """What is to be done with the results of a call that is launched next, or None; see Interface.

    Calls come after what torch's current stream has now, and before what it gets next. Where the Buffer has that very
    stream, nothing is needed; else events, which a graph capture may hold too. Who uses several streams may free tensors
    or take their memory away by torch's means, so results are then copied into memory of torch's own; a world whose
    `copies` is True or False says itself whether they are.
    """
    if not SIM and _raw_stream(buffer.ordinal) != buffer.stream_handle:
        return _between(buffer, buffer.stream.beside(_raw_stream(buffer.ordinal)))
    return copied if buffer.copies else None


def _between(buffer, current):
    """A call on the world's own stream takes place between two points of the current one."""
    own, is_captured = buffer.stream, current.capture()
    if is_captured and not own.can_be_captured:
        raise EPStateError(
            "torch's current stream is being captured into a CUDA graph, and the group's world is on "
            "the default stream, which cannot be: make the world with the stream that captures: "
            "ProcessGroupWorld(group, stream=...) before the group's first call, MPIWorld(stream=...)"
        )
    own.wait(current)  # the tensors given are written by then
    return partial(_left, own, current, buffer.copies, is_captured)


def _left(own, current, copies, is_captured, made):
    current.wait(own)  # the results are written; and what they were made of may be used again
    if copies is False:
        return made
    made = copied(made)
    if not is_captured:  # memory that captured calls borrow is not lent again
        own.wait(current)  # the next call, from whatever stream, may be lent what is copied now
    return made


def _slow_raw_stream(ordinal):
    return torch.cuda.current_stream(ordinal).cuda_stream


# the handle of torch's current stream: the public way takes the host 4 us more
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_raw_stream)


def copied(made):
    """Tensors in memory of torch's own; also inside lists and tuples."""
    if isinstance(made, (list, tuple)):
        return type(made)(copied(one) for one in made)
    return made.clone() if isinstance(made, torch.Tensor) else made
