"""The plain kernels with one rank that never sends, to show what its peers do."""

from epmoe.host.plain_kernels import Factories


class all_but(Factories):
    """Factories whose dispatch_async_kernel does nothing on one rank."""

    def __init__(self, silent_rank):
        super().__init__()
        self._silent_rank = silent_rank

    def dispatch_async_kernel(self, cfg, launch=None, **options):
        """The kernel, launched on the other ranks."""
        call = super().dispatch_async_kernel(cfg, launch, **options)
        prepared = call.prepared

        def of_rank(wanted):
            launch = prepared(wanted)
            if wanted.my_rank == self._silent_rank:
                launch.start = lambda *words: None
            return launch

        call.prepared = of_rank
        return call
