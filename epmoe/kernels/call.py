"""KernelCall: a kernel with its host side, which packs the words that it is called with and launches."""

from functools import partial
from typing import NamedTuple

import numpy as np

from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

from . import formats
from .launch import LaunchConfig
from .params import ParameterBlock, float32_word
from .stamps import TraceBuffers

MOST_PLANS = 1024


class TokenArray(NamedTuple):
    """Address of an array of tokens [n, hidden] in device memory, and its number of tokens."""

    address: int
    n: int


class FormatHandler(NamedTuple):
    """A token format's output arrays: {name: address} for the format's output_fields, and their capacity in rows."""

    arrays: dict[str, int]
    capacity: int


class ScalarArg(NamedTuple):
    """A number given to a user's function (epilogue, router weights): dtype "float32" or "int32"."""

    value: float
    dtype: str

    @property
    def type(self):
        """The key of a compiled kernel: (dtype, number of axes, whether it may be written)."""
        return self.dtype, 0, False

    def words(self):
        """The words that it takes in the parameter block."""
        raw = np.zeros(1, np.uint64)
        raw.view(self.dtype)[0] = self.value
        return [int(raw[0])]


class ArrayArg(NamedTuple):
    """A C-contiguous array given to a user's function: address, shape of one or two axes, dtype.

    dtype is "float32" or "int32". writable: whether the function may store into it, which an output lambda does.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    writable: bool = False

    @property
    def type(self):
        """The key of a compiled kernel: (dtype, number of axes, whether it may be written)."""
        return self.dtype, len(self.shape), self.writable

    def words(self):
        """The words that it takes in the parameter block: address, then lengths of the axes."""
        return [self.address, *self.shape]


class Wanted(NamedTuple):
    """What a plan is for; regions: (name, address, or addresses of all peers) of each."""

    num_tokens: int
    my_rank: int
    stream: object
    timeout_s: float
    weights_types: tuple
    epilogue_types: tuple
    regions: tuple


class KernelCall:
    """The result of a factory. Calling it launches; it compiles at the first call.

    compile: function (types of router_weights_args, types of epilogue_args) -> compiled kernel.

    What stays the same from call to call (peers, regions, the number of tokens) makes a plan, which `plan` gives;
    plan.start(*words) launches: words are the fields of the block from `first` on, in order, and then the arguments of
    functions. A call finds its plan, and starts it.

    What the calls take; a number that stands for an array is its address in device memory:
    input_tokens: dispatch: TokenArray of bf16 [num_tokens, hidden]; combine: combine_dtype [rows, hidden].
    topk_ids: int32 [num_tokens, top_k], -1 for no expert; clean_topk_ids: the same, written by dispatch for combine.
    format_handler: FormatHandler, the arrays that the token format writes. row_offsets: uint32 [n_groups + 1],
    expert_ids: int32 [n_groups], src_info: int32 [capacity, 2], recv_counts: int32 [n_local_experts, n_src_ranks].
    output_tokens: TokenArray of combine_dtype [num_tokens, hidden], or [num_tokens, top_k, hidden] without weights.
    send_buf_p, recv_buf_p, recv_count_p, ep_counters, status: this rank's regions of epmoe.layout.regions(cfg),
    of dispatch or of combine; recv_buf_ptrs, recv_count_ptrs: those of each rank of the p2p world, as lists.
    my_rank: 0 .. n_ranks - 1. machine, stream: of epmoe.device. timeout_s [s]: after it a wait gives up and status
    says so (status.raise_if_failed). Nothing waits for the launch. Errors: EPValueError.
    """

    programmatic = False    # whether a launch may begin before the one before it has ended, for which the kernel waits
    first = "input_tokens"  # the first field that differs from call to call

    def __init__(self, cfg: EPConfig, launch: LaunchConfig, block: ParameterBlock, compile):
        self.cfg, self.launch, self.block = cfg, launch, block
        self.size = _all        # function (blocks, threads, num_tokens) -> what of them a launch takes
        self._compile = compile
        self._plans, self._contexts, self._traces, self._machine = {}, {}, TraceBuffers(), None

    @property
    def fmt(self):
        """The token format's device functions and output fields."""
        return formats.of(self.cfg)

    def kernel(self, weights_types=(), epilogue_types=()):
        """The compiled kernel for these types of router_weights_args and epilogue_args."""
        return self._compile(tuple(weights_types), tuple(epilogue_types))

    def grid(self, machine) -> int:
        """Blocks of a launch on that machine."""
        return self.launch.grid(machine)

    def close(self):
        """Frees the contexts; the machine must have finished the launches that use them."""
        self._plans.clear()
        while self._contexts:
            self._contexts.popitem()[1].free()
        self._traces.close()

    def trace(self, name):
        """The stamps of the last launch of every rank, under this name: [Stamps]; waits for the kernels."""
        return self._traces.read(name)

    def plan(self, num_tokens, my_rank, regions=None, *, machine, stream, timeout_s=30.0, weights_types=(),
             epilogue_types=()):
        """What launches for so many tokens of a rank; regions: {name: address, or addresses of all peers}."""
        if machine is not self._machine:
            self.close()
            self._machine = machine
        places = tuple((name, tuple(at) if isinstance(at, list) else at) for name, at in (regions or {}).items())
        wanted = Wanted(num_tokens, my_rank, stream, timeout_s, weights_types, epilogue_types, places)
        plan = self._plans.get(wanted)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[wanted] = self._planned(wanted)
        return plan

    def _planned(self, wanted):
        num_tokens, my_rank, machine = wanted.num_tokens, wanted.my_rank, self._machine
        if num_tokens > self.cfg.max_tokens_per_rank:
            raise EPValueError(f"{num_tokens} tokens are more than max_tokens_per_rank={self.cfg.max_tokens_per_rank}: "
                               "split the batch or configure more")
        block, most = self.block, self.grid(machine)
        grid, threads = self.size(most, self.launch.threads, num_tokens)
        of_peers = {name: at for name, at in wanted.regions if isinstance(at, tuple)}
        same = {name: at for name, at in wanted.regions if name not in of_peers}
        if block.context_words:
            same["context"] = self._context(machine, my_rank, of_peers)
        if "timeout_ns" in block:
            same["timeout_ns"] = max(1, int(wanted.timeout_s * 1e9))
        note = None
        if self.launch.trace and "trace" in block:
            same["trace"] = self._traces.address(machine, my_rank, most)
            note = partial(self._traces.note, my_rank, grid)
        words = block.pack(same)[:block.index(self.first)].tolist()
        launch = machine.prepared(self.kernel(wanted.weights_types, wanted.epilogue_types), grid, threads, words,
                                  num_tokens, my_rank, stream=wanted.stream, programmatic=self.programmatic)
        return launch if note is None else Traced(launch, note)

    def _context(self, machine, my_rank, of_peers):
        """The address of the words that are looked up by rank."""
        words = self.block.pack_context(of_peers)
        key = my_rank, words.tobytes()
        if key not in self._contexts:
            self._contexts[key] = machine.alloc(words.nbytes, "context", rank=my_rank)
            self._contexts[key].write(words)
        return self._contexts[key].address


class Traced:
    """A launch of which it is noted how many blocks write stamps."""

    def __init__(self, launch, note):
        self._launch, self._note = launch, note

    def start(self, *words):
        """Launch."""
        self._note()
        self._launch.start(*words)


def _all(blocks, threads, num_tokens):
    return blocks, threads


def handler_words(fmt, handler: FormatHandler):
    """The addresses of the arrays that a token format writes, and their rows."""
    return *(handler.arrays[name] for name in fmt.output_fields), handler.capacity


def argument_words(*arguments):
    """The words of ScalarArg and ArrayArg."""
    return [word for arg in arguments for word in arg.words()]


def _types(arguments):
    return tuple([arg.type for arg in arguments])


class DispatchCall(KernelCall):
    """dispatch_async and dispatch_wait in one launch."""

    def __call__(self, input_tokens: TokenArray, topk_ids, format_handler: FormatHandler, row_offsets, expert_ids,
                 src_info, send_buf_p, recv_buf_ptrs, recv_count_ptrs, ep_counters, my_rank, *, machine, stream,
                 status, clean_topk_ids, recv_counts=0, input_scale=1.0, timeout_s=30.0):
        here = self.cfg.world_rank(my_rank)
        self.plan(input_tokens.n, my_rank, dict(
            send_buf_p=send_buf_p, recv_buf_ptrs=recv_buf_ptrs, recv_count_ptrs=recv_count_ptrs,
            recv_buf_p=recv_buf_ptrs[here], recv_count_p=recv_count_ptrs[here], ep_counters=ep_counters,
            status=status), machine=machine, stream=stream, timeout_s=timeout_s,
        ).start(input_tokens.address, topk_ids, clean_topk_ids, float32_word(input_scale),
                *handler_words(self.fmt, format_handler), row_offsets, expert_ids, src_info, recv_counts)


class DispatchAsyncCall(DispatchCall):
    """Sends this rank's tokens to the owners of their experts."""

    def __call__(self, input_tokens: TokenArray, topk_ids, send_buf_p, recv_buf_ptrs, recv_count_ptrs, ep_counters,
                 my_rank, *, machine, stream, status, clean_topk_ids, input_scale=1.0, timeout_s=30.0):
        nowhere = FormatHandler(dict.fromkeys(self.fmt.output_fields, 0), 0)
        super().__call__(input_tokens, topk_ids, nowhere, 0, 0, 0, send_buf_p, recv_buf_ptrs, recv_count_ptrs,
                         ep_counters, my_rank, machine=machine, stream=stream, status=status,
                         clean_topk_ids=clean_topk_ids, input_scale=input_scale, timeout_s=timeout_s)


class DispatchWaitCall(KernelCall):
    """Waits for all messages of the round and groups them by expert.

    recv_counts: address of an int32 [n_local_experts, n_src_ranks] array for the counts, or 0. input_tokens and
    send_buf_p are needed with a shared expert only: its rows come from there.
    """

    def __call__(self, format_handler: FormatHandler, row_offsets, expert_ids, src_info, recv_buf_p, recv_count_p,
                 ep_counters, my_rank, *, machine, stream, status, recv_counts=0,
                 input_tokens: TokenArray | None = None, send_buf_p=0, timeout_s=30.0):
        if self.cfg.fused_shared_expert and input_tokens is None:
            raise EPValueError("dispatch_wait with fused_shared_expert needs input_tokens and send_buf_p: "
                               "the shared expert's rows are this rank's own tokens")
        tokens = input_tokens or TokenArray(0, 0)
        self.plan(tokens.n, my_rank, dict(
            send_buf_p=send_buf_p, recv_buf_p=recv_buf_p, recv_count_p=recv_count_p, ep_counters=ep_counters,
            status=status), machine=machine, stream=stream, timeout_s=timeout_s,
        ).start(tokens.address, 0, 0, 0, *handler_words(self.fmt, format_handler), row_offsets, expert_ids, src_info,
                recv_counts)


class CombineCall(KernelCall):
    """combine_async and combine_wait in one launch; n_rows as in CombineAsyncCall."""

    def __call__(self, input_tokens, src_info, output_tokens: TokenArray, send_buf_p, recv_buf_ptrs, recv_count_ptrs,
                 ep_counters, topk_ids, my_rank, *, machine, stream, status, n_rows=0, router_weights=0,
                 router_weights_args=(), epilogue_args=(), timeout_s=30.0):
        here = self.cfg.world_rank(my_rank)
        self.plan(output_tokens.n, my_rank, dict(
            send_buf_p=send_buf_p, recv_buf_ptrs=recv_buf_ptrs, recv_count_ptrs=recv_count_ptrs,
            recv_buf_p=recv_buf_ptrs[here], recv_count_p=recv_count_ptrs[here], ep_counters=ep_counters,
            status=status), machine=machine, stream=stream, timeout_s=timeout_s,
            weights_types=_types(router_weights_args), epilogue_types=_types(epilogue_args),
        ).start(input_tokens, src_info, n_rows, output_tokens.address, topk_ids, router_weights,
                *argument_words(*router_weights_args, *epilogue_args))


class CombineAsyncCall(CombineCall):
    """Sends the experts' output rows [row_offsets[-1], hidden] back to the ranks their tokens came from.

    n_rows: how many rows input_tokens and src_info have memory for: these may be looked at before it is known how many
    were received. 0: none is.
    """

    def __call__(self, input_tokens, src_info, send_buf_p, recv_buf_ptrs, recv_count_ptrs, ep_counters, my_rank, *,
                 machine, stream, status, n_rows=0, timeout_s=30.0):
        super().__call__(input_tokens, src_info, TokenArray(0, 0), send_buf_p, recv_buf_ptrs, recv_count_ptrs,
                         ep_counters, 0, my_rank, machine=machine, stream=stream, status=status, n_rows=n_rows,
                         timeout_s=timeout_s)


class CombineWaitCall(KernelCall):
    """Waits for all rows of the round and reduces them by token.

    router_weights: address of float32 [n, top_k], with a kernel made for an array; router_weights_args, epilogue_args:
    ScalarArg and ArrayArg for the user's functions. input_tokens: the combine input, read for the shared expert only.
    """

    def __call__(self, output_tokens: TokenArray, recv_buf_p, recv_count_p, ep_counters, my_rank, topk_ids, *,
                 machine, stream, status, router_weights=0, router_weights_args=(), epilogue_args=(), input_tokens=0,
                 timeout_s=30.0):
        if self.cfg.fused_shared_expert and not input_tokens:
            raise EPValueError("combine_wait with fused_shared_expert needs input_tokens: "
                               "the shared expert's output rows are its first rows")
        self.plan(output_tokens.n, my_rank, dict(
            recv_buf_p=recv_buf_p, recv_count_p=recv_count_p, ep_counters=ep_counters, status=status),
            machine=machine, stream=stream, timeout_s=timeout_s,
            weights_types=_types(router_weights_args), epilogue_types=_types(epilogue_args),
        ).start(input_tokens, 0, 0, output_tokens.address, topk_ids, router_weights,
                *argument_words(*router_weights_args, *epilogue_args))
