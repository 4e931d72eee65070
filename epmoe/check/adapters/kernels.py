"""This project's kernels as an implementation: ExpertParallel over a LocalWorld, in the simulator or on a GPU."""

from epmoe import ExpertParallel, LocalWorld
from epmoe.check.adapters.fused_a2a import host
from epmoe.check.adapters.reference import Reference
from epmoe.check.implementation import OPTIONS, Implementation
from epmoe.check.words import BUFFERS, flat_counters


class Kernels(Implementation):
    """The split kernels, with all ranks in this process. Only the simulator has SHMEM between p2p worlds."""

    token_formats = Reference.token_formats
    combine_dtypes = Reference.combine_dtypes
    options = OPTIONS if LocalWorld.shmem else OPTIONS - {"use_shmem"}
    fused = False
    kernels = None  # ExpertParallel chooses

    def __init__(self, cfg):
        super().__init__(cfg)
        self._ep = ExpertParallel(cfg, self.new_world(range(cfg.n_ranks)), fused=self.fused, kernels=self.kernels)

    def new_world(self, per_rank):
        """A world of as many ranks as the argument has entries."""
        return LocalWorld(len(per_rank))

    def dispatch(self, input_tokens, topk_ids, **options):
        return self._numpy(self._ep.dispatch(input_tokens, topk_ids, **options))

    def _numpy(self, dispatched):
        # combine takes either form; the check reads the NumPy one
        return dispatched.numpy() if self.per_rank else [d.numpy() for d in dispatched]

    def combine(self, expert_outputs, dispatched, router_weights, **options):
        return host(self._ep.combine(expert_outputs, dispatched, router_weights, **options))

    def close(self):
        self._ep.close(collective=self.per_rank)


class FusedKernels(Kernels):
    """The fused kernels."""

    fused = True


class PlainKernels(Kernels):
    """The plain kernels by halves, with their memory. Every word is compared with the model after each half."""

    kernels = "plain"

    def dispatch_async(self, input_tokens, topk_ids, **options):
        self._ep.dispatch_async(input_tokens, topk_ids, **options)

    def dispatch_wait(self):
        return self._numpy(self._ep.dispatch_wait())

    def combine_async(self, expert_outputs, dispatched):
        self._ep.combine_async(expert_outputs, dispatched)

    def combine_wait(self, router_weights, **options):
        return host(self._ep.combine_wait(router_weights, **options))

    def buffers(self):
        return {name: self._of_ranks(lambda rank, name=name: self._ep.region(name, rank)) for name in BUFFERS}

    def counters(self):
        return self._of_ranks(lambda rank: flat_counters(self.cfg, lambda name: self._ep.region(name, rank)))

    def _of_ranks(self, read):
        held = [read(rank) for rank in self._ep.world.ranks]
        return held[0] if self.per_rank else held
