"""One rank of an MPIWorld: calls of all kinds in random order, each with exact results, which stay while they are kept.

Which call comes next is the same on all ranks. Where its arrays lie is each rank's own affair: new ones, one that
earlier calls had, or one of two in turn; so are the results that it keeps. Handles serve until they are dropped, also
when the buffers have been made anew.
"""

import random
import sys

import torch
from expected_routes import ExpertsRoute, RowsRoute
from phases import device_of, end, say
from rows_kernels import compile_ahead

from epmoe import MPIWorld
from epmoe.torch import (
    fused_combine,
    fused_dispatch,
    fused_dispatch_on_device,
    get_buffer,
    hybrid_ep_combine,
    hybrid_ep_dispatch,
    init_hybrid_ep_buffer,
)

LOCAL, TOP_K, SEED = 2, 2, 1
SIZES, COMMON = (0, 1, 3, 8, 16, 17, 32, 33, 128, 129, 300), (3, 8, 32)  # tokens of a rank
HANDLES, RESULTS = 5, 12  # that are kept at once, at most
BF16, FP32 = torch.bfloat16, torch.float32


class Calls:
    """The calls of one rank; each method makes one, together with the other ranks."""

    def __init__(self, world, where, hidden, most_tokens):
        self.world, self.where, self.hidden, self.me = world, where, hidden, world.rank
        self.n_experts, self.sizes = LOCAL * world.n_ranks, [n for n in SIZES if n <= most_tokens]
        self.common = [n for n in COMMON if n <= most_tokens]
        self.shared, self.own = random.Random(SEED), random.Random(SEED + 1 + world.rank)
        self.number, self.rows, self.by_expert, self.kept, self.arrays = 0, [], [], [], {}

    def next(self):
        """Make a call, and drop some of what is kept."""
        self.number += 1
        common = self.shared.random() < 0.5
        self.num_tokens = [self.shared.choice(self.common if common else self.sizes) for _ in range(self.world.n_ranks)]
        kinds = [
            self.dispatch,
            self.combine,
            self.train,
            self.dispatch_by_expert,
            self.combine_by_expert,
            self.train_by_expert,
        ]
        self.shared.choice(kinds if self.shared.random() < 0.98 else [self.make_anew])()
        for handles in (self.rows, self.by_expert):
            while len(handles) > HANDLES:
                handles.pop(self.shared.randrange(len(handles)))
        while len(self.kept) > RESULTS or self.kept and self.own.random() < 0.3:
            self.drop(self.own.randrange(len(self.kept)))

    def drawn(self, what, shapes, dtype=BF16):
        """Small whole numbers of each rank."""
        return [
            torch.randint(-3, 4, shape, generator=self._generator(what, rank), device=self.where).to(dtype)
            for rank, shape in enumerate(shapes)
        ]

    def _generator(self, what, rank):
        return torch.Generator(self.where).manual_seed((self.number * 17 + what) * 31 + rank)

    def _uniform(self, what, columns):
        return [
            torch.rand((n, columns), generator=self._generator(what, rank), device=self.where)
            for rank, n in enumerate(self.num_tokens)
        ]

    def route(self):
        """A RowsRoute, some of whose slots hold -1."""
        ids = [u.topk(TOP_K).indices for u in self._uniform(0, self.n_experts)]
        return RowsRoute([torch.where(u < 0.2, -1, i) for u, i in zip(self._uniform(1, TOP_K), ids)], LOCAL, self.me)

    def placed(self, tensor, name):
        """The tensor as it is given: new, in the array of this shape that earlier calls had, or in one of two."""
        place = self.own.randrange(4)
        if place == 0:
            return tensor
        array = self.arrays.setdefault((name, place, tensor.shape), torch.empty_like(tensor))
        return array.copy_(tensor)

    def keep(self, *results):
        self.kept += [(self.number, r, r.detach().clone()) for r in results if self.own.random() < 0.4]

    def drop(self, index):
        number, result, copy = self.kept.pop(index)
        assert torch.equal(result, copy), f"rank {self.me}, call {self.number}: a result of call {number} has changed"

    def equal(self, got, wanted, what):
        assert got.shape == wanted.shape and torch.equal(got.float(), wanted.float()), (
            f"rank {self.me}, call {self.number} of {self.num_tokens} tokens: {what}"
        )

    def _tokens(self, columns):
        """x and probs of all ranks, x [T, H], probs [T, columns]."""
        return (
            self.drawn(2, [(n, self.hidden) for n in self.num_tokens]),
            self.drawn(3, [(n, columns) for n in self.num_tokens], FP32),
        )

    def _dispatched(self, function, route, x, probs):
        return function(x, self.placed(route.ids[self.me], "ids"), probs, self.n_experts, self.world)

    def dispatch(self):
        function = self.shared.choice((fused_dispatch, fused_dispatch_on_device))
        if function is fused_dispatch_on_device:
            self._alike()
        route, (xs, probs) = self.route(), self._tokens(TOP_K)
        rows, local_ids, row_probs, per_expert, handle = self._dispatched(
            function, route, self.placed(xs[self.me], "x"), self.placed(probs[self.me], "probs")
        )
        n, ids = route.num_rows[self.me], route.local_ids()
        self.equal(rows[:n], route.received(xs), "rows")
        self.equal(local_ids[:n], ids, "local ids")
        self.equal(row_probs[:n], torch.where(ids >= 0, route.received(probs), 0), "probs")
        self.equal(per_expert.cpu(), ids[ids >= 0].bincount(minlength=LOCAL).cpu(), "tokens_per_expert")
        if len(rows) == n:
            self.keep(rows, row_probs)
        self.rows.append((route, handle, len(rows)))

    def combine(self):
        if not self.rows:
            return
        route, handle, n_rows = self.shared.choice(self.rows)
        self._combined(lambda rows: fused_combine(rows, self.world, handle)[0], route, route.ids, n_rows)

    def _combined(self, combine, route, of_tokens, n_rows):
        """Sums of rows, and their gradients. of_tokens: as long as the batches; n_rows: rows that are given, NaN last."""
        rows, n = self.drawn(2, [(n, self.hidden) for n in route.num_rows]), route.num_rows[self.me]
        room = torch.full((n_rows - n, self.hidden), float("nan"), dtype=BF16, device=self.where)
        given = self.placed(torch.cat([rows[self.me], room]), "rows").detach().requires_grad_()
        out = combine(given)
        self.equal(out, route.returned(rows), "combine")
        gradients = self.drawn(3, [(len(one), self.hidden) for one in of_tokens])
        out.backward(gradients[self.me])
        self.equal(given.grad[:n], route.received(gradients), "gradient of combine")
        self.keep(out.detach(), given.grad[:n])

    def train(self):
        route, (xs, probs) = self.route(), self._tokens(TOP_K)
        x, p = (self.placed(one[self.me], "x").detach().requires_grad_() for one in (xs, probs))
        rows, _, row_probs, _, handle = self._dispatched(fused_dispatch, route, x, p)
        out, _ = fused_combine(rows * 1, self.world, handle)
        self._trained(out, row_probs, x, p, route, torch.where(route.ids[self.me] >= 0, probs[self.me], 0))

    def _trained(self, out, row_probs, x, probs, route, routed_probs):
        """What comes back of x, and the gradients of x and of probs, whose rows get themselves for a gradient."""
        self.equal(out, x.detach().float() * route.times(), "combine of dispatch")
        gradient = self.drawn(4, [(n, self.hidden) for n in self.num_tokens])[self.me]
        torch.autograd.backward([out, row_probs], [gradient, row_probs.detach()])
        self.equal(x.grad, gradient.float() * route.times(), "gradient of x")
        self.equal(probs.grad, routed_probs, "gradient of probs")
        self.keep(out.detach(), x.grad, probs.grad)

    def _alike(self):
        """As many tokens on every rank: without a look at the device, a batch larger than any before has to be so."""
        self.num_tokens = [max(1, *self.num_tokens)] * len(self.num_tokens)

    def _experts_route(self, has_budget):
        if has_budget:
            self._alike()
        return ExpertsRoute(
            [u < 0.4 for u in self._uniform(0, self.n_experts)],
            LOCAL,
            self.me,
            self.shared.randrange(9) if has_budget else None,
        )

    def dispatch_by_expert(self):
        route = self._experts_route(self.shared.random() < 0.5)
        xs, probs = self._tokens(self.n_experts)
        rows, row_probs, _, per_expert, handle = hybrid_ep_dispatch(
            self.placed(xs[self.me], "x"),
            self.placed(route.maps[self.me], "map"),
            self.placed(probs[self.me], "dense"),
            self.world,
            LOCAL,
            num_permuted_tokens=route.budget,
        )
        self.equal(rows, route.received(xs), "rows by expert")
        self.equal(row_probs, route.received_probs(probs), "probs by expert")
        self.equal(per_expert.cpu(), route.per_expert(), "tokens_per_expert")
        assert handle[-1].tolist() == [0]
        self.keep(rows, row_probs)
        self.by_expert.append((route, handle))

    def combine_by_expert(self):
        if not self.by_expert:
            return
        route, handle = self.shared.choice(self.by_expert)
        self._combined(lambda rows: hybrid_ep_combine(rows, handle), route, route.maps, route.num_rows[self.me])

    def train_by_expert(self):
        route = self._experts_route(has_budget=False)
        xs, probs = self._tokens(self.n_experts)
        x, p = (self.placed(one[self.me], "x").detach().requires_grad_() for one in (xs, probs))
        rows, row_probs, _, _, handle = hybrid_ep_dispatch(
            x, self.placed(route.maps[self.me], "map"), p, self.world, LOCAL
        )
        out = hybrid_ep_combine(rows * 1, handle)
        self._trained(out, row_probs, x, p, route, torch.where(route.maps[self.me], probs[self.me], 0))

    def make_anew(self):
        """One of the buffers; what lies in the old one's pool ends with it."""
        while self.kept:
            self.drop(0)
        if self.shared.random() < 0.5:
            get_buffer(self.world, 0).close()
        else:
            init_hybrid_ep_buffer(self.world, self.hidden, self.shared.choice(self.sizes[1:]), LOCAL, 24, 24, False)


def main(n_calls, most_tokens, hidden):
    world = MPIWorld()
    where = device_of(lambda: world.machine.ordinal)
    compile_ahead(world, hidden, LOCAL, TOP_K, most_tokens)
    say(world.rank, "compiled")
    init_hybrid_ep_buffer(world, hidden, most_tokens, LOCAL, 24, 24, False)
    calls = Calls(world, where, hidden, most_tokens)
    for _ in range(n_calls):
        calls.next()
    while calls.kept:
        calls.drop(0)
    say(world.rank, f"{n_calls} calls")
    end(world)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
