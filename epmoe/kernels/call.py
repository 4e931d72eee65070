"""KernelCall: a kernel with its host side, which packs the arguments into a parameter block and launches."""

from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

from . import formats
from .arguments import FormatHandler, TokenArray
from .launch import LaunchConfig
from .params import ParameterBlock, float32_word
from .stamps import TraceBuffers
from .written_blocks import WrittenBlocks


class KernelCall:
    """The result of a factory. Calling it launches; it compiles at the first call and copies no known argument twice.

    compile: function (types of router_weights_args, types of epilogue_args) -> compiled kernel.

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
    at_hand = ()    # fields that are also arguments of the kernel, which needs them before it has read a parameter

    def __init__(self, cfg: EPConfig, launch: LaunchConfig, block: ParameterBlock, compile):
        self.cfg, self.launch, self.block = cfg, launch, block
        self.size = _all        # function (blocks, threads, num_tokens) -> what of them a launch takes
        self._compile = compile
        self._written, self._traces = WrittenBlocks(), TraceBuffers()
        self._machine = None

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
        """Frees the parameter blocks; the machine must have finished the launches that use them."""
        self._written.close()
        self._traces.close()

    def trace(self, name):
        """The stamps of the last launch of every rank, under this name: [Stamps]; waits for the kernels."""
        return self._traces.read(name)

    def _launch(self, machine, stream, my_rank, num_tokens, values, weights_args=(), epilogue_args=()):
        if num_tokens > self.cfg.max_tokens_per_rank:
            raise EPValueError(f"{num_tokens} tokens are more than max_tokens_per_rank={self.cfg.max_tokens_per_rank}: "
                               "split the batch or configure more")
        tail = tuple(word for arg in (*weights_args, *epilogue_args) for word in arg.words())
        grid, threads = self.size(self.grid(machine), self.launch.threads, num_tokens)
        if self.launch.trace and "trace" in self.block:
            values["trace"] = self._traces.address(machine, my_rank, self.grid(machine), grid)
        block = self._buffer(machine, my_rank, values, tail)
        kernel = self.kernel([arg.type for arg in weights_args], [arg.type for arg in epilogue_args])
        at_hand = [values[name] for name in self.at_hand]
        machine.launch(kernel, grid, threads, (block.address, num_tokens, my_rank, *at_hand), stream=stream,
                       **self._options(machine))

    def _options(self, machine):
        return {"programmatic": True} if self.programmatic else {}

    def _buffer(self, machine, my_rank, values, tail):
        """The parameter block of these arguments; known ones are neither packed nor copied again."""
        if machine is not self._machine:
            self._written.close()
            self._machine = machine
        key = (my_rank, *values.values(), tail)
        return self._written.find(key) or self._written.write(machine, my_rank, key, self.block.pack(values, tail))


def _all(blocks, threads, num_tokens):
    return blocks, threads


def _timeout_ns(timeout_s):
    return max(1, int(timeout_s * 1e9))


def _handler_words(fmt, handler: FormatHandler):
    return (*(handler.arrays[name] for name in fmt.output_fields), handler.capacity)


class DispatchAsyncCall(KernelCall):
    """Sends this rank's tokens to the owners of their experts."""

    at_hand = "topk_ids", "input_tokens", "status"

    def __call__(self, input_tokens: TokenArray, topk_ids, send_buf_p, recv_buf_ptrs, recv_count_ptrs, ep_counters,
                 my_rank, *, machine, stream, status, clean_topk_ids, input_scale=1.0, timeout_s=30.0):
        self._launch(machine, stream, my_rank, input_tokens.n, dict(
            input_tokens=input_tokens.address, topk_ids=topk_ids, clean_topk_ids=clean_topk_ids, send_buf_p=send_buf_p,
            recv_buf_ptrs=tuple(recv_buf_ptrs), recv_count_ptrs=tuple(recv_count_ptrs), ep_counters=ep_counters,
            status=status, input_scale=float32_word(input_scale), timeout_ns=_timeout_ns(timeout_s)))


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
        self._launch(machine, stream, my_rank, tokens.n, dict(
            format_handler=_handler_words(self.fmt, format_handler), row_offsets=row_offsets, expert_ids=expert_ids,
            src_info=src_info, recv_buf_p=recv_buf_p, recv_count_p=recv_count_p, ep_counters=ep_counters,
            status=status, recv_counts=recv_counts, input_tokens=tokens.address, send_buf_p=send_buf_p,
            timeout_ns=_timeout_ns(timeout_s)))


class DispatchCall(KernelCall):
    """dispatch_async and dispatch_wait in one launch."""

    at_hand = DispatchAsyncCall.at_hand

    def __call__(self, input_tokens: TokenArray, topk_ids, format_handler: FormatHandler, row_offsets, expert_ids,
                 src_info, send_buf_p, recv_buf_ptrs, recv_count_ptrs, ep_counters, my_rank, *, machine, stream,
                 status, clean_topk_ids, recv_counts=0, input_scale=1.0, timeout_s=30.0):
        here = self.cfg.world_rank(my_rank)
        self._launch(machine, stream, my_rank, input_tokens.n, dict(
            input_tokens=input_tokens.address, topk_ids=topk_ids, send_buf_p=send_buf_p,
            recv_buf_ptrs=tuple(recv_buf_ptrs), recv_count_ptrs=tuple(recv_count_ptrs),
            recv_buf_p=recv_buf_ptrs[here], recv_count_p=recv_count_ptrs[here],
            format_handler=_handler_words(self.fmt, format_handler), row_offsets=row_offsets, expert_ids=expert_ids,
            src_info=src_info, ep_counters=ep_counters, status=status, clean_topk_ids=clean_topk_ids,
            recv_counts=recv_counts, input_scale=float32_word(input_scale), timeout_ns=_timeout_ns(timeout_s)))


class CombineAsyncCall(KernelCall):
    """Sends the experts' output rows [row_offsets[-1], hidden] back to the ranks their tokens came from.

    n_rows: how many rows input_tokens and src_info have memory for: these may be looked at before it is known how many
    were received. 0: none is.
    """

    at_hand = "ep_counters", "status", "input_tokens", "src_info", "n_rows"

    def __call__(self, input_tokens, src_info, send_buf_p, recv_buf_ptrs, recv_count_ptrs, ep_counters, my_rank, *,
                 machine, stream, status, n_rows=0, timeout_s=30.0):
        self._launch(machine, stream, my_rank, 0, dict(
            input_tokens=input_tokens, src_info=src_info, n_rows=n_rows, send_buf_p=send_buf_p,
            recv_buf_ptrs=tuple(recv_buf_ptrs), recv_count_ptrs=tuple(recv_count_ptrs), ep_counters=ep_counters,
            status=status,
            timeout_ns=_timeout_ns(timeout_s)))


class CombineWaitCall(KernelCall):
    """Waits for all rows of the round and reduces them by token.

    router_weights: address of float32 [n, top_k], with a kernel made for an array; router_weights_args, epilogue_args:
    ScalarArg and ArrayArg for the user's functions. input_tokens: the combine input, read for the shared expert only.
    """

    at_hand = ("ep_counters", "status")

    def __call__(self, output_tokens: TokenArray, recv_buf_p, recv_count_p, ep_counters, my_rank, topk_ids, *,
                 machine, stream, status, router_weights=0, router_weights_args=(), epilogue_args=(), input_tokens=0,
                 timeout_s=30.0):
        if self.cfg.fused_shared_expert and not input_tokens:
            raise EPValueError("combine_wait with fused_shared_expert needs input_tokens: "
                               "the shared expert's output rows are its first rows")
        self._launch(machine, stream, my_rank, output_tokens.n, dict(
            output_tokens=output_tokens.address, recv_buf_p=recv_buf_p, recv_count_p=recv_count_p,
            ep_counters=ep_counters, topk_ids=topk_ids, status=status, router_weights=router_weights,
            input_tokens=input_tokens, timeout_ns=_timeout_ns(timeout_s)),
            tuple(router_weights_args), tuple(epilogue_args))


class CombineCall(KernelCall):
    """combine_async and combine_wait in one launch; n_rows as in CombineAsyncCall."""

    at_hand = CombineAsyncCall.at_hand

    def __call__(self, input_tokens, src_info, output_tokens: TokenArray, send_buf_p, recv_buf_ptrs, recv_count_ptrs,
                 ep_counters, topk_ids, my_rank, *, machine, stream, status, n_rows=0, router_weights=0,
                 router_weights_args=(), epilogue_args=(), timeout_s=30.0):
        here = self.cfg.world_rank(my_rank)
        self._launch(machine, stream, my_rank, output_tokens.n, dict(
            input_tokens=input_tokens, src_info=src_info, n_rows=n_rows, output_tokens=output_tokens.address,
            send_buf_p=send_buf_p, recv_buf_ptrs=tuple(recv_buf_ptrs), recv_count_ptrs=tuple(recv_count_ptrs),
            recv_buf_p=recv_buf_ptrs[here], recv_count_p=recv_count_ptrs[here], ep_counters=ep_counters,
            topk_ids=topk_ids, status=status, router_weights=router_weights, timeout_ns=_timeout_ns(timeout_s)),
            tuple(router_weights_args), tuple(epilogue_args))
