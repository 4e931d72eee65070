"""Launches of rows kernels: their shapes and grids, and the words that each call passes to them."""

from dataclasses import replace

from epmoe import device
from epmoe.kernels import LaunchConfig
from epmoe.kernels.launch import SIMULATOR_BLOCKS, Contexts
from epmoe.kernels.rows import shape as rows_shape
from epmoe.kernels.rows.shape import RowsShape, parameter_block
from epmoe.kernels.rows.small import lamport

at = parameter_block(1).index  # of a field's first word; it does not depend on the number of ranks
# Up to this many tokens a rank, blocks are smaller, which shortens the work that every warp does first.
FEW_TO_SEND, THREADS_TO_SEND = 128, 256
FEW_TO_COMBINE, THREADS_TO_COMBINE = 32, 512
FEW_TO_EXPAND, THREADS_TO_EXPAND = 16, 512
# From this many tokens on, less is in flight at a time, so blocks end closer together (by expert: unless encoded).
MANY, THREADS_OF_MANY = 1024, 512
MANY_TO_EXPAND = 4096


def smaller_blocks(num_tokens, is_small):
    """Threads of the blocks that send a rank's tokens, and of those that combine them; None: the default number.

    is_small: whether they go in Lamport rows. Kernels are compiled for their block size, so the number of tokens affects
    compilation only through this and RowsShape.lamport. For many tokens, blocks are smaller only if the launch may use
    all blocks.
    """
    many = THREADS_OF_MANY if num_tokens >= MANY else None
    return (
        THREADS_TO_SEND if num_tokens <= FEW_TO_SEND else THREADS_OF_MANY if is_small else many,
        THREADS_TO_COMBINE if num_tokens <= FEW_TO_COMBINE else many,
    )


class Launches:
    """Shapes of one Buffer's kernels, and memory that all its launches use. launch: its LaunchConfig."""

    def __init__(self, world, launch=None):
        self.world, self.machine = world, world.machine
        self.launch = world.share(launch or LaunchConfig())
        self.threads = self.launch.threads
        of_machine = SIMULATOR_BLOCKS if device.SIM else self.machine.n_sms
        self.most_blocks = self.launch.n_sms or of_machine
        self.contexts = Contexts()
        self.traces = {}  # TraceBuffers by name of a kernel, if the LaunchConfig asks for stamps
        # tuning constants of kernels, small in the simulator
        self.tuning = rows_shape.SMALL if device.SIM else rows_shape.TUNING

    def blocks(self, num_sms):
        """The most blocks of a launch to which the caller grants num_sms SMs; None: all."""
        return self.most_blocks if num_sms is None else min(int(num_sms), self.most_blocks)

    def shape(self, n_local_experts, row_bytes, num_sms, *, send=(), expand=(), combine=(), **more):
        """The RowsShape of a kernel. send, expand or combine (the one that the kernel does): the tokens of each rank here.

        num_sms: SMs that the caller grants; None: all. Some blocks are smaller only if the launch may use all SMs.
        """
        most, fewer = max((*send, *expand, *combine), default=0), None
        more |= dict(trace=self.launch.trace, tuning=self.tuning)
        shape = RowsShape(self.world.n_ranks, n_local_experts, self.threads, row_bytes, **more)
        n_blocks = self.blocks(num_sms)
        shape = replace(shape, lamport=lamport.rows_for(shape, most, n_blocks))
        by_all = n_blocks == self.most_blocks
        if self.launch.num_threads is not None:
            return shape
        if expand:
            is_many = most >= MANY_TO_EXPAND and not shape.encode
            if most <= FEW_TO_EXPAND or by_all and (shape.lamport > 0 or is_many):
                fewer = THREADS_TO_EXPAND
        elif by_all and shape.top_k or most < MANY:
            to_send, to_combine = smaller_blocks(most, shape.lamport > 0)
            fewer = to_send if send else to_combine if combine else None
        return replace(shape, threads=min(self.threads, fewer or self.threads))

    def close(self):
        """Free contexts and stamps; the launches that use them must have ended."""
        for memory in (self.contexts, *self.traces.values()):
            memory.close()


class RankCall(dict):
    """One rank's launches of a kernel for one plan, {blocks: Launch}, each prepared when first looked up.

    values: {field: value} of words that stay the same, as for ParameterBlock.pack(). A launch has no more blocks than
    there is work for, plus the leader block, because fewer blocks start and end sooner. For n rows it is self[min(n + 1,
    self.most)].
    """

    def __init__(self, plan, i, kernel, values):
        self._buffer, self.r, self._values = plan.buffer, plan.buffer.ranks[i], values
        self._how = kernel, self.r, plan.num_tokens[i]
        self.most = plan.buffer.launches.blocks(plan.num_sms)

    def __missing__(self, blocks):
        launch = self[blocks] = self._buffer.prepare(*self._how, max(2, blocks), self._values)
        return launch

    def of(self, n_rows):
        """The launch for n_rows rows."""
        return self[min(n_rows + 1, self.most)]
