"""The plain kernels for an ExpertParallel: what a phase has by address becomes the page's arguments.

Factories of the names and the plans that epmoe.kernels has, so that the phases of a round need not know which kernels
they launch. A launch gets arrays where the page has tensors, and addresses where it has pointers.
"""

import ctypes
import math

import ml_dtypes
import numpy as np

from epmoe import device
from epmoe.host.arrays import Array
from epmoe.host.inputs import COMBINE_DTYPE
from epmoe.kernels import formats, fused_silu_kernel, plain, user_functions

PAGE_NAMES = {  # what the page calls the functions that the fast kernels' factories take
    "input_scale": "input_scales_wrapper",
    "router_weights": "router_weights_wrapper",
    "epilogue": "epilogue_fn",
    "elementwise_lambda_fn": "elementwise_lambda_fn",
}


def _array(address, shape, dtype):
    """C-contiguous memory as an Array; in the simulator it is memory of this process."""
    dtype = np.dtype(dtype)
    host = None
    if device.SIM:
        raw = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
        host = np.ndarray(shape, dtype, raw)
    return Array(host, address, tuple(shape), dtype, None, None, None)


def _arguments(types, words):
    """Arguments of a user's function out of their words: numbers of NumPy, and arrays."""
    made, words = [], list(words)
    for dtype, n_axes, _ in types:
        word, shape = words[0], tuple(words[1 : 1 + n_axes])
        del words[: 1 + n_axes]
        made.append(_array(word, shape, dtype) if n_axes else _number(word, dtype))
    return tuple(made)


def _number(word, dtype):
    """The number of a type in the low half of a word."""
    return np.array([word], np.uint64).view(dtype)[0]


class _Call:
    """A plain kernel, prepared and started as a KernelCall of epmoe.kernels is. options: of its factory."""

    def __init__(self, kernel, options):
        self.kernel, self.options = kernel, options

    def close(self):
        """Nothing is kept between launches."""

    def prepared(self, wanted):
        """What launches the kernel; as of a KernelCall."""
        return _Launch(self, wanted)


class _Launch:
    """start(*words) makes the page's arguments of the words that a fast kernel is given."""

    def __init__(self, call, wanted):
        self.kernel, self.options, self.cfg = call.kernel, call.options, call.kernel.cfg
        self.wanted, self.n, self.at = wanted, wanted.num_tokens, wanted.regions
        name = self.kernel.__name__
        self.sends, self.waits = "_wait" not in name, "_async" not in name
        self._page = self._dispatch if name.startswith("dispatch") else self._combine

    def start(self, *words):
        """Launch."""
        kernel, wanted = self.kernel, self.wanted
        arguments, given = self._page(*words)
        grid, block = kernel.options.launch.grid(wanted.machine), kernel.block()
        kernel[grid, block, wanted.stream](
            *arguments, status=self.at["status"], timeout=wanted.timeout_s, **given
        )

    def _memory(self):
        """The page's arguments that say where messages go or, in a kernel that sends none, where they come."""
        at = self.at
        if not self.sends:
            return at["recv_buf_p"], at["recv_count_p"], at["ep_counters"]
        peers = tuple(at["recv_buf_ptrs"]), tuple(at["recv_count_ptrs"])
        return at["send_buf_p"], *peers, at["ep_counters"]

    def _dispatch(self, tokens, ids, clean, scale, *words):
        """(arguments, keywords) of the dispatch kernels."""
        cfg, fmt, n, made, given = self.cfg, formats.of(self.cfg), self.n, [], {}
        if self.sends:
            made.append(_array(tokens, (n, cfg.hidden), ml_dtypes.bfloat16))
            made.append(_array(ids, (n, cfg.top_k), np.int32))
            given["clean_topk_ids"] = clean
            has_function = self.options.get("input_scale") is not None
            given["input_scales_args"] = () if has_function else (_number(scale, np.float32),)
        if self.waits:
            *outputs, rows, row_offsets, expert_ids, src_info, recv_counts = words
            of = fmt.outputs(cfg, rows)
            made.append({n: _array(at, *of[n]) for n, at in zip(fmt.output_fields, outputs)})
            made.append(_array(row_offsets, (cfg.n_groups + 1,), np.uint32))
            made.append(_array(expert_ids, (cfg.n_groups,), np.int32))
            made.append(_array(src_info, (rows, 2), np.int32))
            given["recv_counts"] = recv_counts
        if cfg.fused_shared_expert and not self.sends:
            given |= dict(send_buf_p=self.at["send_buf_p"], num_tokens=n)
        return (*made, *self._memory(), self.wanted.my_rank), given

    def _combine(self, rows, src_info, n_rows, output, ids, weights, *words):
        """(arguments, keywords) of the combine kernels; an array of router weights is the argument of a function."""
        cfg, n, made, given = self.cfg, self.n, [], {}
        dtype, my_rank = COMBINE_DTYPE[cfg.combine_dtype], self.wanted.my_rank
        if self.sends:
            made.append(_array(rows, (n_rows, cfg.hidden), dtype))
            made.append(_array(src_info, (n_rows, 2), np.int32))
        if not self.waits:
            return (*made, *self._memory(), my_rank), given
        reduces, types = self.options.get("router_weights", "array"), self.wanted.weights_types
        n_words = sum(1 + n_axes for _, n_axes, _ in types)
        given["router_weights_args"] = _arguments(types, words[:n_words])
        if reduces == "array":
            given["router_weights_args"] = (_array(weights, (n, cfg.top_k), np.float32),)
        given["epilogue_args"] = _arguments(self.wanted.epilogue_types, words[n_words:])
        if cfg.fused_shared_expert and not self.sends:
            given["input_tokens"] = rows
        shape = (n, cfg.hidden) if reduces else (n, cfg.top_k, cfg.hidden)
        last = [_array(ids, (n, cfg.top_k), np.int32), my_rank]
        if not self.sends:
            last.reverse()
        return (*made, _array(output, shape, dtype), *self._memory(), *last), given


def _factory(name):
    def make(self, cfg, launch=None, **options):
        """As in epmoe.kernels."""
        if name in ("combine_wait_kernel", "combine_kernel"):
            options = {"router_weights": "array"} | options
        on_page = {}
        for what, function in options.items():
            if function == "array":
                on_page[PAGE_NAMES[what]] = self._plain.given_weights
            elif function is not None:
                on_page[PAGE_NAMES[what]] = user_functions.checked(what, function)
        return _Call(getattr(self._plain, name)(cfg, launch, **on_page), options)

    make.__name__ = name
    return make


class Factories:
    """The names of epmoe.kernels, for the plain kernels of a package: epmoe.kernels.plain, or an edited copy of it."""

    fused_silu_kernel = staticmethod(fused_silu_kernel)
    dispatch_async_kernel = _factory("dispatch_async_kernel")
    dispatch_wait_kernel = _factory("dispatch_wait_kernel")
    dispatch_kernel = _factory("dispatch_kernel")
    combine_async_kernel = _factory("combine_async_kernel")
    combine_wait_kernel = _factory("combine_wait_kernel")
    combine_kernel = _factory("combine_kernel")

    def __init__(self, package=plain):
        self._plain = package
