"""One rank that runs a round of both kinds on its GPU and prints which kernels it had to compile."""

from rank_arrays import Batch, config, doubled

from epmoe import ExpertParallel, MPIWorld
from epmoe.device import gpu_kernel

compiled = []
cubin = gpu_kernel.Kernel.cubin


def counted(kernel, cc):
    compiled.append(kernel.name)
    return cubin(kernel, cc)


gpu_kernel.Kernel.cubin = counted
world = MPIWorld()
cfg, rank = config(world.n_ranks), world.rank
batch = Batch(cfg, 0)
for fused in (True, False):
    with ExpertParallel(cfg, world, fused=fused) as ep:
        d = ep.dispatch(batch.x[rank], batch.ids[rank])
        ep.combine(doubled(d.trimmed().numpy().output_tokens), d, batch.weights[rank])
print(f"rank {rank} compiled <{','.join(compiled)}>\n", end="", flush=True)
