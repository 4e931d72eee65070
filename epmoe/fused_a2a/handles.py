"""Handles: what a dispatch leaves for combines and cached dispatches. They own memory, none of it the buffer's."""

from typing import NamedTuple

import numpy as np

from epmoe.host.arrays import Field
from epmoe.host.lending import Arrangement
from epmoe.kernels.rows.handle import TOKENS
from epmoe_ref.errors import EPValueError


def memory_of(name, n_ranks, arrays):
    """The Arrangement of a handle's memory: `info`, what a dispatch tells the host, and {name: (shape, dtype)}.

    `counts` [R, R] are the last words of `info`: kernels find each rank's tokens before them.
    """
    n_words = TOKENS + n_ranks
    made = Arrangement(name, {"info": ((n_words + n_ranks * n_ranks,), np.int32)} | arrays)
    made.fields["counts"] = Field((n_ranks, n_ranks), np.int32, 4 * n_words)
    return made


class RowsRouting(NamedTuple):
    """What handles of dispatches of one form have in common; see RowsHandle."""

    ranks: list
    num_experts: int
    top_k: int


class RowsHandle:
    """The routing of one FusedDispatch.forward, for any number of combines and cached dispatches.

    It depends on ids and numbers of tokens alone: data of another hidden size or dtype may use it. ranks: of this
    process. num_tokens, num_rows: T and N of each of them. counts: int [R, R], rows from each source to each rank; None
    where they are on the device alone, and then every rank has `capacity` rows, of which the first N count. memory:
    (Loan, places) of each rank, see launches.borrowed. most_rows, most_returned: the largest N of all ranks, and the most
    rows that a rank gets back in combine.
    """

    def __init__(self, plan, counts, memory, capacity, group):
        self.routing, self.counts, self.memory = plan.routing, counts, memory
        self.capacity, self.group = capacity, group
        self.form, self.num_tokens = plan.form, plan.num_tokens
        self.most_rows = self.most_returned = capacity
        if counts is None:
            self.num_rows = [capacity] * len(self.num_tokens)
        else:  # few numbers, which NumPy takes longer for
            by_source = counts.tolist()
            received = [sum(of_rank) for of_rank in zip(*by_source)]
            self.num_rows = [received[rank] for rank in self.ranks]
            self.most_rows, self.most_returned = max(received), max(map(sum, by_source))

    ranks = property(lambda self: self.routing.ranks)
    num_experts = property(lambda self: self.routing.num_experts)
    top_k = property(lambda self: self.routing.top_k)

    @property
    def loans(self):
        """The memory of each rank."""
        return [loan for ((loan, _),) in self.memory]


class HybridHandle:
    """The routing of one HybridEPDispatch.forward, for any number of combines and cached dispatches.

    It depends on the routing map and the options alone. num_tokens, num_rows: T and P of each rank of this process.
    overflow: int32 [1], 1 if the padded rows did not all fit into P; with a LocalWorld a list over ranks. It is
    handle[-1] too, as in the tuple that upstream's handle is, and a tensor there under torch. capacity: rows that a rank
    receives before they are expanded, or gets back, at most. memory: as in a RowsHandle, two Loans a rank.
    """

    shown = None  # function that makes what handle[-1] is out of overflow

    def __init__(self, plan, num_rows, capacity, overflow, memory, group):
        self.num_local_experts, self.num_tokens = plan.local, plan.num_tokens
        self.pad_multiple, self.p2p_world_size, self.num_sms = plan.pad, plan.a_world, plan.num_sms
        self.num_rows, self.capacity, self.overflow = num_rows, capacity, overflow
        self.memory, self.group = memory, group
        self.form = plan.form, capacity

    def __getitem__(self, index):
        if index != -1:
            raise IndexError(
                f"handle[{index}]: a handle is opaque but for handle[-1], the overflow flag"
            )
        return self.overflow if self.shown is None else self.shown(self.overflow)


def handle_of(kind, handle):
    """The handle, if the matching dispatch made it."""
    if not isinstance(handle, kind):
        maker = {RowsHandle: "FusedDispatch", HybridHandle: "HybridEPDispatch"}[kind]
        raise EPValueError(
            f"handle is a {type(handle).__name__}; the handle that {maker}.forward returned is needed"
        )
    return handle
