"""Launches of rows kernels: their shapes and grids, and the words that each call passes to them."""

from dataclasses import replace

from epmoe import device
from epmoe.kernels import LaunchConfig
from epmoe.kernels.launch import Contexts
from epmoe.kernels.rows import shape as rows_shape
from epmoe.kernels.rows.shape import RowsShape, parameter_block
from epmoe.kernels.rows.small import lamport
from epmoe.kernels.stamps import TraceBuffers

at = parameter_block(1).index  # of a field's first word; it does not depend on the number of ranks


def smaller_blocks(tuning, num_tokens, is_small):
    """Threads of the blocks that send a rank's tokens, and of those that combine them; None: the default number.

    is_small: whether they go in Lamport rows. Smaller blocks shorten the work that every warp of few tokens does first.
    With many tokens less is in flight at a time, so blocks end closer together; only for launches that may use all
    blocks. Kernels are compiled for their block size, so the number of tokens affects compilation only through this and
    RowsShape.lamport.
    """
    few_sent, to_send = tuning.few_to_send
    few_combined, to_combine = tuning.few_to_combine
    many, of_many = tuning.many
    default = of_many if num_tokens >= many else None
    return (
        to_send if num_tokens <= few_sent else of_many if is_small else default,
        to_combine if num_tokens <= few_combined else default,
    )


class Launches:
    """Shapes of one Buffer's kernels, and memory that all its launches use. launch: its LaunchConfig."""

    def __init__(self, world, launch=None):
        self.n_ranks = world.n_ranks
        self.launch = world.share(launch or LaunchConfig())
        self.threads = self.launch.threads
        self.most_blocks = self.launch.grid(world.machine)
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
        shape = RowsShape(self.n_ranks, n_local_experts, self.threads, row_bytes, **more)
        n_blocks = self.blocks(num_sms)
        shape = replace(shape, lamport=lamport.rows_for(shape, most, n_blocks))
        by_all = n_blocks == self.most_blocks
        if self.launch.num_threads is not None:
            return shape
        if expand:
            (few, of_few), (many, of_many) = self.tuning.few_to_expand, self.tuning.many_to_expand
            if most <= few or by_all and shape.lamport > 0:
                fewer = of_few
            elif by_all and most >= many and not shape.encode:
                fewer = of_many
        elif by_all and shape.top_k or most < self.tuning.many[0]:
            to_send, to_combine = smaller_blocks(self.tuning, most, shape.lamport > 0)
            fewer = to_send if send else to_combine if combine else None
        return replace(shape, threads=min(self.threads, fewer or self.threads))


class RankCall(dict):
    """One rank's launches of a kernel for one plan, {blocks: Launch}, each prepared when first looked up.

    values: {field: value} of words that stay the same, as for ParameterBlock.pack(). A launch has no more blocks than
    there is work for, plus the leader block, because fewer blocks start and end sooner. For n rows it is self[min(n + 1,
    self.most)].
    """

    def __init__(self, plan, i, kernel, values):
        buffer, launches, block = plan.buffer, plan.buffer.launches, parameter_block(plan.buffer.n_ranks)
        self.r, self.most = buffer.ranks[i], launches.blocks(plan.num_sms)
        of_ranks = dict(control_ptrs=list(buffer.control.addresses), pool_ptrs=list(buffer.pool.addresses))
        values = values | dict(
            context=launches.contexts.address(buffer.machine, self.r.rank, block.pack_context(of_ranks)),
            mailboxes_at=buffer.layout.mailboxes,
            mailbox_bytes=buffer.layout.mailbox_bytes,
            words=self.r.words.address,
            timeout_ns=max(1, int(buffer.timeout * 1e9)),
            columns=self.r.scratch.address,
            lamport_at=buffer.pool_layout.lamport_at,
            lamport_bytes=buffer.pool_layout.lamport_bytes,
        )
        if launches.launch.trace:
            stamps = launches.traces.setdefault(kernel.name, TraceBuffers())
            values["trace"] = stamps.address(buffer.machine, self.r.rank, launches.most_blocks)
        how = kernel.max_threads, block.pack(values).tolist(), plan.num_tokens[i], self.r.rank
        stream = buffer.world.stream_of(self.r.rank, fused=True)
        self._prepared = lambda grid: buffer.machine.prepared(kernel, grid, *how, stream=stream)

    def __missing__(self, blocks):
        launch = self[blocks] = self._prepared(max(2, blocks))
        return launch

    def of(self, n_rows):
        """The launch for n_rows rows."""
        return self[min(n_rows + 1, self.most)]
