"""One rank of an MPIWorld: many training steps take no more memory than the first ones and give the same bits.

On GPUs each rank then captures a step that never waits for the host in a CUDA graph, and all replay it with new data.
"""

import gc
import sys

import torch
from mpi4py import MPI
from phases import device_of, end, expert_output, say
from rows_kernels import compile_ahead

from epmoe import MPIWorld, device
from epmoe.fused_a2a.buffers import hybrid_ep_buffer
from epmoe.torch import (
    fused_combine,
    fused_dispatch,
    fused_dispatch_on_device,
    get_buffer,
    hybrid_ep_combine,
    hybrid_ep_dispatch,
    init_hybrid_ep_buffer,
)

BF16, BATCHES = torch.bfloat16, 5
# bytes: tensors of the last steps end at different moments
TORCH_ROOM = 64 << 20
# of one rank that were ever in use at once
RESULTS_MORE = 16
# bytes that Python and torch may take meanwhile
HOST_ROOM = 32 << 20


class Batch:
    """Tokens of one rank and where they go; draw() puts new ones into the same tensors."""

    def __init__(self, world, where, seed, tokens, hidden, local, top_k):
        self.n_experts, self.top_k = local * world.n_ranks, top_k
        self.rng = torch.Generator(where).manual_seed(seed * world.n_ranks + world.rank)
        self.x, self.gradient = (torch.empty(tokens, hidden, dtype=BF16, device=where) for _ in range(2))
        self.ids = torch.empty(tokens, top_k, dtype=torch.int64, device=where)
        self.goes = torch.empty(tokens, self.n_experts, dtype=torch.bool, device=where)
        self.probs, self.dense = (torch.empty(tokens, n, device=where) for n in (top_k, self.n_experts))
        self.draw()
        for one in (self.x, self.probs, self.dense):
            one.requires_grad_()

    @torch.no_grad()
    def draw(self):
        self.x.normal_(generator=self.rng)
        self.gradient.normal_(generator=self.rng)
        self.probs.uniform_(generator=self.rng)
        ids = self.dense.uniform_(generator=self.rng).topk(self.top_k).indices
        self.goes.zero_().scatter_(1, ids, True)
        self.ids.copy_(torch.where(ids == 1, -1, ids))


def step(world, batch, waits):
    """Both families, forward and backward: results that hold one row for each token. waits: the host, for counts."""
    n, local = batch.n_experts, batch.n_experts // world.n_ranks
    dispatch = fused_dispatch if waits else fused_dispatch_on_device
    rows, _, row_probs, _, handle = dispatch(batch.x * 1, batch.ids, batch.probs * 1, n, world)
    out, _ = fused_combine(expert_output(rows, row_probs.sum(1)), world, handle)
    budget = None if waits else batch.top_k * len(batch.x)
    rows, row_probs, _, _, handle = hybrid_ep_dispatch(
        out, batch.goes, batch.dense * 1, world, local, num_permuted_tokens=budget, pad_multiple=4
    )
    both = hybrid_ep_combine(expert_output(rows, row_probs), handle)
    return (out, both, *torch.autograd.grad(both, (batch.x, batch.probs, batch.dense), batch.gradient))


def used(world):
    """Bytes: of epmoe on the device, those of them in use, of torch on the device, of the process on the host."""
    if not device.SIM:
        torch.cuda.synchronize()
    gc.collect()
    buffers = get_buffer(world, 0), hybrid_ep_buffer(world)
    on_device, lent = sum(b.allocated_bytes for b in buffers), sum(b.ranks[0].arena.lent_bytes for b in buffers)
    of_torch = 0 if device.SIM else torch.cuda.memory_allocated()
    with open("/proc/self/statm") as statm:
        return on_device, lent, of_torch, int(statm.read().split()[1]) * 4096


def many_steps(world, batches, steps):
    """After all steps no more device memory is in use than after two fifths of them, and results are the same.

    Returns the bytes that the host has more. epmoe's memory may be some results larger, since how many there are at
    once depends on threads; one left behind a step would be hundreds, and in use.
    """
    seen, a_fifth = [], max(1, steps // 5 // len(batches)) * len(batches)
    kept = [[[t.clone() for t in step(world, batch, waits)] for waits in (True, False)] for batch in batches]
    for number in range(steps):
        index = number % len(batches)
        for waits, wanted in zip((True, False), kept[index]):
            made = step(world, batches[index], waits)
            if number % 50 == 0 or number + 1 == steps:
                assert all(map(torch.equal, made, wanted)), f"step {number}"
        del made
        if (number + 1) % a_fifth == 0:
            seen.append(used(world))
    before, after = seen[min(1, len(seen) - 1)], used(world)
    say(world.rank, f"{steps} steps; bytes of epmoe, in use, of torch, of the host after each fifth: {seen}")
    more = [now - then for now, then in zip(after, before)]
    print(
        f"rank {world.rank}: {steps} steps, bytes more: epmoe {more[0]}, of them in use {more[1]}, torch {more[2]}, "
        f"host {more[3]}",
        flush=True,
    )
    tokens, hidden = batches[0].x.shape
    room = RESULTS_MORE * (tokens * (2 * hidden + 4 * batches[0].n_experts) + 8192)
    assert more[0] <= room and more[1] <= 0 and more[2] <= TORCH_ROOM, (seen, after, room)
    return more[3]


def replays(world, batch, stream):
    """A graph of a step gives what the step gives, and overwrites nothing that other steps have given."""
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(world, batch, waits=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step(world, batch, waits=False)
    earlier = copies = ()
    for _ in range(5):
        batch.draw()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        replayed = [t.clone() for t in captured]
        with torch.cuda.stream(stream):
            wanted = step(world, batch, waits=False)
        torch.cuda.synchronize()
        assert all(map(torch.equal, replayed, wanted))
        assert all(map(torch.equal, earlier, copies))
        earlier, copies = wanted, [t.clone() for t in wanted]


def main(steps, tokens, hidden, local, top_k):
    where = device_of(lambda: MPI.COMM_WORLD.Get_rank() % torch.cuda.device_count())
    stream = None if device.SIM else torch.cuda.Stream()
    world = MPIWorld(stream=stream)
    compile_ahead(world, hidden, local, top_k, tokens)
    say(world.rank, "compiled")
    init_hybrid_ep_buffer(world, hidden, tokens, local, 24, 24, False)
    batches = [Batch(world, where, seed, tokens, hidden, local, top_k) for seed in range(BATCHES)]
    grown = many_steps(world, batches, steps)
    if stream is not None:
        replays(world, batches[0], stream)
        say(world.rank, "graphs")
    assert grown <= HOST_ROOM, f"{grown} bytes more on the host after {steps} steps"
    end(world)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
