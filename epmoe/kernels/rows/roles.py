"""The roles of blocks: all blocks but the last send; the last block, the leader block (clerk), talks to the peers."""

from epmoe.device import SIM, block_idx, device_fn, grid_dim, i32, n_warps, u32, warp_id

TENTHS_SENDING = 5      # of the blocks, where the others expand meanwhile
FEW = 6 if SIM else 128     # tokens that every block looks at, a thread at one
BLOCKS_A_TOKEN = 4          # of Lamport rows, of which others receive three times as many


def few(shape):
    """Device function (num_tokens) -> whether every block reads all tokens; never with a routing map.

    Always true for the batches of lamport.py, so that their kernel has no code for more.
    """
    ever, most = not shape.expert_major, max(FEW, 1)
    if ever and shape.lamport and not SIM:
        return _always

    @device_fn
    def are_few(num_tokens):
        return ever and num_tokens <= most

    return are_few


def blocks_for(num_tokens, lamport):
    """The number of blocks that have tokens to send, or to store on arrival.

    lamport: of the kernel's shape.
    """
    return BLOCKS_A_TOKEN * max(num_tokens, 1) if lamport and num_tokens <= lamport else num_tokens


def sharing(shape):
    """Device function (num_tokens) -> whether blocks share all tokens to send; else each sends one token or none.
    """
    blocks = sending(shape)

    @device_fn
    def are_shared(num_tokens):
        return num_tokens > blocks()

    return are_shared


def beginning(shape):
    """Device function (num_tokens) -> whether each warp first sends parts of a token of its own block.

    True if blocks share tokens, and there are as many warps. The block has all data for this itself. If rows are expanded
    while they arrive, they are sent in order from the start.
    """
    blocks, are_shared = sending(shape), sharing(shape)
    in_order = shape.expands or shape.encode

    @device_fn
    def begin_with_own(num_tokens):
        return not in_order and are_shared(num_tokens) and num_tokens <= blocks() * n_warps()

    return begin_with_own


@device_fn
def _always(num_tokens):
    return True


@device_fn
def is_clerk():
    """Whether this is the block that speaks for its rank."""
    return block_idx() == grid_dim() - 1


@device_fn
def is_herald():
    """Whether this is the notify warp, which announces its rank: the leader block's last one; others read tokens."""
    return is_clerk() and warp_id() == n_warps() - 1


@device_fn
def is_keeper():
    """Whether this is the fence warp, which fences when the notify warp does not: another of the leader block's, if any."""
    return is_clerk() and warp_id() == max(0, i32(n_warps() - 2))


def sending(shape):
    """Device function () -> how many blocks send; the leader block is not among them."""
    tenths = TENTHS_SENDING if shape.expands else 10

    @device_fn
    def blocks():
        return i32(max(1, i32(u32(i32((grid_dim() - 1) * tenths)) // u32(10))))

    return blocks
