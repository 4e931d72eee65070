"""A block of two MoE layers: by expert parallelism over a world, and by the same steps in one place without a world.

Activations are bfloat16, parameters and their updates float32. `together` gathers rows by indexing and sums in the
order and with the rounding points of fused_a2a, so that with two ranks and two experts a rank, where every sum has at
most two summands, all losses and parameters must be equal to the bit.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from epmoe.torch import fused_combine, fused_dispatch, hybrid_ep_combine, hybrid_ep_dispatch

BF16, TOP_K = torch.bfloat16, 2


@dataclass
class Layer:
    """Parameters: router [H, E], up [E, H, W], down [E, W, H] float32; kind "rows" or "hybrid"."""

    router: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    kind: str

    @property
    def parameters(self):
        return [self.router, self.up, self.down]


def layers_of(kinds, hidden, width, n_experts, device):
    """New layers, alike on all ranks."""
    draw = torch.Generator().manual_seed(0)

    def parameter(*shape):
        return (torch.randn(shape, generator=draw) * shape[-2] ** -0.5).to(device).requires_grad_()

    return [
        Layer(
            parameter(hidden, n_experts), parameter(n_experts, hidden, width), parameter(n_experts, width, hidden), kind
        )
        for kind in kinds
    ]


def routed(layer, x):
    """probs float32 [T, K] and ids [T, K] of the experts that a token goes to."""
    return (x.float() @ layer.router).softmax(-1).topk(TOP_K)


def dense_routing(ids, probs, n_experts):
    """routing_map bool [T, E], probs float32 [T, E]."""
    chosen = F.one_hot(ids, n_experts)
    return chosen.sum(1).bool(), (chosen * probs.unsqueeze(2)).sum(1)


def expert(rows, up, down, weights):
    """One expert on rows [n, H], weighted by [n]."""
    return (F.silu(rows @ up.to(BF16)) @ down.to(BF16) * weights.unsqueeze(1)).to(BF16)


def of_slots(rows, local_ids, probs, up, down):
    """Sum of a rank's experts for each row [N, H]; local_ids [N, K] with -1, probs [N, K]."""
    out = torch.zeros_like(rows)
    for e in range(len(up)):
        token, slot = (local_ids == e).nonzero(as_tuple=True)
        out = out.index_add(0, token, expert(rows[token], up[e], down[e], probs[token, slot]))
    return out


def of_groups(rows, per_expert, probs, up, down):
    """A rank's experts on rows [P, H] that are grouped by expert; probs [P]."""
    parts = zip(rows.split(per_expert.tolist()), probs.split(per_expert.tolist()), up, down)
    return torch.cat([expert(r, u, d, p) for r, p, u, d in parts])


def parallel(world):
    """The block's layer over a world; its parameters' experts are those of the world's ranks here."""

    def own(of_ranks):
        return of_ranks if world.lists else of_ranks[0]

    def ranks(result):
        return result if world.lists else [result]

    def forward(layer, xs):
        n_experts = layer.router.shape[1]
        local = n_experts // world.n_ranks
        ups, downs = layer.up.split(local), layer.down.split(local)
        probs, ids = zip(*(routed(layer, x) for x in xs))
        if layer.kind == "rows":
            rows, local_ids, row_probs, _, handle = fused_dispatch(own(xs), own(ids), own(probs), n_experts, world)
            each = zip(ranks(rows), ranks(local_ids), ranks(row_probs), ups, downs)
            out, _ = fused_combine(own([of_slots(*one) for one in each]), world, handle)
        else:
            maps, dense = zip(*(dense_routing(i, p, n_experts) for i, p in zip(ids, probs)))
            rows, row_probs, _, counts, handle = hybrid_ep_dispatch(own(xs), own(maps), own(dense), world, local)
            each = zip(ranks(rows), ranks(counts), ranks(row_probs), ups, downs)
            out = hybrid_ep_combine(own([of_groups(*one) for one in each]), handle)
        return [x + y for x, y in zip(xs, ranks(out))]

    return forward


def together(n_ranks):
    """The same layer on the tokens of all ranks, without a world: rows are found by indexing."""

    def forward(layer, xs):
        n_experts = layer.router.shape[1]
        local = n_experts // n_ranks
        probs, ids = (torch.cat(one) for one in zip(*(routed(layer, x) for x in xs)))
        sent = torch.cat([x.clone() for x in xs])
        out = torch.zeros_like(sent, dtype=torch.float32)
        for up, down, first in zip(layer.up.split(local), layer.down.split(local), range(0, n_experts, local)):
            if layer.kind == "rows":
                here = (ids >= first) & (ids < first + local)
                token = here.any(1).nonzero()[:, 0]
                local_ids = torch.where(here, ids - first, -1)[token]
                row_probs = torch.where(here, probs, 0)[token]
                out = out.index_add(0, token, of_slots(sent[token], local_ids, row_probs, up, down).float())
                continue
            maps, dense = (one[:, first : first + local].T for one in dense_routing(ids, probs, n_experts))
            of_expert, token = maps.nonzero(as_tuple=True)
            rows = sent.clone().float()[token].to(BF16)
            made = of_groups(rows, maps.sum(1), dense[of_expert, token], up, down)
            of_rank = torch.zeros_like(out).index_add(0, token, made.float())
            out = out + of_rank.to(BF16)
        return [x + y for x, y in zip(xs, out.to(BF16).split([len(x) for x in xs]))]

    return forward


def densely(layer, xs):
    """Every expert on every token, weighted by 0 where the token does not go there."""
    outs = []
    for x in xs:
        probs, ids = routed(layer, x)
        weights = dense_routing(ids, probs, layer.router.shape[1])[1]
        made = [expert(x, *of_expert) for of_expert in zip(layer.up, layer.down, weights.T)]
        outs.append(x + torch.stack(made).float().sum(0).to(BF16))
    return outs


def train(layers, forward, batches, lr, gather=lambda layer: None):
    """Gradient descent over batches (xs, targets), lists over ranks; the loss of each step.

    gather(layer) sums the gradients of parameters that several processes have.
    """
    losses = []
    for xs, targets in batches:
        for layer in layers:
            xs = forward(layer, xs)
        loss = sum(((x.float() - t) ** 2).sum() for x, t in zip(xs, targets))
        loss.backward()
        losses.append(loss.item())
        for layer in layers:
            gather(layer)
            with torch.no_grad():
                for parameter in layer.parameters:
                    parameter -= lr * parameter.grad
                    parameter.grad = None
    return losses


def batches_of(steps, num_tokens, hidden, device):
    """The same few tokens [T, H] of each rank and their targets, again and again."""
    draw = torch.Generator().manual_seed(1)
    xs = [torch.randn(n, hidden, generator=draw).to(device, BF16) for n in num_tokens]
    targets = [torch.randn(n, hidden, generator=draw).to(device) for n in num_tokens]
    return [(xs, targets)] * steps
