"""One rank of an MPIWorld: a block trained over the ranks, and in one place."""

import sys

import torch
from moe_block import TOP_K, batches_of, layers_of, parallel, together, train
from phases import device_of, end, say
from rows_kernels import compile_ahead

from epmoe import MPIWorld

LOCAL = 2
LR = 0.096  # by tokens and elements, over which the loss is a sum


def training(world, where, steps, kinds, num_tokens, hidden, width):
    """The block over the ranks, and in one place: this rank's losses and parameters, to the bit."""
    n_experts, me = LOCAL * world.n_ranks, world.rank
    own = slice(me * LOCAL, (me + 1) * LOCAL)

    def new_layers():
        return layers_of(kinds, hidden, width, n_experts, where)

    def gather(of_rank):
        everyone = world.tell(of_rank.router.grad.cpu().numpy(), 60.0)
        of_rank.router.grad = sum(torch.from_numpy(one) for one in everyone).to(where)

    layers = new_layers()
    for one in layers:
        one.up, one.down = (p[own].detach().clone().requires_grad_() for p in (one.up, one.down))
    batches, lr = batches_of(steps, num_tokens, hidden, where), LR / (num_tokens[0] * hidden)
    losses = train(layers, parallel(world), [(x[me : me + 1], t[me : me + 1]) for x, t in batches], lr, gather)
    same = new_layers()
    same_losses = train(same, together(world.n_ranks), batches, lr)
    of_all = torch.tensor([sum(one) for one in zip(*world.tell(losses, 60.0))], dtype=torch.float64)
    assert torch.allclose(of_all, torch.tensor(same_losses, dtype=torch.float64), rtol=1e-6, atol=0)
    for one, other in zip(layers, same):
        assert torch.equal(one.router, other.router)
        assert torch.equal(one.up, other.up[own]) and torch.equal(one.down, other.down[own])
    assert same_losses[-1] < same_losses[0]


def main(steps, tokens, hidden, width):
    world = MPIWorld()
    where = device_of(lambda: world.machine.ordinal)
    compile_ahead(world, hidden, LOCAL, TOP_K, tokens)
    say(world.rank, "compiled")
    training(world, where, steps, ("rows", "hybrid"), (tokens, tokens - 1), hidden, width)
    say(world.rank, f"{steps} steps of training")
    end(world)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
