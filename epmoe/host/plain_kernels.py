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
from epmoe.kernels import formats, fused_silu_kernel, plain, user_functions

OF_COMBINE = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
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
    """A plain kernel, prepared and started as a KernelCall of epmoe.kernels is.

    scales: the function of the input scale, or None. weights: "array", the function of router weights, or None.
    """

    def __init__(self, kernel, scales=None, weights=None):
        self.kernel, self.cfg, self.scales, self.weights = kernel, kernel.cfg, scales, weights

    def close(self):
        """Nothing is kept between launches."""

    def prepared(self, wanted):
        """What launches the kernel; as of a KernelCall."""
        return _Launch(self, wanted)


class _Launch:
    """start(*words) makes the page's arguments of the words that a fast kernel is given."""

    def __init__(self, call, wanted):
        self.call, self.cfg, self.wanted = call, call.cfg, wanted
        self.n, self.my_rank, self.at = wanted.num_tokens, wanted.my_rank, wanted.regions

    def start(self, *words):
        """Launch."""
        kernel, wanted = self.call.kernel, self.wanted
        arguments, given = self.call.page(self, *words)
        grid, block = kernel.options.launch.grid(wanted.machine), kernel.block()
        kernel[grid, block, wanted.stream](
            *arguments, status=self.at["status"], timeout=wanted.timeout_s, **given
        )

    def peers(self):
        """The page's arguments that say where messages go."""
        return (
            self.at["send_buf_p"],
            tuple(self.at["recv_buf_ptrs"]),
            tuple(self.at["recv_count_ptrs"]),
            self.at["ep_counters"],
        )

    def own(self):
        """The page's arguments that say where messages come."""
        return self.at["recv_buf_p"], self.at["recv_count_p"], self.at["ep_counters"], self.my_rank

    def sent(self, input_tokens, topk_ids, clean_topk_ids, scale):
        """(arrays of what dispatch sends, keywords)."""
        given = dict(clean_topk_ids=clean_topk_ids)
        given["input_scales_args"] = () if self.call.scales else (_number(scale, np.float32),)
        return (
            _array(input_tokens, (self.n, self.cfg.hidden), ml_dtypes.bfloat16),
            _array(topk_ids, (self.n, self.cfg.top_k), np.int32),
        ), given

    def grouped(self, words):
        """(arrays that dispatch writes, keywords)."""
        cfg, fmt = self.cfg, formats.of(self.cfg)
        *addresses, rows, row_offsets, expert_ids, src_info, recv_counts = words
        shapes = fmt.outputs(cfg, rows)
        outputs = {
            name: _array(at, *shapes[name]) for name, at in zip(fmt.output_fields, addresses)
        }
        return (
            outputs,
            _array(row_offsets, (cfg.n_groups + 1,), np.uint32),
            _array(expert_ids, (cfg.n_groups,), np.int32),
            _array(src_info, (rows, 2), np.int32),
        ), dict(recv_counts=recv_counts)

    def returned(self, input_tokens, src_info, n_rows):
        """Arrays of what combine sends back."""
        return (
            _array(input_tokens, (n_rows, self.cfg.hidden), OF_COMBINE[self.cfg.combine_dtype]),
            _array(src_info, (n_rows, 2), np.int32),
        )

    def reduced(self, output_tokens, topk_ids, router_weights, words):
        """(output, ids, keywords for the functions; an array of router weights is the argument of one)."""
        cfg, n, reduces = self.cfg, self.n, self.call.weights
        shape = (n, cfg.hidden) if reduces else (n, cfg.top_k, cfg.hidden)
        of_weights, of_epilogue = self.wanted.weights_types, self.wanted.epilogue_types
        n_words = sum(1 + n_axes for _, n_axes, _ in of_weights)
        weights = _arguments(of_weights, words[:n_words])
        if reduces == "array":
            weights = (_array(router_weights, (n, cfg.top_k), np.float32),)
        epilogue = _arguments(of_epilogue, words[n_words:])
        return (
            _array(output_tokens, shape, OF_COMBINE[cfg.combine_dtype]),
            _array(topk_ids, (n, cfg.top_k), np.int32),
            dict(router_weights_args=weights, epilogue_args=epilogue),
        )


class _DispatchAsync(_Call):
    def page(self, p, x, ids, clean, scale, *_):
        arrays, given = p.sent(x, ids, clean, scale)
        return (*arrays, *p.peers(), p.my_rank), given


class _DispatchWait(_Call):
    def page(self, p, x, ids, clean, scale, *words):
        arrays, given = p.grouped(words)
        if self.cfg.fused_shared_expert:
            given |= dict(send_buf_p=p.at["send_buf_p"], num_tokens=p.n)
        return (*arrays, *p.own()), given


class _Dispatch(_Call):
    def page(self, p, x, ids, clean, scale, *words):
        (sent, given), (grouped, more) = p.sent(x, ids, clean, scale), p.grouped(words)
        return (*sent, *grouped, *p.peers(), p.my_rank), given | more


class _CombineAsync(_Call):
    def page(self, p, y, src_info, n_rows, *_):
        return (*p.returned(y, src_info, n_rows), *p.peers(), p.my_rank), {}


class _CombineWait(_Call):
    def page(self, p, y, src_info, n_rows, out, ids, weights, *words):
        out, ids, given = p.reduced(out, ids, weights, words)
        if self.cfg.fused_shared_expert:
            given["input_tokens"] = y
        return (out, *p.own(), ids), given


class _Combine(_Call):
    def page(self, p, y, src_info, n_rows, out, ids, weights, *words):
        out, ids, given = p.reduced(out, ids, weights, words)
        return (*p.returned(y, src_info, n_rows), out, *p.peers(), ids, p.my_rank), given


class Factories:
    """The names of epmoe.kernels, for the plain kernels of a package: epmoe.kernels.plain, or an edited copy of it."""

    fused_silu_kernel = staticmethod(fused_silu_kernel)

    def __init__(self, package=plain):
        self._plain = package

    def dispatch_async_kernel(self, cfg, launch=None, *, input_scale=None):
        """As in epmoe.kernels."""
        return _DispatchAsync(
            self._plain.dispatch_async_kernel(cfg, launch, **_sending(input_scale)), input_scale
        )

    def dispatch_wait_kernel(self, cfg, launch=None):
        """As in epmoe.kernels."""
        return _DispatchWait(self._plain.dispatch_wait_kernel(cfg, launch))

    def dispatch_kernel(self, cfg, launch=None, *, input_scale=None):
        """As in epmoe.kernels."""
        return _Dispatch(
            self._plain.dispatch_kernel(cfg, launch, **_sending(input_scale)), input_scale
        )

    def combine_async_kernel(self, cfg, launch=None):
        """As in epmoe.kernels."""
        return _CombineAsync(self._plain.combine_async_kernel(cfg, launch))

    def combine_wait_kernel(self, cfg, launch=None, *, router_weights="array", **functions):
        """As in epmoe.kernels."""
        options = self._reducing(router_weights, functions)
        return _CombineWait(
            self._plain.combine_wait_kernel(cfg, launch, **options), weights=router_weights
        )

    def combine_kernel(self, cfg, launch=None, *, router_weights="array", **functions):
        """As in epmoe.kernels."""
        options = self._reducing(router_weights, functions)
        return _Combine(self._plain.combine_kernel(cfg, launch, **options), weights=router_weights)

    def _reducing(self, router_weights, functions):
        """The page's keywords for router weights, epilogue and elementwise_lambda_fn."""
        if router_weights == "array":
            router_weights = self._plain.given_weights
        elif router_weights is not None:
            router_weights = user_functions.checked("router_weights", router_weights)
        names = {"epilogue": "epilogue_fn", "elementwise_lambda_fn": "elementwise_lambda_fn"}
        return {"router_weights_wrapper": router_weights} | {
            names[what]: user_functions.checked(what, fn)
            for what, fn in functions.items()
            if fn is not None
        }


def _sending(input_scale):
    return (
        {}
        if input_scale is None
        else {"input_scales_wrapper": user_functions.checked("input_scale", input_scale)}
    )
