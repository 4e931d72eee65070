"""Launching rows kernels: parameter blocks that are written once for each set of arguments, and the size of grids."""

from dataclasses import replace

from epmoe import device
from epmoe.kernels import LaunchConfig
from epmoe.kernels.launch import SIMULATOR_BLOCKS
from epmoe.kernels.rows import expert_bits, lamport
from epmoe.kernels.rows.block import parameter_block
from epmoe.kernels.rows.shape import RowsShape
from epmoe.kernels.stamps import TraceBuffers
from epmoe.kernels.written_blocks import WrittenBlocks

N_ARGUMENTS = (
    3  # of every kernel; others are fields of the block that it reads first, by their names
)
BLOCKS_A_CALL = 3  # parameter blocks of one call of a rank, at most
FEW_TO_SEND, THREADS_TO_SEND = (
    128,
    256,
)  # so few tokens of a rank have smaller blocks: what all warps do before
FEW_TO_COMBINE, THREADS_TO_COMBINE = 32, 512  # they have work takes less time then
FEW_TO_EXPAND, THREADS_TO_EXPAND = 16, 512
MANY, THREADS_OF_MANY = (
    1024,
    512,
)  # of so many less is on its way at a time: blocks end closer together
MANY_TO_EXPAND = 4096  # likewise, by expert; not where rows are encoded


def smaller_blocks(num_tokens):
    """Threads of the blocks that send a rank's tokens, and of those that combine them; None where as many as usual.

    Kernels are compiled for the size of their blocks, so this is what the number of tokens changes in them, besides
    RowsShape.lamport and few. Blocks of many tokens are smaller only where all that there are take part.
    """
    many = THREADS_OF_MANY if num_tokens >= MANY else None
    return (
        THREADS_TO_SEND if num_tokens <= FEW_TO_SEND else many,
        THREADS_TO_COMBINE if num_tokens <= FEW_TO_COMBINE else many,
    )


class Launches:
    """The launches of one Buffer. launch: its LaunchConfig; a steady state copies no arguments."""

    lamport_rows = True  # whether few rows go without flags; tests change it

    def __init__(self, world, launch=None):
        self.world, self.machine = world, world.machine
        self.launch = world.share(launch or LaunchConfig())
        self.threads = self.launch.threads
        self.most_blocks = self.launch.n_sms or (
            SIMULATOR_BLOCKS if device.SIM else self.machine.n_sms
        )
        self.traces = {}  # by kernel: stamps, if the LaunchConfig asks for them
        self._written = WrittenBlocks()

    def shape(
        self,
        n_local_experts,
        row_bytes,
        *,
        to_send=None,
        to_expand=None,
        to_combine=None,
        by_all=False,
        **more,
    ):
        """The RowsShape of a kernel of these launches. to_...: tokens of each rank of this process, for what.

        by_all: whether all blocks that there are move rows as they are.
        """
        threads = self.threads
        if self.launch.num_threads is None and (by_all or max(to_send or to_combine or [0]) < MANY):
            if to_send is not None:
                threads = min(threads, smaller_blocks(max(to_send))[0] or threads)
            if to_expand is not None and max(to_expand) <= FEW_TO_EXPAND:
                threads = min(threads, THREADS_TO_EXPAND)
            if to_combine is not None:
                threads = min(threads, smaller_blocks(max(to_combine))[1] or threads)
        shape = RowsShape(
            self.world.n_ranks, n_local_experts, threads, row_bytes, trace=self.launch.trace, **more
        )
        num_tokens = max(to_send or to_expand or to_combine or [0])
        return replace(
            shape, lamport=lamport.rows_for(shape, num_tokens) if self.lamport_rows else 0
        )

    def window_bytes(self, shape):
        """Bytes that Lamport rows take in the pool, for want_pool()."""
        return dict(lamport_bytes=lamport.bytes_for(shape) if self.lamport_rows else 0)

    def expanding(self, shape, num_tokens, by_all):
        """The shape of the kernel that expands rows as they come. num_tokens: of each rank of this process."""
        shape, threads = replace(shape, expands=True), shape.threads
        few, is_many = (
            expert_bits.few_for(shape, max(num_tokens)),
            max(num_tokens) >= MANY_TO_EXPAND,
        )
        if by_all and (few or is_many and not shape.encode) and self.launch.num_threads is None:
            threads = min(threads, THREADS_TO_EXPAND)
        return replace(shape, few=few, threads=threads)

    def are_all(self, num_sms):
        """Whether a caller that grants num_sms (None: as many as there are) grants all blocks that there are."""
        return num_sms is None or int(num_sms) >= self.most_blocks

    def grid(self, num_sms, n_rows):
        """Blocks of a launch for which the caller grants num_sms (None: as many as there are); at least two.

        No more than have something to do with so many rows, besides the clerk: few begin and end sooner than many.
        """
        granted = self.most_blocks if num_sms is None else min(int(num_sms), self.most_blocks)
        return max(2, min(granted, n_rows + 1))

    def start(self, kernel, rank, values, num_tokens, stream, num_sms=None, n_rows=None):
        """Launch a kernel with these fields of the parameter block. n_rows: that it moves, if not a row a token."""
        grid = self.grid(num_sms, num_tokens if n_rows is None else n_rows)
        if self.launch.trace:
            values["trace"] = self.traces.setdefault(kernel.name, TraceBuffers()).address(
                self.machine, rank, self.most_blocks
            )
        block, code = self._block(rank, values), kernel.fn.__code__
        early = [values[name] for name in code.co_varnames[N_ARGUMENTS : code.co_argcount]]
        self.machine.launch(
            kernel,
            grid,
            kernel.max_threads,
            (block.address, num_tokens, rank, *early),
            stream=stream,
        )

    def _block(self, rank, values):
        key = (
            rank,
            *((name, tuple(v) if isinstance(v, list) else v) for name, v in values.items()),
        )
        block = self._written.find(key)
        return block or self._written.write(
            self.machine, rank, key, parameter_block(self.world.n_ranks).pack(values)
        )

    def trim(self):
        """Room for the parameter blocks of one call; between calls, since it may wait for their launches."""
        self._written.make_room(self.machine, BLOCKS_A_CALL * len(self.world.ranks))

    def close(self):
        """Free parameter blocks and stamps; the launches that use them must have ended."""
        for trace in self.traces.values():
            trace.close()
        self._written.close()
