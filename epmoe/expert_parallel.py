"""ExpertParallel: dispatch and combine for the ranks of this process."""

import weakref

from epmoe.host import inputs, rank_memory
from epmoe.host.combine_phase import CombinePhase
from epmoe.host.dispatch_phase import DispatchPhase
from epmoe.host.engine import Engine
from epmoe.host.rounds import part_of_round
from epmoe.host.silu_phase import fused_silu
from epmoe.worlds.time_limit import seconds
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPStateError, EPValueError


class ExpertParallel:
    """Dispatch and combine over one configuration and one world; a context manager.

    cfg: EPConfig with cfg.n_ranks == world.n_ranks.
    launch: LaunchConfig; default: the device's own.
    timeout [s]: how long a wait may take before it raises PeerTimeout; positive.
    fused: True: dispatch() and combine() launch one fused kernel each. False: two split kernels each. The same on all
    ranks.
    kernels: "plain" follows the specification's pages word by word; "fast" gives the same results.
    Default: "fast" on GPUs of compute capability 9.0 and newer, "plain" on others and in the simulator.
    Under a LocalWorld every argument and result that differs between ranks is a list over ranks.
    Arrays in host memory may have any strides. Arrays in GPU memory are never copied. They must be C-contiguous, with
    an address and a row size that are multiples of 16 bytes; others are refused, and the error names the remedy.

        with ExpertParallel(cfg, LocalWorld(cfg.n_ranks)) as ep:
            d = ep.dispatch(input_tokens, topk_ids)
            out = ep.combine(expert_outputs, d, router_weights)

    Calls alternate: dispatch, combine, dispatch, combine. Any other order raises EPStateError. After a PeerTimeout, or
    after an error or interruption (Ctrl-C, an exception in a signal handler) in a call that has begun to launch
    kernels, every call is refused until reset().
    On a GPU no call waits for the kernels, unless an argument or `out` is a host array.

    CUDA graphs: rounds with device arrays can be captured from the world's stream (not the legacy default stream).
    Capture a whole round in one graph, or dispatch and combine in one graph each. Replay the graphs in that order, in
    the same way on all ranks. Each replay writes its results into the arrays that the captured call returned. Their
    memory stays reserved until close(). Run a round with the same options before the capture, to compile the kernels.
    """

    def __init__(self, cfg: EPConfig, world, *, launch=None, timeout=30.0, fused=True, kernels=None, _factories=None):
        _check_config(cfg)
        inputs.world("world", world)
        if launch is not None and not hasattr(launch, "grid"):
            raise EPValueError(f"launch is a {type(launch).__name__}; a LaunchConfig(n_sms=...) is needed")
        if cfg.n_ranks != world.n_ranks:
            raise EPValueError(
                f"EPConfig.n_ranks={cfg.n_ranks} must equal the world's n_ranks={world.n_ranks}: "
                "make it from world.n_ranks, or start as many ranks"
            )
        if getattr(fused, "shape", ()) or fused not in (True, False):
            raise EPValueError(f"fused={fused!r} must be True or False")
        self.cfg, self.world = cfg, world
        self.timeout, self.fused = seconds("timeout", timeout), bool(fused)
        self._engine = Engine(cfg, world, launch, self.timeout, kernels, _factories, self.fused)
        self.kernels = self._engine.kernels
        self._rounds = self._engine.rounds
        self._dispatch = DispatchPhase(self._engine)
        self._combine = CombinePhase(self._engine, self._dispatch.capacity)
        self._leave = weakref.finalize(self, self._engine.leave)
        self._leave.atexit = False

    @property
    def capacity(self) -> int:
        """Rows in the arrays of a Dispatched: the most that one rank can receive."""
        return self._dispatch.capacity

    @part_of_round
    def dispatch_async(self, input_tokens, topk_ids, input_scale=1.0):
        """Send every token to the owners of its experts: the first half of `dispatch`, with its arguments."""
        self._dispatch.begin(input_tokens, topk_ids, input_scale)
        self._dispatch.launch("dispatch_async")

    @part_of_round
    def dispatch_wait(self, *, out=None):
        """Wait on the device for the round's messages and group them by expert: the second half of `dispatch`.

        out, result and errors: as in `dispatch`.
        """
        if out is not None:
            self._dispatch.into(self._engine.parts, out)
        return self._dispatch.launch("dispatch_wait")

    @part_of_round
    def dispatch(self, input_tokens, topk_ids, input_scale=1.0, *, out=None):
        """Send every token to the owners of its experts, and group the tokens that arrive by expert.

        input_tokens: bf16 (num_tokens, hidden), num_tokens <= max_tokens_per_rank, 0 allowed. With token_format bf16,
        float16 and float32 arrays in host memory are accepted too, and rounded to bf16 once.
        topk_ids: any integer type (num_tokens, top_k), ids in [0, n_experts), distinct in a token, -1 for no expert.
        input_scale: one positive finite float32 a rank, or a function (i) -> float32, called with 0; only nvfp4 reads it.
        out: a Dispatched whose arrays receive the results (topk_ids, and arrays that are None, are allocated).
        Returns a Dispatched: rows by group, then src_rank; within a segment their order is free.
        Errors: EPValueError names rank, token, k, value, and nothing was launched. Bad ids in device memory
        are treated as -1. The next call that waits for the kernels (trimmed(), numpy(), check()) raises the error, or
        a PeerTimeout. EPStateError if it is not dispatch's turn. Source: the dispatch_kernel page (docs/pages.md);
        epmoe_ref.dispatch.
        """
        self._dispatch.begin(input_tokens, topk_ids, input_scale, out)
        return self._dispatch.launch("dispatch", self.fused)

    @part_of_round
    def combine_async(self, expert_outputs, d):
        """Send the experts' rows back to their tokens' ranks: the first half of `combine`.

        expert_outputs, d, and errors: as in `combine`. combine_wait reads a fused shared expert's rows of
        expert_outputs.
        """
        self._combine.begin(expert_outputs, d)
        self._combine.launch_async()

    @part_of_round
    def combine_wait(
        self,
        router_weights=None,
        epilogue=None,
        epilogue_args=(),
        *,
        router_weights_args=(),
        elementwise_lambda_fn=None,
        out=None,
    ):
        """Wait on the device for the returned rows and reduce them by token: the second half of `combine`.

        Arguments, result and errors: as in `combine`.
        """
        functions = router_weights_args, epilogue, epilogue_args, elementwise_lambda_fn
        return self._combine.end("combine_wait", router_weights, functions, out)

    @part_of_round
    def combine(
        self,
        expert_outputs,
        d,
        router_weights=None,
        epilogue=None,
        epilogue_args=(),
        *,
        router_weights_args=(),
        elementwise_lambda_fn=None,
        out=None,
    ):
        """Send the experts' rows back to their tokens' ranks, and reduce them by token.

        expert_outputs: combine_dtype (rows, hidden), in the order of d.output_tokens; the exact number of rows, or
        the capacity. d: the result of this round's dispatch, whole, trimmed() or numpy(), with src_info unchanged.
        router_weights: float32 (num_tokens, top_k), or a function (token, k, *router_weights_args) -> float32; None
        leaves the rows unreduced, on all ranks or on none. epilogue: a function (token, col, value, *epilogue_args)
        -> value, applied to the sum rounded to the output type. Arguments of functions: numbers, or arrays of float32
        or int32 with 1 or 2 axes (in host memory also bf16 and fp16, which are read as float32). Under a LocalWorld a
        list among them has one for each rank. Every rank numbers its tokens from 0.
        elementwise_lambda_fn: a function (token, col, value, *epilogue_args), instead of an epilogue. It stores its
        result into writable arrays among its arguments and returns nothing. combine then returns None (a list of
        None under a LocalWorld) and stores nothing else.
        Returns combine_dtype (num_tokens, hidden), or without router weights (num_tokens, top_k, hidden), which is
        zero where the id is -1; out: the caller's array of that shape. The sum over k = 0, 1, ... uses fma in
        float32 and is rounded once, so every bit is defined, but for the bits of a NaN.
        Errors: EPValueError names rank, argument, value; EPStateError if it is not combine's turn; PeerTimeout by the
        next call that waits for the kernels. Source: the combine_wait_kernel page (docs/pages.md); epmoe_ref.combine.
        """
        functions = router_weights_args, epilogue, epilogue_args, elementwise_lambda_fn
        self._combine.begin(expert_outputs, d)
        return self._combine.end("combine", router_weights, functions, out, self.fused)

    def fused_silu(self, gate_up, d, *, output_format="bf16", limit=None, alpha=1.702):
        """SwiGLU between an expert's two matrix products, for the rows of d; the host does not wait for their number.

        gate_up: bf16 (rows, 2 * width), in the order of d.output_tokens (exact number or capacity), gate first.
        Returns bf16 (rows, width), or with output_format "fp8_blockwise" the pair (e4m3 (rows, width), float32 scales
        (width / 128, rows), transposed). limit, alpha: the clamped variant. Agrees with epmoe_ref.fused_silu within
        one bf16 ulp (FP8: one code). Rows past the exact number are unspecified. Errors: EPValueError.
        """
        self._rounds.expect_open("fused_silu")
        how = dict(output_format=output_format, limit=limit, alpha=alpha)
        return fused_silu(self._engine, self.capacity, gate_up, d, **how)

    def check(self):
        """Wait for the kernels; raise errors they recorded: PeerTimeout; EPValueError for bad ids in device memory."""
        self._engine.check()

    @part_of_round
    def reset(self):
        """Reset all counters, flags and the order of calls. Collective: every rank must call it."""
        self._rounds.expect_open("reset")
        self._engine.reset()

    @staticmethod
    def plan(cfg):
        """Bytes that each buffer of one rank will need with cfg, an EPConfig; allocates nothing (print it)."""
        _check_config(cfg)
        return rank_memory.plan(cfg)

    def memory(self):
        """Bytes of each buffer of one rank: planned by the configuration, and allocated now (print it)."""
        self._rounds.expect_open("memory")
        r = self._engine.ranks[0]
        staged = {"staged host arrays": self._engine.placing.staged_bytes(r.rank)}
        return rank_memory.plan(self.cfg, r.arena.bytes_by_name | staged)

    def region(self, name, rank=None):
        """A copy of a rank's region, as a NumPy array in the region's shape; waits for the kernels.

        name: from epmoe.layout.regions (dispatch_recv_buf, dispatch_recv_count, ...), or a counter region (reserved, A,
        ...). rank: of this process; default its first. Errors: EPValueError, which lists the names.
        """
        self._rounds.expect_open("region")
        rank = self.world.ranks[0] if rank is None else rank
        if rank not in self.world.ranks:
            raise EPValueError(f"rank={rank} is not of this process, which has {list(self.world.ranks)}")
        return self._engine.ranks[list(self.world.ranks).index(rank)].read(name)

    def trace(self):
        """Times when each block of each kernel's last launch reached each mark: a list of Stamps (kernel, rank, times).

        Needs launch=LaunchConfig(trace=True); waits for the kernels. epmoe.kernels.stamps.MARKS explains the marks.
        """
        self._rounds.expect_open("trace")
        if not self._engine.launch.trace:
            raise EPStateError(
                "trace: the kernels write no stamps; make the ExpertParallel with launch=LaunchConfig(trace=True)"
            )
        return self._engine.trace()

    @part_of_round
    def close(self, *, collective=True):
        """Free everything; results that are still in use keep their memory. Leaving the context manager calls it.

        Without close(), garbage collection frees what it can; memory that peers in other processes use stays.

        Collective (collective=False, after an error, does not wait for other ranks). Raises an error that the kernels
        recorded and no call has raised yet, unless another error came before. EPStateError while another thread is in a
        call.
        """
        self._leave.detach()
        if self._rounds.state != "closed":
            self._engine.close(collective)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close(collective=kind is None)


def _check_config(cfg):
    if not isinstance(cfg, EPConfig):
        raise EPValueError(
            f"cfg is a {type(cfg).__name__}; an EPConfig(n_ranks, n_experts, top_k, hidden, "
            "max_tokens_per_rank) is needed"
        )
