"""The rounds of a soak. All work of a round is queued on the ranks' streams. The host reads findings on request."""

from functools import lru_cache

from epmoe import device
from epmoe.expert_parallel import ExpertParallel
from epmoe.host.dispatched import ARRAYS, Dispatched
from epmoe.soak import dispatch_checks, encoding, fill, hashing, sums
from epmoe.soak.arrays import RankArrays, is_encoded
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

SIMULATOR_BLOCKS, SIMULATOR_THREADS = 2, 64


class Soak:
    """Rounds over one configuration and one world. A context manager.

    fused: fused kernels. seed: of all data. poison: results are NaN before each round. options: of ExpertParallel.
    """

    def __init__(self, cfg: EPConfig, world, *, fused=True, seed=0, poison=False, timeout=30.0, **options):
        if cfg.skip_a2a or cfg.fused_shared_expert or cfg.combine_dtype != "bf16":
            raise EPValueError(
                "a soak checks the exchange between ranks, with bf16 in combine: "
                "leave skip_a2a, fused_shared_expert and combine_dtype at their defaults"
            )
        self.cfg, self.world, self.machine = cfg, world, world.machine
        self.ep = ExpertParallel(cfg, world, fused=fused, timeout=timeout, **options)
        self.ranks = [RankArrays(cfg, self.machine, rank) for rank in world.ranks]
        # a round needs them four times
        self.tokens = lru_cache(len(self.ranks))(hashing.make(cfg, seed, hashing.plain).tokens)
        self._out = self._given([Dispatched(**r.named(ARRAYS), num_tokens=0) for r in self.ranks])
        self.kernels = {
            # whole arrays of encoded rows are compared, so unwritten bytes must be equal
            "fill": fill.fill_kernel(cfg, seed, poison or is_encoded(cfg)),
            "count": dispatch_checks.count_kernel(cfg, seed),
            "segments": dispatch_checks.segments_kernel(cfg),
            "rows": dispatch_checks.rows_kernel(cfg, seed),
            "sums": sums.sums_kernel(cfg, seed),
        }
        self._encoding = encoding.kernels(cfg) if is_encoded(cfg) else {}
        self.kernels |= self._encoding
        if not device.SIM:
            for kernel in self.kernels.values():  # now, not while peers wait for this rank
                self.machine.prepare(kernel)

    def round(self, number):
        """One round: fill, dispatch, check, experts, combine, check. On a GPU it returns before the kernels end."""
        self.fill(number)
        d = self.dispatch(number)
        self.check_dispatch(number)
        self.combine(number, d)
        self.check_combine(number)

    def fill(self, number):
        """Write the data that every rank sends, and count what every rank must receive."""
        self._launch("fill", number)
        self._launch("count", number)
        if device.SIM:
            self.machine.synchronize()  # ExpertParallel reads host arrays when it is called

    def dispatch(self, number):
        """Dispatch of the round: a Dispatched, or a list of them."""
        return self.ep.dispatch(self._each("x", number), self._each("ids", number), out=self._out)

    def check_dispatch(self, number):
        """Compare everything that dispatch returned, and make the experts' outputs."""
        self._launch("segments", number, blocks=1, threads=dispatch_checks.WARP)
        self._launch("rows", number)
        for name in self._encoding:
            self._launch(name, number)
        if device.SIM:
            self.machine.synchronize()

    def combine(self, number, d):
        return self.ep.combine(self._each("y"), d, self._each("weights", number), out=self._each("combined", number))

    def check_combine(self, number):
        """Compare every byte that combine returned."""
        self._launch("sums", number)

    def found(self):
        """The findings of each rank of this process. Waits for the kernels, and may raise PeerTimeout."""
        self.ep.check()
        return [r.found() for r in self.ranks]

    def close(self, *, collective=True):
        self.ep.close(collective=collective)
        for r in self.ranks:
            r.free()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close(collective=kind is None)

    def _launch(self, name, number, blocks=None, threads=None):
        blocks = blocks or (SIMULATOR_BLOCKS if device.SIM else self.machine.n_sms)
        threads = threads or (SIMULATOR_THREADS if device.SIM else self.kernels[name].max_threads)
        for r in self.ranks:
            params, stream = (r.parameters.address, number, r.rank), self.world.stream_of(r.rank)
            self.machine.launch(self.kernels[name], blocks, threads, params, stream=stream)

    def _each(self, name, number=None):
        """An array of every rank of this process, cut to the round's tokens, as ExpertParallel takes them."""
        return self._given(
            [r.array(name) if number is None else r.first(name, self.tokens(number, r.rank)) for r in self.ranks]
        )

    def _given(self, of_ranks):
        """Values of this process's ranks, in the form that ExpertParallel takes."""
        return of_ranks if self.world.lists else of_ranks[0]
