"""One rank of an MPIWorld: Megatron's calls with exact results, then a block trained over the ranks."""

import sys

import torch
from megatron_managers import DeepepManager, HybridEPManager, LaterHybridEPManager, layer
from moe_block import batches_of, layers_of, parallel, together, train
from phases import device_of, end, say
from rows_kernels import compile_ahead

from epmoe import MPIWorld

LOCAL, TOP_K = 2, 2
LR = 0.096  # by tokens and elements, over which the loss is a sum
BF16 = torch.bfloat16


def experts_of(rank, counts_on="cpu"):
    """Expert e multiplies its rows by e + 1. counts_on: the kind of device that tokens_per_expert is on."""

    def experts(rows, tokens_per_expert, probs):
        assert (tokens_per_expert.dtype, tokens_per_expert.device.type) == (torch.int64, counts_on)
        tokens_per_expert = tokens_per_expert.cpu()
        assert (probs.dtype, probs.device, rows.dtype) == (torch.float32, rows.device, BF16)
        factors = torch.arange(1, LOCAL + 1) + LOCAL * rank
        factors = torch.repeat_interleave(factors, tokens_per_expert)
        factors = torch.nn.functional.pad(factors, (0, len(rows) - len(factors))).to(rows.device)
        return (rows * (factors * probs).unsqueeze(1)).to(rows.dtype)

    return experts


def routing(n_tokens, n_experts, where, shift, each):
    """routing_map [T, E] with `each` experts a token, evenly, and probs that are powers of two."""
    token, k = torch.meshgrid(torch.arange(n_tokens), torch.arange(each), indexing="ij")
    routing_map = torch.zeros(n_tokens, n_experts, dtype=torch.bool, device=where)
    routing_map[token, (token + k + shift) % n_experts] = True
    probs = 2.0 ** -(1 + torch.arange(n_tokens * n_experts, device=where).reshape(n_tokens, n_experts) % 2)
    return routing_map, probs * routing_map


def megatron_calls(group, rank, manager, where, hidden, *, through=layer, shared=False):
    """One layer and its gradients: whole numbers and powers of two, so that every sum is exact."""
    n_experts, shape = LOCAL * group.size(), (n_experts_tokens(group), 1, hidden)
    draw = torch.Generator().manual_seed(rank)
    x, grad = (torch.randint(-3, 4, shape, generator=draw).to(where, BF16) for _ in range(2))
    routing_map, probs = routing(shape[0], n_experts, where, rank, TOP_K)
    x.requires_grad_(), probs.requires_grad_()
    more = torch.ones(shape[0], hidden, dtype=BF16, device=where) if shared else None
    counts_on = "cpu" if getattr(manager, "budget", None) is None else where.type
    out = through(manager, x * 1, routing_map, probs, experts_of(rank, counts_on), more)
    assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
    out.backward(grad)
    factors = torch.arange(1, n_experts + 1, device=where) * routing_map
    weight = (factors * probs).sum(1).detach()[:, None, None]
    assert torch.equal(out.float(), x.float() * weight + shared)
    assert torch.equal(x.grad.float(), grad.float() * weight)
    assert torch.equal(probs.grad, factors * (x.float() * grad.float()).sum((1, 2))[:, None])


def n_experts_tokens(group):
    """Tokens of a rank: two rounds of the experts, so that every expert gets as many."""
    return 2 * LOCAL * group.size()


def all_megatron_calls(group, rank, where, hidden):
    """Both managers, as they are configured without and with a capacity. group: a world, or a process group."""
    n_experts = LOCAL * group.size()
    for capacity_factor in (None, 1.0):
        manager = DeepepManager(group, LOCAL, TOP_K, n_experts, capacity_factor=capacity_factor)
        megatron_calls(group, rank, manager, where, hidden, shared=True)
    for options in ({}, dict(pad_multiple=None, capacity=4)):
        manager = HybridEPManager(group, LOCAL, n_experts, **options)
        for _ in range(2):
            megatron_calls(group, rank, manager, where, hidden)
    for budget in (None, TOP_K * n_experts_tokens(group)):
        manager = LaterHybridEPManager(group, LOCAL, n_experts, budget)
        megatron_calls(group, rank, manager, where, hidden)
        assert manager.over_budget.tolist() == [False]


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
    compile_ahead(world, hidden, LOCAL, TOP_K, max(tokens, n_experts_tokens(world)))
    say(world.rank, "compiled")
    all_megatron_calls(world, world.rank, where, hidden)
    say(world.rank, "Megatron's calls")
    training(world, where, steps, ("rows", "hybrid"), (tokens, tokens - 1), hidden, width)
    say(world.rank, f"{steps} steps of training")
    end(world)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
