"""Orders calls with torch's current stream, even if the world has another; decides whether results are copied."""

import torch

from epmoe.device import SIM
from epmoe_ref.errors import EPStateError


def in_stream_order(buffer):
    """Order the next call with torch's current stream; returns a function for its results, or None: see Interface.

    The call runs after the work that the stream has now, and before later work. If the Buffer uses the same stream,
    nothing is needed; otherwise events order them, also in a graph capture. With several streams the caller may free
    tensors or their memory by torch's means, so results are then copied into torch's own memory, unless the world's
    `copies` is True or False, which decides.
    """
    if not SIM:
        ordinal, own = buffer.stream
        current = _raw_stream(ordinal)
        if current != own:
            own = buffer.world.stream_of(buffer.world.ranks[0])
            return _between(own, own.beside(current), buffer.copies)
    return copied if buffer.copies else None


def _between(own, current, copies):
    """in_stream_order() for a current stream that is not the world's: the call runs between two points of it."""
    is_captured = current.capture()
    if is_captured and not own.can_be_captured:
        raise EPStateError(
            "torch's current stream is being captured into a CUDA graph, and the group's world is on "
            "the default stream, which cannot be: make the world with the stream that captures: "
            "ProcessGroupWorld(group, stream=...) before the group's first call, MPIWorld(stream=...)"
        )
    own.wait(current)  # then the given tensors are written

    def leave(made):
        current.wait(own)  # then the results are written, and the given tensors may be reused
        if copies is False:
            return made
        made = copied(made)
        if not is_captured:  # memory of captured calls is not lent again
            own.wait(current)  # the next call, on any stream, may borrow the memory copied now
        return made

    return leave


# returns the handle of torch's current stream; the public function costs 4 us more; a CPU-only torch has neither
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def copied(made):
    """Tensors copied into torch's own memory; also inside lists and tuples."""
    if isinstance(made, (list, tuple)):
        return type(made)(copied(one) for one in made)
    return made.clone() if isinstance(made, torch.Tensor) else made
