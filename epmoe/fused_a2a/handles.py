"""Handles: what a dispatch leaves for combines and cached dispatches. They own memory, none of it the buffer's."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from epmoe.fused_a2a.heap import places_in
from epmoe.kernels.rows import records
from epmoe_ref.errors import EPValueError


def info_words(n_ranks):
    """int32 words of `info`: what a dispatch tells the host, and at its end the counts [R, R]."""
    return records.TOKENS + n_ranks + n_ranks * n_ranks


def counts_offset(n_ranks):
    """Bytes of `info` before the counts."""
    return 4 * (records.TOKENS + n_ranks)


@dataclass(eq=False)
class RowsHandle:
    """The routing of one FusedDispatch.forward, for any number of combines and cached dispatches.

    It depends on ids and numbers of tokens alone: data of another hidden size or dtype may use it. num_tokens,
    num_rows: T and N of each rank of this process (`ranks`). counts: int [R, R], rows from each source to each rank;
    None where they are on the device alone, and then every rank has `capacity` rows, of which the first N count.
    """

    ranks: list
    num_experts: int
    top_k: int
    num_tokens: list
    counts: np.ndarray | None
    loans: list = field(repr=False)
    capacity: int = 0
    group: object = field(default=None, repr=False)

    @cached_property
    def seen(self):
        """What decides how calls with it are launched, for comparison, where a process has one rank.

        First its Places and, if the host knows them, numbers of rows: those that differ between handles of one form.
        Of these the first is this rank's, the last the room that combine needs.
        """
        rows = () if self.counts is None else (self.num_rows[0], self.most_rows, self.most_returned)
        return (
            places_in(self.loans[0]),
            rows,
            self.num_tokens[0],
            self.top_k,
            self.counts is None and self.capacity,
        )

    @property
    def num_rows(self):
        """N of each rank of this process."""
        if self.counts is None:
            return [self.capacity for _ in self.ranks]
        return [int(self.counts[:, rank].sum()) for rank in self.ranks]

    @property
    def most_rows(self):
        """The largest N of all ranks."""
        if self.counts is None:
            return self.capacity
        return int(self.counts.sum(axis=0).max(initial=0))

    @property
    def most_returned(self):
        """The most rows that a rank gets back in combine."""
        if self.counts is None:
            return self.capacity
        return int(self.counts.sum(axis=1).max(initial=0))


@dataclass(eq=False)
class HybridHandle:
    """The routing of one HybridEPDispatch.forward, for any number of combines and cached dispatches.

    It depends on the routing map and the options alone. num_tokens, num_rows: T and P of each rank of this process.
    overflow: int32 [1], 1 if the padded rows did not all fit into P; with a LocalWorld a list over ranks. It is
    handle[-1] too, as in the tuple that upstream's handle is, and a tensor there under torch.
    """

    num_local_experts: int
    num_tokens: list
    num_rows: list
    capacity: int  # rows that a rank receives before they are expanded, or gets back, at most
    pad_multiple: int
    p2p_world_size: int
    overflow: object
    loans: list = field(repr=False)
    group: object = field(default=None, repr=False)
    num_sms: tuple = (None, None)  # granted to dispatch, to combine
    shown: object = field(
        default=None, repr=False
    )  # function that makes what handle[-1] is out of overflow

    def __getitem__(self, index):
        if index != -1:
            raise IndexError(
                f"handle[{index}]: a handle is opaque but for handle[-1], the overflow flag"
            )
        return self.overflow if self.shown is None else self.shown(self.overflow)

    @cached_property
    def seen(self):
        """As of a RowsHandle."""
        loan = self.loans[0]
        return (
            places_in(loan) + places_in(loan.expert_row),
            (self.num_rows[0], self.capacity),
            self.num_local_experts,
            self.num_tokens[0],
            self.capacity,
            self.pad_multiple,
            self.p2p_world_size,
        )


def handle_of(kind, handle):
    """The handle, if the matching dispatch made it."""
    if not isinstance(handle, kind):
        maker = {RowsHandle: "FusedDispatch", HybridHandle: "HybridEPDispatch"}[kind]
        raise EPValueError(
            f"handle is a {type(handle).__name__}; the handle that {maker}.forward returned is needed"
        )
    return handle
