"""Launching rows kernels: what stays the same from call to call, and the size of grids."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from epmoe import device
from epmoe.host.arrays import Field
from epmoe.host.lending import Arrangement
from epmoe.kernels import LaunchConfig
from epmoe.kernels.launch import SIMULATOR_BLOCKS
from epmoe.kernels.rows import shape as rows_shape
from epmoe.kernels.rows.few import lamport
from epmoe.kernels.rows.handle import TOKENS
from epmoe.kernels.rows.shape import FIRST, RowsShape, parameter_block
from epmoe.kernels.stamps import TraceBuffers

_BLOCK = parameter_block(1)  # indices do not depend on the number of ranks
_FIRST = _BLOCK.index(FIRST)  # from here on words differ from call to call
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
MOST_ARRANGED = 256  # numbers of rows of one kind of result
MANY_TO_EXPAND = 4096  # likewise, by expert; not where rows are encoded


def smaller_blocks(num_tokens):
    """Threads of the blocks that send a rank's tokens, and of those that combine them; None where as many as usual.

    Kernels are compiled for the size of their blocks, so this is what the number of tokens changes in them, besides
    RowsShape.lamport. Blocks of many tokens are smaller only where all that there are take part.
    """
    many = THREADS_OF_MANY if num_tokens >= MANY else None
    return (
        THREADS_TO_SEND if num_tokens <= FEW_TO_SEND else many,
        THREADS_TO_COMBINE if num_tokens <= FEW_TO_COMBINE else many,
    )


class Launches:
    """The launches of one Buffer. launch: its LaunchConfig."""

    lamport_rows = True  # whether few rows go without flags; tests change it

    def __init__(self, world, launch=None):
        self.world, self.machine = world, world.machine
        self.launch = world.share(launch or LaunchConfig())
        self.threads = self.launch.threads
        self.most_blocks = self.launch.n_sms or (
            SIMULATOR_BLOCKS if device.SIM else self.machine.n_sms
        )
        self.traces = {}  # by kernel: stamps, if the LaunchConfig asks for them
        self._contexts = {}

    @property
    def tuning(self):
        """The numbers that kernels are tuned with: small ones in the simulator."""
        return rows_shape.SMALL if device.SIM else rows_shape.TUNING

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
            self.world.n_ranks,
            n_local_experts,
            threads,
            row_bytes,
            trace=self.launch.trace,
            tuning=self.tuning,
            **more,
        )
        return self._sending_few(shape, max(to_send or to_expand or to_combine or [0]))

    def _sending_few(self, shape, num_tokens):
        """The shape of a kernel that has the code for small batches, if that many tokens are one."""
        return replace(
            shape, lamport=lamport.rows_for(shape, num_tokens) if self.lamport_rows else 0
        )

    def window_bytes(self, shape):
        """Bytes that Lamport rows take in the pool, for want_pool()."""
        return dict(lamport_bytes=lamport.bytes_for(shape) if self.lamport_rows else 0)

    def expanding(self, shape, num_tokens, by_all):
        """The shape of the kernel that expands rows as they come. num_tokens: of each rank of this process."""
        shape, threads = replace(shape, expands=True), shape.threads
        shape, is_many = (
            self._sending_few(shape, max(num_tokens)),
            max(num_tokens) >= MANY_TO_EXPAND,
        )
        is_few = shape.lamport > 0
        if by_all and (is_few or is_many and not shape.encode) and self.launch.num_threads is None:
            threads = min(threads, THREADS_TO_EXPAND)
        return replace(shape, threads=threads)

    def are_all(self, num_sms):
        """Whether a caller that grants num_sms (None: as many as there are) grants all blocks that there are."""
        return num_sms is None or int(num_sms) >= self.most_blocks

    def grid(self, num_sms, n_rows):
        """Blocks of a launch for which the caller grants num_sms (None: as many as there are); at least two.

        No more than have something to do with so many rows, besides the leader block: few begin and end sooner than many.
        """
        granted = self.most_blocks if num_sms is None else min(int(num_sms), self.most_blocks)
        return max(2, min(granted, n_rows + 1))

    def prepare(self, kernel, rank, num_tokens, stream, words, grid):
        """A launch of a kernel of a rank. words: of the block, by which it begins."""
        if self.launch.trace:
            traces = self.traces.setdefault(kernel.name, TraceBuffers())
            words[at("trace")] = traces.address(self.machine, rank, self.most_blocks)
        return self.machine.prepared(
            kernel, grid, kernel.max_threads, words, num_tokens, rank, stream=stream
        )

    def context(self, rank, of_ranks):
        """The address of the words that kernels look up by rank: {name: a word of each rank}."""
        words = parameter_block(self.world.n_ranks).pack_context(of_ranks)
        key = rank, words.tobytes()
        if key not in self._contexts:
            self._contexts[key] = self.machine.alloc(words.nbytes, "context", rank)
            self._contexts[key].write(words)
        return self._contexts[key].address

    def close(self):
        """Free contexts and stamps; the launches that use them must have ended."""
        for trace in self.traces.values():
            trace.close()
        while self._contexts:
            self._contexts.popitem()[1].free()


def at(name):
    """The index of a field's first word among those of a launch."""
    return _BLOCK.index(name)


def fill(words, values):
    """Enter {field: value} into the words of a launch; a value is a number, or one for each word of the field."""
    for name, value in values.items():
        i = _BLOCK.index(name)
        for word in value if isinstance(value, (list, tuple)) else (value,):
            words[i] = word
            i += 1


def places(arrangement, names):
    """Where arrays lie, for `RankCall.begin`: [(index of a word, offset)]; names: {field: array of the Arrangement}."""
    fields = arrangement.fields
    return [(at(field), fields[name].offset) for field, name in names.items()]


def arranged(name, shapes, at_words):
    """A function of a number of rows: (the Arrangement of shapes(rows), places); those of the latest numbers are kept.

    at_words: {index of a word: array of the Arrangement}; places: [(index, offset)].
    """

    @lru_cache(MOST_ARRANGED)
    def of(rows):
        made = Arrangement(name, shapes(rows))
        return made, [(i, made.fields[array].offset) for i, array in at_words.items()]

    return of


def handle_memory(name, n_ranks, arrays):
    """The Arrangement of a handle's memory: `info`, what a dispatch tells the host, and {name: (shape, dtype)}.

    `counts` [R, R] are the last words of `info`: kernels find each rank's tokens before them.
    """
    n_words = TOKENS + n_ranks
    made = Arrangement(name, {"info": ((n_words + n_ranks * n_ranks,), np.int32)} | arrays)
    made.fields["counts"] = Field((n_ranks, n_ranks), np.int32, 4 * n_words)
    return made


class RankCall:
    """One rank's part of calls that are alike: what launches a kernel, and the memory that each call borrows.

    n_rows: rows that the kernel moves, None if each call says. values: {field: value} of the words that stay the same.
    lent: (Arrangement, {field: array}) of each piece of memory that a call borrows of the rank's own. takes: indices of
    words for the arrays that a call is given, whose names are `names`. dtypes: {name: type that it must have}.
    """

    __slots__ = ("buffer", "r", "_lent", "_how", "_values", "_launches", "_latest", "_given")

    def __init__(
        self,
        buffer,
        r,
        kernel,
        num_tokens,
        num_sms,
        n_rows,
        values,
        *,
        lent=(),
        takes=(),
        names=(),
        dtypes=None,
    ):
        self.buffer, self.r = buffer, r
        self._lent = [(arranged, places(arranged, names)) for arranged, names in lent]
        self._how, self._values, self._launches = (kernel, num_tokens, num_sms), values, {}
        self._given = takes, names, dtypes
        self._latest = None, None  # number of rows, launch
        if n_rows is not None:
            self._latest = None, self._for(n_rows)

    def _for(self, n_rows):
        kernel, num_tokens, num_sms = self._how
        grid = self.buffer.launches.grid(num_sms, n_rows)
        launch = self._launches.get(grid)
        if launch is None:
            launch = self.buffer.find(kernel, self.r.rank, num_tokens, grid)
            fill(launch.words, self._values)
            self._launches[grid] = launch
        self._latest = n_rows, launch
        return launch

    def begin(self, given, memory=(), n_rows=None):
        """(what is to be started, the Loans of what it borrows).

        given: (form, address or None, array) of each. memory: (Loan, places) of what earlier calls borrowed.
        """
        known, launch = self._latest
        if known != n_rows:
            launch = self._for(n_rows)
        words, loans, (takes, names, dtypes) = launch.words, [], self._given
        addresses = [address for _, address, _ in given]
        if dtypes is not None or None in addresses:
            arrays = [array for _, _, array in given]
            addresses = self.buffer.placing.place_all(self.r.rank, names, arrays, dtypes or {})
        for i, address in zip(takes, addresses):
            words[i] = address
        for loan, at_words in memory:
            base = loan.base
            for i, offset in at_words:
                words[i] = base + offset
        arena = self.r.arena
        for arrangement, at_words in self._lent:
            loan = arena.lend(arrangement)
            base = loan.base
            for i, offset in at_words:
                words[i] = base + offset
            loans.append(loan)
        if self.buffer.is_captured:
            self.buffer.captured += loans
        return launch, loans

    def begin_like(self, earlier):
        """The same of a kernel that goes on with what another launch was given."""
        _, launch = self._latest
        launch.words[_FIRST:] = earlier.words[_FIRST:]
        fill(launch.words, self._values)
        return self.begin(())
