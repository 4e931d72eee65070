"""Which stream a call is ordered with: torch's current one, whatever the world's is; and whose memory results have."""

import torch

from epmoe.device import SIM
from epmoe.torch.tensors import readable
from epmoe_ref.errors import EPStateError


def in_stream_order(buffer, group, call, given, *more):
    """call(buffer, given, *more), whose results are tensors: after what torch's current stream has now, before what it
    gets next. given: tensors; group: the Buffer's world.

    Where the world has that very stream, nothing is needed; else events, which a graph capture may hold too. What is
    put on the current stream meanwhile is not waited for: tensors given are made readable before. Who uses several
    streams may free tensors or take their memory away by torch's means, so results are then copied into memory of
    torch's own; a world whose `copies` is True or False says itself whether they are.
    """
    copies = getattr(group, "copies", None)
    if not SIM:
        ordinal, own = buffer.stream
        current = _raw_stream(ordinal)
        if current != own:
            own = group.stream_of(group.ranks[0])
            arguments = buffer, readable(None, given), *more
            return _between(own, own.beside(current), copies, call, arguments)
    made = call(buffer, given, *more)
    return copied(made) if copies else made


def _between(own, current, copies, call, arguments):
    """Results of call(*arguments) on the world's own stream, between two points of the current one."""
    is_captured = current.capture()
    if is_captured and not own.can_be_captured:
        raise EPStateError(
            "torch's current stream is being captured into a CUDA graph, and the group's world is on "
            "the default stream, which cannot be: make the world with the stream that captures: "
            "ProcessGroupWorld(group, stream=...) before the group's first call, MPIWorld(stream=...)"
        )
    own.wait(current)  # the tensors given are written by then
    made = call(*arguments)
    current.wait(own)  # the results are; and what they were made of may be used again
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
