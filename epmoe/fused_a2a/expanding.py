"""The launches of a HybridEPDispatch: rows come into the staging area, and rows of experts are made of them."""

import numpy as np

from epmoe.fused_a2a.arguments import FP32
from epmoe.fused_a2a.handles import counts_offset, info_words
from epmoe.fused_a2a.heap import arrays_in, places_in
from epmoe.fused_a2a.rows import told_by
from epmoe.host.lending import arrange
from epmoe.kernels.rows import dispatch_kernel, expand_kernel, expert_bits, resend_kernel, windows
from epmoe.kernels.rows.companions import expert_masks

NO_LIMIT = 2**31 - 1


def staged_arrays(rows, row_bytes, local):
    """What lies in the staging area between sending and expanding: {name: (shape, dtype)}."""
    return {
        "x": ((rows, row_bytes), np.uint8),
        "slots": ((rows, local), np.int32),
        "probs": ((rows, local), FP32),
        "masks": ((rows, expert_masks(local)), np.uint32),
    }


def staged_bytes(rows, row_bytes, local):
    """Bytes of the staging area for so many rows."""
    return arrange(staged_arrays(rows, row_bytes, local))[1]


class StagingArea:
    """The staging area of every rank for one call: fields, and the room [rows] that there is."""

    def __init__(self, buffer, rows, row_bytes, local):
        self.fields, self.nbytes = arrange(staged_arrays(rows, row_bytes, local))
        self.has_room = self.nbytes <= buffer.pool_layout.staging_bytes
        at = [self.fields[name].offset for name in ("x", "slots", "probs", "masks")]
        self.values = dict(
            places=[buffer.pool_layout.staging_at + offset for offset in at],
            capacity=rows if self.has_room else 0xFFFFFFFF,
        )
        self._offsets = at

    def sources(self, buffer, r):
        """The fields of the parameter block for expanding it on a rank."""
        return dict(sources=[buffer.staging(r) + offset for offset in self._offsets])


class Results:
    """What the rows of experts of one dispatch are like, whatever number of them there is."""

    def __init__(self, buffer, shape, hidden, dtype, num_tokens):
        self.buffer, self.shape, self.hidden, self.dtype, self.num_tokens = (
            buffer,
            shape,
            hidden,
            dtype,
            num_tokens,
        )

    @property
    def form(self):
        """What calls that make them differ in, for comparison, where a process has one rank."""
        return self.shape, self.hidden, self.dtype, self.num_tokens[0]

    def _shapes(self, rows):
        n_scales = self.shape.scale_words
        return {
            "x": ((rows, self.hidden), self.dtype),
            "probs": ((rows if self.shape.has_probs else 0,), FP32),
            "scales": ((rows if n_scales else 0, n_scales), FP32),
        }

    def memory(self, rows):
        """What lends the last rank's."""
        return self.buffer.ranks[-1].arena.memory("hybrid result", self._shapes(rows))

    def lend(self, r, rows):
        """The Loan of a rank's."""
        return r.arena.lend("hybrid result", self._shapes(rows))

    def arrays(self, out):
        """x, probs or None, scales or None, of a Loan."""
        x, probs, scales = arrays_in(out, ("x", "probs", "scales"))
        return (
            x,
            probs if self.shape.has_probs else None,
            scales if self.shape.scale_words else None,
        )


class First:
    """The launches of one dispatch that find out where rows go, and the memory of its handle.

    facts: as for want_pool(). kept: ([Loans of the handle], [Loans of scratch]) of one that was launched before, and
    told that there was no room.
    """

    def __init__(self, buffer, facts, shape, xs, maps, probs, num_tokens, limit, pad, kept=None):
        self._facts, self.buffer, self.shape, self.num_tokens = facts, buffer, shape, num_tokens
        self.limit, self.pad = limit, pad
        place, ranks = buffer.placing.place, list(enumerate(buffer.ranks))
        self._given = [
            dict(
                x=place(r.rank, "x", xs[i]),
                ids=place(r.rank, "routing_map", maps[i]),
                probs=place(r.rank, "probs", probs[i]) if probs else 0,
            )
            for i, r in ranks
        ]
        self.loans, self._scratch = kept or (
            [r.arena.lend("hybrid handle", self._handle_of(i)) for i, r in ranks],
            [r.arena.lend("rows scratch", self._scratch_of(i)) for i, r in ranks],
        )

    def lent(self):
        """For SteadyCalls: the memory of the last rank's loans, and these."""
        r, i = self.buffer.ranks[-1], len(self.buffer.ranks) - 1
        shapes = (
            ("rows scratch", self._scratch_of(i)),
            ("hybrid rows", self._rows_of()),
            ("hybrid handle", self._handle_of(i)),
        )
        return [r.arena.memory(*what) for what in shapes], [
            self._scratch[-1],
            self._expert_rows[-1],
            self.loans[-1],
        ]

    def _scratch_of(self, i):
        n, shape = self.num_tokens[i], self.shape
        return {
            "slot_of": ((n, shape.n_experts), np.int32),
            "encoded": ((n, shape.row_bytes if shape.encode else 0), np.uint8),
        }

    def _rows_of(self):
        return {"expert_row": ((self.capacity, self.shape.n_local_experts), np.int32)}

    def _handle_of(self, i):
        n_ranks, local = self.shape.n_ranks, self.shape.n_local_experts
        return {
            "info": ((info_words(n_ranks),), np.int32),
            "tokens_per_expert": ((local,), np.int64),
            "overflow": ((1,), np.int32),
            "expert_base": ((n_ranks, local), np.int32),
            "expert_rows": ((2, local), np.int32),
            "row_of": ((self.num_tokens[i], n_ranks), np.int32),
        }

    def send(self, told, num_sms):
        """Send, and wait: what it told. told: what one that was launched before has told, without room."""
        if told is None:
            self._launch(dispatch_kernel(self.shape), num_sms)
            told = told_by(self.buffer, self.loans)
            if told[0].has_room:
                return told
        # every rank has seen it, and comes to the same number of tokens here
        self._launch(resend_kernel(self.shape), num_sms)
        return told

    def send_and_expand(self, results, num_sms):
        """Send, and make `limit` rows of experts on each rank, without a wait: their Loans."""
        made = [results.lend(r, self.limit) for r in self.buffer.ranks]
        launches = self.buffer.launches
        shape = launches.expanding(self.shape, self.num_tokens, launches.are_all(num_sms))
        self._launch(
            dispatch_kernel(shape),
            num_sms,
            made,
            window_bytes=windows.bytes_for(shape),
            bits_bytes=expert_bits.bytes_for(shape),
        )
        return made

    def _launch(self, kernel, num_sms, made=None, **of_few):
        """made: Loans of what is expanded as well. of_few: what few tokens need of the pool."""
        buffer, n_ranks, local = self.buffer, self.buffer.world.n_ranks, self.shape.n_local_experts
        row_bytes = self.shape.row_bytes

        def needs(tokens):
            rows = n_ranks * tokens
            return dict(
                staging_bytes=staged_bytes(rows, row_bytes, local), flag_rows=rows, **of_few
            )

        if (
            buffer.knows_all_ranks or buffer.max_tokens
        ):  # else: the first call asks the ranks for their tokens
            buffer.want_pool_for_tokens(self._facts, needs)
        self.capacity = n_ranks * buffer.max_tokens
        staged = StagingArea(buffer, self.capacity, row_bytes, local)
        self._expert_rows, calls = (
            [r.arena.lend("hybrid rows", self._rows_of()) for r in buffer.ranks],
            [],
        )
        for i, (r, loan, rows, n) in enumerate(
            zip(buffer.ranks, self.loans, self._expert_rows, self.num_tokens)
        ):
            loan.expert_row, at, scratch = rows, loan.address, self._scratch[i].address
            values = (
                buffer.values(r)
                | self._given[i]
                | staged.values
                | handle_values(buffer, loan)
                | dict(
                    info=at("info"),
                    tokens_per_expert=at("tokens_per_expert"),
                    overflow=at("overflow"),
                    expert_base=at("expert_base"),
                    slot_of=scratch("slot_of"),
                    encoded=scratch("encoded"),
                    n_rows=NO_LIMIT if self.limit is None else self.limit,
                    pad=self.pad,
                )
            )
            if made is not None:
                values |= staged.sources(buffer, r) | result_values(made[i])
            calls.append((r.rank, values, n, n + (self.limit if made else 0)))
        buffer.launch_all(kernel, calls, num_sms)


def expanded(buffer, results, loans, num_rows, capacity, num_sms):
    """Arrays of each rank, made of what has come into a staging area with room for `capacity` rows.

    loans: of the handle. num_rows: of experts, of each rank.
    """
    shape, handle = (
        results.shape,
        (places_in(loans[-1]) + places_in(loans[-1].expert_row), (num_rows[-1],)),
    )
    made, key = buffer.steady.again(
        "expand", None, None, None, (*results.form, capacity, num_sms), handle
    )
    if made is not None:
        return made
    staged, lent, calls = (
        StagingArea(buffer, capacity, shape.row_bytes, shape.n_local_experts),
        [],
        [],
    )
    with buffer.steady.watching(key) as remember:
        for r, loan, rows, n in zip(buffer.ranks, loans, num_rows, results.num_tokens):
            lent.append(results.lend(r, rows))
            values = (
                buffer.values(r)
                | staged.values
                | staged.sources(buffer, r)
                | handle_values(buffer, loan)
                | result_values(lent[-1])
                | dict(expert_base=loan.address("expert_base"), n_rows=rows)
            )
            calls.append((r.rank, values, n, n + rows))
        buffer.launch_all(expand_kernel(shape), calls, num_sms)
        remember(
            lambda rows: [results.memory(rows)],
            lent[-1:],
            lambda out, _: [results.arrays(out)],
            lambda rows: (rows, buffer.launches.grid(num_sms, n + rows)),
        )
        return [results.arrays(out) for out in lent]


def result_values(loan):
    """The fields of the parameter block for rows of experts."""
    at = loan.address
    return dict(out=at("x"), out_probs=at("probs"), out_scales=at("scales"))


def handle_values(buffer, loan):
    """The fields of the parameter block that a handle fills in."""
    at = loan.address
    return dict(
        row_of=at("row_of"),
        counts=at("info") + counts_offset(buffer.world.n_ranks),
        expert_rows=at("expert_rows"),
        expert_row=loan.expert_row.address("expert_row"),
    )
