"""Which blocks do what: the first ones send, the last one, the clerk, speaks for its rank."""

from epmoe.device import block_dim, block_idx, device_fn, grid_dim, i32, thread_idx

TENTHS_SENDING = 5      # of the blocks, where the others expand meanwhile


def sharing(shape):
    """Device function (num_tokens) -> whether blocks share all tokens to send, or each sends one of its own, or none."""
    blocks = sending(shape)

    @device_fn
    def are_shared(num_tokens):
        return num_tokens > blocks()

    return are_shared


@device_fn
def is_clerk():
    """Whether this is the block that speaks for its rank."""
    return block_idx() == grid_dim() - 1


@device_fn
def announcer():
    """The number of a thread of the clerk, from the last one on: the first ones are the last to have nothing to do."""
    return i32(block_dim() - 1 - thread_idx())


def sending(shape):
    """Device function () -> how many blocks send; the clerk is not among them."""
    tenths = TENTHS_SENDING if shape.expands else 10

    @device_fn
    def blocks():
        return i32(max(1, (grid_dim() - 1) * tenths // 10))

    return blocks
