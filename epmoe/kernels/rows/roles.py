"""Which blocks do what: the first ones send, the last one, the clerk, speaks for its rank."""

from epmoe.device import block_dim, block_idx, device_fn, grid_dim, i32, n_warps, thread_idx

BEGIN_WITH_OWN = True
TENTHS_SENDING = 5      # of the blocks, where the others expand meanwhile


def sharing(shape):
    """Device function (num_tokens) -> whether blocks share all tokens to send; or each sends one of its own, or none.
    """
    blocks = sending(shape)

    @device_fn
    def are_shared(num_tokens):
        return num_tokens > blocks()

    return are_shared


def beginning(shape):
    """Device function (num_tokens) -> whether each warp first sends parts of a token of its own block.

    Where blocks share tokens, and there are as many warps. What it needs for that, its block knows by itself. Where
    rows are expanded while they come, they are sent in order, and there is no such beginning.
    """
    blocks, are_shared = sending(shape), sharing(shape)
    in_order = shape.expands or shape.encode or not BEGIN_WITH_OWN

    @device_fn
    def begin_with_own(num_tokens):
        senders = blocks()
        return not in_order and are_shared(num_tokens) and (num_tokens + senders - 1) // senders <= n_warps()

    return begin_with_own


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
