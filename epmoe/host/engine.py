"""The part that dispatch and combine of an ExpertParallel share: ranks' memory, compiled calls, launching, errors."""

import numpy as np

from epmoe import device, layout
from epmoe import kernels as fast_kernels
from epmoe.device.forks import is_of_another_process
from epmoe.device.telling import Telling
from epmoe.host import plain_kernels
from epmoe.host.arrays import DeviceArray, to_numpy
from epmoe.host.placing import Placing
from epmoe.host.plans import Plans
from epmoe.host.rank_memory import RankMemory
from epmoe.host.rounds import AFTER, REFUSALS, Rounds
from epmoe.kernels import LaunchConfig, Wanted, lamport, status
from epmoe.kernels.launch import check_limits
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPError, EPStateError, EPValueError, PeerTimeout, UnavailableError

FUSED = ("dispatch_kernel", "combine_kernel")
KERNELS = {"plain": plain_kernels.Factories(), "fast": fast_kernels}
FAST_FROM = (9, 0)  # compute capability


def kernels_named(name, machine):
    """ "plain" or "fast". name: the caller's choice; None: chosen by the machine's compute capability."""
    capability = FAST_FROM if device.SIM else machine.compute_capability
    if name is None:
        return "plain" if device.SIM or capability < FAST_FROM else "fast"
    if not isinstance(name, str) or name not in KERNELS:
        raise EPValueError(f"kernels={name!r} must be 'plain' or 'fast'; leave it out for what suits the machine")
    if name == "fast" and capability < FAST_FROM:
        raise UnavailableError(
            "kernels='fast' needs a GPU of compute capability 9.0 or newer, this one has %d.%d: leave it out, and the "
            "plain kernels run" % capability
        )
    return name


class Plan(dict):
    """The launches of one rank for arrays of forms that have passed the checks: {factory: launch}.

    A launch is prepared when it is first looked up. options: of the factories. types: of the functions' arguments.
    """

    def __init__(self, engine, r, num_tokens, options, types=()):
        self.engine, self.r, self.num_tokens = engine, r, num_tokens
        self._how = options, *types

    def __missing__(self, factory):
        launch = self.engine.prepared(factory, self.r, self.num_tokens, *self._how)
        self[factory] = launch
        return launch


class Engine:
    """The machinery behind an ExpertParallel; `ranks` has a RankMemory for each rank of this process.

    kernels: "plain", "fast" or None. factories: a module of factories to use instead of epmoe.kernels, or None.
    """

    def __init__(self, cfg: EPConfig, world, launch, timeout, kernels, factories, fused):
        self.cfg, self.world, self.machine, self.timeout = cfg, world, world.machine, timeout
        self.lists = world.lists
        self.launch = LaunchConfig() if launch is None else launch
        self.kernels = "fast" if factories else kernels_named(kernels, self.machine)
        check_limits(cfg, self.kernels)
        if self.kernels == "plain" and self.launch.trace:
            raise EPValueError("launch=LaunchConfig(trace=True): only the fast kernels write stamps; kernels='fast'")
        first = world.ranks[0]
        stream = world.stream_of(first)
        self.rounds = Rounds(stream.capture)
        self.placing = Placing(self.machine, world.stream_of)
        self._factories = factories or KERNELS[self.kernels]
        self.calls = {}  # KernelCall by factory and options
        self.plans = Plans()  # Plan or launch by key, which each phase defines
        self.parts = ()  # of the open round: a Part for each rank
        self.captured = []  # loans of captured calls, which stay lent until close()
        self._unseen = None  # the error that leave() found recorded by kernels
        if cfg.use_shmem and not getattr(world, "shmem", False):
            raise EPValueError(
                f"use_shmem=True: {type(world).__name__} does not reach ranks of other p2p worlds here; use a ShmemWorld, "
                "or a LocalWorld in the simulator"
            )
        # fused fast kernels combine by other words of memory than split ones
        world.agree(cfg, timeout, kernels=self.kernels, fused=fused)
        words = layout.named_words(cfg)
        self._memory = world.allocate(layout.total_bytes(cfg), "epmoe", words, timeout)
        if cfg.use_shmem:
            world.connect(self._memory)
        self.ranks = [RankMemory(cfg, self.machine, rank, self._memory) for rank in world.ranks]
        at = next(r.offset for r in layout.regions(cfg) if r.name == "status")
        self._status = np.int32, (layout.STATUS_WORDS,), at
        self.is_alone = not (world.lists or device.SIM)  # launches start without world.launching()
        self.telling = Telling(self.machine, first, stream)
        self._initialise("start", timeout)

    def reset(self):
        """Return everything to its state before the first round; collective."""
        # A slower rank arrives after its own timeout, which may have begun when this rank's ended.
        self._initialise("reset", 2 * self.timeout)
        self.rounds.reset()
        self.parts = ()

    def _initialise(self, occasion, timeout):
        self.machine.synchronize()
        self.world.barrier(occasion, timeout)  # no kernel of any rank runs any more
        for r in self.ranks:
            r.initialise()
        self.world.barrier(occasion, timeout)

    def prepared(self, factory, r, num_tokens, options, *types):
        """Prepare a launch of a kernel for num_tokens of a rank. options: those of the plan; types: see Wanted."""
        fused, world, kind = factory in FUSED, self.world, factory.partition("_")[0]
        regions = r.regions(kind) if kind in ("dispatch", "combine") else {}
        if factory in ("dispatch_wait_kernel", "combine_async_kernel"):
            options = {}
        elif factory == "combine_kernel" and self.kernels == "fast":
            options = options | {"without_signals": True}
            if lamport.applies(self.cfg, True, options["router_weights"]):
                regions = r.regions("combine", "lamport_buf")
        key = (factory, *options.items())
        if key not in self.calls:
            launch = world.share(self.launch) if fused else self.launch
            self.calls[key] = getattr(self._factories, factory)(self.cfg, launch, **options)
        where = self.machine, world.stream_of(r.rank, fused), regions, self.timeout
        return self.calls[key].prepared(Wanted(num_tokens, r.rank, *where, *types))

    def start(self, call, launches, fused=False):
        """Start the launches of one call, [(launch, its words)]; in the simulator they end before this returns."""
        rounds, started = self.rounds, False
        try:
            if self.is_alone:
                for launch, words in launches:
                    launch.start(*words)
            else:
                with self.world.launching(fused):
                    for launch, words in launches:
                        launch.start(*words)
                    started = True
                if device.SIM:
                    self.check()
            rounds.state, rounds.opened_in = AFTER[call], rounds.capture
        except BaseException as error:
            # a refusal may come from inside a kernel, from a function of the caller
            if started or not isinstance(error, REFUSALS):
                rounds.fail(call, error)
            raise

    def forget_calls(self):
        """Between rounds: drop all calls and plans, unless graphs use them. Each round may bring new functions."""
        if self.rounds.captured_now() or self.captured:
            return
        self.machine.synchronize()
        self.plans.clear()
        while self.calls:
            self.calls.popitem()[1].close()

    def trace(self):
        """[Stamps] of the last launch of each kernel on each rank, if launched with LaunchConfig(trace=True)."""
        traces = [c.trace(of[0].removesuffix("_kernel")) for of, c in self.calls.items()]
        return [stamps for trace in traces for stamps in trace]

    def check(self, result=None):
        """Wait for the kernels; raise PeerTimeout if a wait expired, EPValueError if device memory held bad ids.

        result: a small result array, whose values are returned. If it is a DeviceArray, a kernel sends them to the host
        without synchronising the device.
        """
        if self.rounds.state == "closed":
            if self._unseen is not None:
                raise self._unseen
            return to_numpy(result)  # close() has waited and looked
        if self.rounds.captured_now():
            raise EPStateError(
                "results can be looked at when a captured CUDA graph was replayed, not while the stream "
                "is being captured: nothing has run yet"
            )
        timeouts, bad_ids, seen = [], [], []
        try:
            seen, result = self._look(result)
        except PeerTimeout as error:
            timeouts.append(error)
        for r, words in zip(self.ranks, seen):
            if not words.any():
                continue
            recv_count = status.failed_recv_count(words)
            try:
                counts = None if recv_count is None else r.read(recv_count)
                status.raise_if_failed(words, self.cfg, r.rank, self.timeout, recv_count=counts)
                r.clear("status")
                status.raise_if_bad_ids(words, self.cfg, r.rank)
            except PeerTimeout as error:
                timeouts.append(error)
            except EPValueError as error:
                bad_ids.append(error)
        if timeouts:
            error = PeerTimeout("\n".join(map(str, timeouts)))
            self.rounds.fail("a kernel", error)
            raise error
        if bad_ids:
            raise bad_ids[0]
        return result

    def _look(self, result):
        """Wait for the kernels; returns the status words of each rank, and the values of a result."""
        if not isinstance(result, DeviceArray):
            self.machine.synchronize()
            buffers = self._memory.buffers
            return [buffers[r.rank].read(*self._status) for r in self.ranks], result
        arrays = [(r.address("status"), 4 * layout.STATUS_WORDS) for r in self.ranks]
        *told, values = self.telling.tell([*arrays, (result.address, result.nbytes)], self.timeout)
        values = values.view(result.dtype).reshape(result.shape)
        return [words.view(np.int32) for words in told], values

    def leave(self):
        """Free everything if the ExpertParallel was dropped without close(); not collective.

        Results that are still in use raise the error that its kernels recorded. Memory that graphs write to stays.
        """
        if self.rounds.state == "closed" or self.captured or is_of_another_process(self.machine):
            return
        try:
            self.check()
        except EPError as error:
            self._unseen = error
        self.close(collective=False)

    def close(self, collective):
        """Free everything; collective, and raises an error that kernels recorded, unless another error came before."""
        together = False
        try:
            if collective and self.rounds.failure is None:
                try:
                    self.check()
                finally:
                    # with bad ids on this rank, still meet the others
                    if self.rounds.failure is None:
                        self.world.barrier("leaving", self.timeout)
                        together = True
            self.machine.synchronize()
        finally:
            self.rounds.state = "closed"
            self.captured.clear()
            self.parts = ()
            for call in self.calls.values():
                call.close()
            for r in self.ranks:
                r.arena.close()
            self.placing.close()
            self.telling.free()
            if self.cfg.use_shmem:
                self.world.disconnect(self._memory)
            self._memory.free(together, self.timeout)
