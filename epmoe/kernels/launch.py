"""A kernel's host side: how many blocks and threads a launch has, and the words that it passes to the kernel."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from epmoe.device import SIM
from epmoe_ref.config import MAX_GPUS_PER_NODE, EPConfig
from epmoe_ref.errors import EPValueError

from .params import ParameterBlock
from .stamps import TraceBuffers

FIRST = "input_tokens"      # the first field that differs from launch to launch
MAX_TOP_K = 32      # one lane of a warp holds one k
WARP = 32
MAX_THREADS = 1024
SIMULATOR_BLOCKS, SIMULATOR_THREADS = 3, 64


@dataclass(frozen=True)
class LaunchConfig:
    """Blocks and threads of every kernel of one ExpertParallel; a dispatch of few tokens takes fewer of them.

    n_sms: blocks of a launch, at least 2, because some blocks of a fused dispatch send while others receive. Default:
        all SMs of the device (several ranks that share a GPU must share them out, since fused kernels of all ranks have
        to be resident together); 3 in the simulator.
    num_threads: threads of a block, a multiple of 32 up to 1024. Default 1024; 64 in the simulator.
    trace: whether blocks write stamps (stamps.py).
    """

    n_sms: int | None = None
    num_threads: int | None = None
    trace: bool = False

    def __post_init__(self):
        for name in ("n_sms", "num_threads"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
                raise EPValueError(f"{name}={value!r} must be a whole number, or None for the device's own")
        if self.n_sms is not None and self.n_sms < 2:
            raise EPValueError(f"n_sms={self.n_sms} must be at least 2: some blocks send, the others receive")
        threads = self.num_threads
        if threads is not None and (threads < WARP or threads > MAX_THREADS or threads % WARP):
            raise EPValueError(f"num_threads={threads} must be a multiple of {WARP} from {WARP} to {MAX_THREADS}")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_threads or (SIMULATOR_THREADS if SIM else MAX_THREADS)

    def grid(self, machine) -> int:
        """Blocks of a launch on that machine."""
        return self.n_sms or (SIMULATOR_BLOCKS if SIM else max(2, machine.n_sms))


def check_limits(cfg: EPConfig, kernels="fast") -> None:
    """Raises EPValueError for a configuration that these kernels, "fast" or "plain", do not support."""
    if kernels == "fast" and cfg.top_k > MAX_TOP_K:
        raise EPValueError(f"top_k={cfg.top_k} must be at most {MAX_TOP_K} for the fast kernels: one lane of a warp "
                           "holds one k; the plain kernels take more")
    if cfg.p2p_world_size > MAX_GPUS_PER_NODE:
        raise EPValueError(f"p2p_world_size={cfg.p2p_world_size} must be at most {MAX_GPUS_PER_NODE} "
                           "for the kernels: make p2p worlds smaller, with use_shmem=True (or skip_a2a=True)")


class Wanted(NamedTuple):
    """Describes a launch to prepare.

    machine, stream: of epmoe.device. regions: {field: address} of this rank's regions of epmoe.layout; for regions that
    receive messages, a list of addresses, one for each rank of the p2p world. timeout_s [s]: after it a wait gives up,
    which the status region records. weights_types, epilogue_types: types of router_weights_args, epilogue_args.
    """

    num_tokens: int
    my_rank: int
    machine: object
    stream: object
    regions: dict
    timeout_s: float = 30.0
    weights_types: tuple = ()
    epilogue_types: tuple = ()


class Contexts:
    """Words in device memory that kernels look up by rank, written once."""

    def __init__(self):
        self._buffers = {}

    def address(self, machine, rank, words):
        """Their address."""
        key = rank, words.tobytes()
        if key not in self._buffers:
            buffer = machine.alloc(words.nbytes, "context", rank=rank)
            buffer.write(words)
            self._buffers[key] = buffer
        return self._buffers[key].address

    def close(self):
        """Frees them; the machine must have finished the launches that use them."""
        while self._buffers:
            self._buffers.popitem()[1].free()


class KernelCall:
    """The result of a factory: one kernel for one machine, compiled when a launch is first prepared.

    prepared(wanted).start(*words) launches and does not wait. words: the fields of `block` from FIRST on, in order,
    then the arguments of functions. A word that stands for an array is its address in device memory.
    input_tokens: in dispatch bf16 [num_tokens, hidden]; in combine combine_dtype [n_rows, hidden]. n_rows: length of
    input_tokens and src_info in memory, which may be read before it is known how many rows were received; 0: none.
    topk_ids: int32 [num_tokens, top_k] (int64 in dispatch with id_bytes=8), -1 for no expert. clean_topk_ids: the ids
    as int32, which dispatch writes for combine.
    format_handler: the arrays that the token format writes, then their capacity in rows. row_offsets: uint32
    [n_groups + 1], expert_ids: int32 [n_groups], src_info: int32 [capacity, 2], recv_counts: int32 [n_local_experts,
    n_src_ranks], or 0. output_tokens: combine_dtype [num_tokens, hidden], or [num_tokens, top_k, hidden] without
    weights. router_weights: float32 [num_tokens, top_k], with a kernel made for an array.

    compile: function (weights_types, epilogue_types) -> compiled kernel. size: function (blocks, threads, num_tokens)
    -> (blocks, threads) that a launch takes, at most the given ones. programmatic: whether a launch may begin before
    the launch before it has ended; the kernel then waits for that. Errors: EPValueError.
    """

    def __init__(self, cfg: EPConfig, launch: LaunchConfig, block: ParameterBlock, compile, *,
                 size=lambda blocks, threads, num_tokens: (blocks, threads), programmatic=False):
        self.cfg, self.launch, self.block = cfg, launch, block
        self._compile, self._size, self._programmatic = compile, size, programmatic
        self._contexts, self._traces = Contexts(), TraceBuffers()

    def kernel(self, weights_types=(), epilogue_types=()):
        """The compiled kernel for these types of router_weights_args and epilogue_args."""
        return self._compile(tuple(weights_types), tuple(epilogue_types))

    def close(self):
        """Frees the contexts; the machine must have finished the launches that use them."""
        self._contexts.close()
        self._traces.close()

    def trace(self, name):
        """The stamps of the last launch of every rank, under this name: [Stamps]; waits for the kernels."""
        return self._traces.read(name)

    def prepared(self, wanted: Wanted):
        """Returns an object whose start(*words) launches the kernel, any number of times."""
        num_tokens, my_rank, machine, regions = wanted.num_tokens, wanted.my_rank, wanted.machine, wanted.regions
        if num_tokens > self.cfg.max_tokens_per_rank:
            raise EPValueError(f"{num_tokens} tokens are more than max_tokens_per_rank={self.cfg.max_tokens_per_rank}: "
                               "split the batch or configure more")
        block, most = self.block, self.launch.grid(machine)
        grid, threads = self._size(most, self.launch.threads, num_tokens)
        of_peers = {name: at for name, at in regions.items() if isinstance(at, (list, tuple))}
        same = {name: at for name, at in regions.items() if name not in of_peers}
        if block.context_words:
            same["context"] = self._contexts.address(machine, my_rank, block.pack_context(of_peers))
        if "timeout_ns" in block.places:
            same["timeout_ns"] = max(1, int(wanted.timeout_s * 1e9))
        traces = self.launch.trace and "trace" in block.places
        if traces:
            same["trace"] = self._traces.address(machine, my_rank, most)
        words = block.pack(same)[:block.index(FIRST)].tolist()
        launch = machine.prepared(self.kernel(wanted.weights_types, wanted.epilogue_types), grid, threads, words,
                                  num_tokens, my_rank, stream=wanted.stream, programmatic=self._programmatic)
        if not traces:
            return launch

        def start(*words):
            self._traces.note(my_rank, grid)
            launch.start(*words)

        return SimpleNamespace(start=start)
