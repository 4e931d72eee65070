"""Whether the call under way is being captured into a CUDA graph, whose replays use its memory whoever looks at it."""

# What a start of launches that were recorded says if it started none: a stream is in a capture; somebody refers to what
# would be written; what they name has changed since, or others have taken their place
CAPTURED, HELD, GONE = -1, -2, -3


def is_captured(machine):
    """Whether a stream of the machine is in a capture now."""
    for stream in machine.streams:
        if stream.capture():
            return True
    return False


def is_seen_captured(machine):
    """The same, sooner told where the machine has never seen a capture; every captured call asks is_captured first."""
    return machine.has_captured and is_captured(machine)
