"""PlainKernel: a factory returns it, and kernel[grid, block, stream](*arguments) launches it (docs/pages.md)."""

import numpy as np

from epmoe.device import SIM, ArrayKernel
from epmoe.layout import STATUS_WORDS
from epmoe_ref.errors import EPValueError

from ..launch import MAX_THREADS
from ..status import raise_if_bad_ids, raise_if_failed
from ..pairs.peers import crosses_worlds
from . import arguments

# Optional keywords of a launch, after the arguments of the specification page, and their defaults.
OPTIONAL = dict(clean_topk_ids=0, recv_counts=0, send_buf_p=0, num_tokens=0, input_tokens=0,
                input_scales_args=(1.0,), router_weights_args=(), epilogue_args=())
POINTERS = {"send_buf_p", "recv_buf_p", "recv_count_p", "ep_counters", "clean_topk_ids", "recv_counts"}
TUPLES = {"recv_buf_ptrs", "recv_count_ptrs"}
USER_ARGUMENTS = {"input_scales_args", "router_weights_args", "epilogue_args"}


class PlainKernel:
    """One of the six plain kernels, compiled for one configuration at its first launch.

    kernel[grid, block](...) or kernel[grid, block, stream](...) launches. grid: blocks. All must be resident, as they
    wait for each other (not in combine_async). combine and combine_wait run at most 2 * n_experts. block: threads, a
    multiple of 32. stream: machine.stream(rank), or on a GPU a stream of Numba, torch or CuPy, or its handle. In the
    simulator launches run at machine.synchronize() or at the end of `with machine.hold()`; without a stream, at once
    and alone.

    The arguments are those of the specification page, in its order. Arrays are C-contiguous: input_tokens [num_tokens,
    hidden] (in dispatch bf16, or input_type; in combine [rows, hidden] of the combine type), topk_ids int32
    [num_tokens, top_k], row_offsets uint32 [n_groups + 1], expert_ids int32 [n_groups], src_info int32 [rows, 2],
    output_tokens [num_tokens, hidden] of the combine type, or [num_tokens, top_k, hidden] without router weights.
    format_handler: the format's output arrays, a NamedTuple, a dict or an object with their names. send_buf_p,
    recv_buf_p, recv_count_p: an address, or an array. recv_buf_ptrs, recv_count_ptrs: tuples of p2p_world_size of
    these. ep_counters: EPLocalSyncCounters, its buffer, or its address. my_rank: int.

    Keywords. status: address of STATUS_WORDS int32 words; default: words of this kernel, which check() reads. timeout
    [s]: a wait gives up after it. clean_topk_ids: where dispatch stores the ids it used, -1 for bad ones. Combine
    applies the same rule to its topk_ids, so it can also take the caller's own array. recv_counts: where dispatch
    stores the counts, int32 [n_local_experts, n_src_ranks]. With fused_shared_expert dispatch_wait needs send_buf_p and
    num_tokens, and combine_wait input_tokens. input_scales_args, router_weights_args, epilogue_args: tuples of numbers
    and arrays, passed to input_scales_wrapper, router_weights_wrapper, and epilogue_fn or elementwise_lambda_fn after
    their own arguments. Without input_scales_wrapper the scale is input_scales_args[0].

    The keywords of a factory are the compile-time names of its page. Those that are also in EPConfig must agree with
    it. n_sms and num_threads are the defaults of grid() and block(). Errors: EPValueError, before anything is launched.
    """

    def __init__(self, cfg, options, function):
        self.cfg, self.options, self.__name__, self.__doc__ = cfg, options, function.__name__, function.__doc__
        code = function.__code__
        self.parameters = code.co_varnames[:code.co_argcount]
        self.page_arguments = self.parameters[:self.parameters.index("status")]
        self.kernel = ArrayKernel(function, options.launch.num_threads or MAX_THREADS, crosses_worlds(cfg))
        self._launched = {}         # rank -> (stream, own status words, timeout)

    def __repr__(self):
        return f"<{self.__name__} for {self.cfg}>"

    def __getitem__(self, where):
        where = where if isinstance(where, tuple) else (where,)
        if len(where) not in (2, 3):
            raise EPValueError(f"{self.__name__}[...] takes grid, block and a stream, not {len(where)} things")
        grid, block, stream = (*where, None)[:3]

        def launch(*page_arguments, status=None, timeout=30.0, **given):
            self.launch((grid, block, stream), self._named(page_arguments, given), status, timeout)

        return launch

    def grid(self, machine=None, block=None) -> int:
        """Blocks of a launch on that machine: launch.n_sms, but no more than can be resident at once and have flags."""
        block, launch = block or self.block(), self.options.launch
        if SIM or hasattr(machine, "kernels"):       # a dry machine, which remembers what it would launch
            return self._with_flags(launch.grid(machine))
        most, kernel = launch.n_sms or getattr(machine, "n_sms", 1 << 30), self.kernel.of(self._compiled_for({}))
        machine = machine or self.kernel.stream_of(None).machine
        return self._with_flags(min(most, machine.max_resident_blocks(kernel, block)))

    def block(self) -> int:
        """Threads of a block."""
        return self.options.launch.threads

    def ptx(self, cc, **user_arguments) -> str:
        """The PTX for a compute capability such as (7, 5); needs no GPU. user_arguments: as at a launch."""
        return self.kernel.of(self._compiled_for(user_arguments)).ptx(cc)

    def cubin(self, cc, **user_arguments) -> bytes:
        """The cubin for a compute capability; needs no GPU."""
        return self.kernel.of(self._compiled_for(user_arguments)).binary(cc)[1]

    def check(self):
        """Waits for the launches. Raises what their own status words report: PeerTimeout, EPValueError for bad ids."""
        for rank, (stream, words, timeout) in self._launched.items():
            stream.synchronize()
            if words is not None:
                raise_if_failed(words, self.cfg, rank, timeout)
                raise_if_bad_ids(words, self.cfg, rank)

    def _with_flags(self, grid):
        flagged = self.__name__ in ("combine_wait_kernel", "combine_kernel")
        return max(1, min(grid, 2 * self.cfg.n_experts) if flagged else grid)

    def launch(self, where, named, status, timeout):
        """Launches the kernel. where: grid, block, stream. named: {name: argument}, others that it does not take."""
        (grid, block, stream), named = where, {name: named[name] for name in self.parameters if name in named}
        self._check(named)
        my_rank, most = named["my_rank"], self.kernel.max_threads
        whole = all(isinstance(n, (int, np.integer)) for n in (grid, block))
        if not whole or grid < 1 or block not in range(32, most + 1, 32):
            raise EPValueError(f"{self.__name__}[{grid!r}, {block!r}]: the first must be a number of blocks, at least 1, "
                               f"the second a number of threads, a multiple of 32 and at most {most}")
        if not 0 < timeout < 1e9:
            raise EPValueError(f"timeout={timeout} must be a positive number of seconds")
        alone = stream is None and SIM
        stream = self.kernel.stream_of(stream, self.cfg.n_ranks, my_rank)
        own = self._launched[my_rank][1] if my_rank in self._launched else None
        if status is None:
            status = own = self.kernel.words(STATUS_WORDS) if own is None else own
        self._launched[my_rank] = stream, own, timeout
        named.update(status=status, timeout_ns=np.uint64(timeout * 1e9))
        values = [self._value(name, named[name], stream, my_rank) for name in self.parameters]
        self.kernel.start(self._with_flags(int(grid)), int(block), stream, values, self.parameters)
        if alone:
            stream.synchronize()

    def _named(self, page_arguments, given):
        """The arguments of a launch as {name: argument}."""
        wanted = self.page_arguments
        if len(page_arguments) != len(wanted):
            raise EPValueError(f"{self.__name__} takes {len(wanted)} arguments ({', '.join(wanted)}), "
                               f"not {len(page_arguments)}")
        named = dict(zip(wanted, page_arguments))
        optional = [name for name in self.parameters if name not in named and name in OPTIONAL]
        unknown = sorted(set(given) - set(optional))
        if unknown:
            raise EPValueError(f"{self.__name__} does not take {', '.join(unknown)}; by keyword it takes "
                               f"{', '.join(['status', 'timeout', *optional])}")
        named.update({name: given.get(name, OPTIONAL[name]) for name in optional})
        return named

    def _check(self, named):
        """Checks the arguments, and replaces arrays by Arrays."""
        cfg, lengths, known = self.cfg, {}, arguments.arrays(self.cfg, self.__name__, self.options)
        if not isinstance(named["my_rank"], (int, np.integer)) or not 0 <= named["my_rank"] < cfg.n_ranks:
            raise EPValueError(f"my_rank={named['my_rank']!r} must be a number in [0, n_ranks={cfg.n_ranks})")
        for name, (dtype, shape) in known.items():
            if name in named and not isinstance(named[name], int):
                named[name] = arguments.array(named[name], name, dtype, shape, lengths)
            elif name in self.page_arguments:
                raise EPValueError(f"{name} is {named[name]!r}: an array is needed")
        n, most = lengths.get("num_tokens", named.get("num_tokens", 0)), cfg.max_tokens_per_rank
        if n > most:
            raise EPValueError(f"{n} tokens are more than max_tokens_per_rank={most}: split the batch or configure more")
        if "format_handler" in named:
            named["format_handler"] = arguments.format_handler(cfg, named["format_handler"])
            if lengths["rows"] < arguments.capacity(cfg):
                raise EPValueError(f"src_info has {lengths['rows']} rows; {arguments.capacity(cfg)} are needed, the "
                                   "most that this rank can receive")
        for name in TUPLES & set(named):
            if len(named[name]) != cfg.p2p_world_size:
                raise EPValueError(f"{name} has {len(named[name])} entries; p2p_world_size={cfg.p2p_world_size} are "
                                   "needed, one for each rank of the p2p world")
        missing = [n for n in ("input_tokens", "send_buf_p") if n in named and named[n] is OPTIONAL[n]]
        if cfg.fused_shared_expert and missing and self.__name__.endswith("wait_kernel"):
            raise EPValueError(f"fused_shared_expert: {self.__name__} needs {missing[0]}=, where the shared rows are")
        if self.options.router_weights is arguments.given_weights and len(named.get("router_weights_args", " ")) != 1:
            raise EPValueError("router_weights_args=(weights,) is needed: float32 [num_tokens, top_k]")
        if self.options.input_scale is arguments.given_scale and "input_scales_args" in named:
            named["input_scales_args"] = (np.float32(named["input_scales_args"][0]),)

    def _value(self, name, value, *where):
        """Converts an argument to the form that ArrayKernel takes. where: stream, rank."""
        if name in TUPLES:
            return tuple(self.kernel.address(v, f"{name}[{i}]", *where) for i, v in enumerate(value))
        if name in POINTERS or name == "status" or (name == "input_tokens" and name not in self.page_arguments):
            return self.kernel.address(value, name, *where)
        if name in USER_ARGUMENTS:
            return tuple(user_argument(v, f"{name}[{i}]") for i, v in enumerate(value))
        return np.int32(value) if name in ("my_rank", "num_tokens") else value

    def _compiled_for(self, user_arguments):
        """Arguments of the same types as those of a launch."""
        named = arguments.stand_ins(self.cfg, self.__name__, self.options, self.page_arguments)
        values = []
        for name in self.parameters:
            value = user_arguments.get(name, OPTIONAL.get(name, 0))
            if name in TUPLES:
                value = (np.uint64(0),) * self.cfg.p2p_world_size
            elif name in USER_ARGUMENTS:
                value = tuple(user_argument(v, name) for v in value)
            else:
                value = named.get(name, np.int32(0) if name in ("my_rank", "num_tokens") else np.uint64(0))
            values.append(value)
        return values


def user_argument(value, what):
    """A number becomes float32 or int32, an array an Array."""
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return np.float32(value) if isinstance(value, (float, np.floating)) else np.int32(value)
    return value if isinstance(value, arguments.Array) else arguments.view(value, what)
