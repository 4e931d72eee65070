"""This project's kernels as an implementation: ExpertParallel over a LocalWorld, in the simulator or on a GPU."""

from epmoe.check.adapters.reference import Reference
from epmoe.check.implementation import OPTIONS, Implementation


class Kernels(Implementation):
    """The split kernels; all ranks in this process. SHMEM needs a world of processes, so use_shmem is not served."""

    token_formats = Reference.token_formats
    combine_dtypes = Reference.combine_dtypes
    options = OPTIONS - {"use_shmem"}
    fused = False

    def __init__(self, cfg):
        from epmoe import ExpertParallel, LocalWorld
        super().__init__(cfg)
        self._ep = ExpertParallel(cfg, LocalWorld(cfg.n_ranks), fused=self.fused)

    def dispatch(self, input_tokens, topk_ids, **options):
        # combine may be given either form; the NumPy one is what the check reads
        return [d.numpy() for d in self._ep.dispatch(input_tokens, topk_ids, **options)]

    def combine(self, expert_outputs, dispatched, router_weights, **options):
        from epmoe.arrays import to_numpy
        return [to_numpy(out) for out in self._ep.combine(expert_outputs, dispatched, router_weights, **options)]

    def close(self):
        self._ep.close(collective=False)


class FusedKernels(Kernels):
    """The fused kernels."""

    fused = True
