"""The plain kernels for an ExpertParallel: what a phase has by address becomes the page's arguments.

Factories of the names and the calls that epmoe.kernels has, so that the phases of a round need not know which kernels
they launch. A launch gets arrays where the page has tensors, and addresses where it has pointers.
"""

import ctypes
import math

import ml_dtypes
import numpy as np

from epmoe import device
from epmoe.host.arrays import Array
from epmoe.kernels import ArrayArg, formats, fused_silu_kernel, plain, returned

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


def _arguments(args):
    """Arguments of a user's function: numbers of NumPy, and arrays."""
    return tuple(
        _array(arg.address, arg.shape, arg.dtype)
        if isinstance(arg, ArrayArg)
        else np.dtype(arg.dtype).type(arg.value)
        for arg in args
    )


class _Call:
    """A plain kernel, called as a KernelCall of epmoe.kernels is.

    scales: the function of the input scale, or None. weights: "array", the function of router weights, or None.
    """

    def __init__(self, kernel, scales=None, weights=None):
        self.kernel, self.cfg, self.scales, self.weights = kernel, kernel.cfg, scales, weights

    def close(self):
        """Nothing is kept between launches."""

    def _launch(self, arguments, machine, stream, status, timeout_s, **given):
        grid, block = self.kernel.options.launch.grid(machine), self.kernel.block()
        self.kernel[grid, block, stream](*arguments, status=status, timeout=timeout_s, **given)

    def _sent(self, input_tokens, topk_ids):
        n = input_tokens.n
        return (
            _array(input_tokens.address, (n, self.cfg.hidden), ml_dtypes.bfloat16),
            _array(topk_ids, (n, self.cfg.top_k), np.int32),
        )

    def _grouped(self, handler, row_offsets, expert_ids, src_info):
        cfg, rows = self.cfg, handler.capacity
        outputs = {
            name: _array(handler.arrays[name], shape, dtype)
            for name, (shape, dtype) in formats.of(cfg).outputs(cfg, rows).items()
        }
        return (
            outputs,
            _array(row_offsets, (cfg.n_groups + 1,), np.uint32),
            _array(expert_ids, (cfg.n_groups,), np.int32),
            _array(src_info, (rows, 2), np.int32),
        )

    def _returned(self, input_tokens, src_info, n_rows):
        n_rows = plain.capacity(self.cfg) if n_rows is None else n_rows
        return (
            _array(input_tokens, (n_rows, self.cfg.hidden), OF_COMBINE[self.cfg.combine_dtype]),
            _array(src_info, (n_rows, 2), np.int32),
        )

    def _reduced(self, output_tokens, topk_ids):
        cfg, n = self.cfg, output_tokens.n
        shape = (n, cfg.hidden) if self.weights else (n, cfg.top_k, cfg.hidden)
        return (
            _array(output_tokens.address, shape, OF_COMBINE[cfg.combine_dtype]),
            _array(topk_ids, (n, cfg.top_k), np.int32),
        )

    def _of_functions(self, num_tokens, router_weights, router_weights_args, epilogue_args):
        """The launch's keywords for the functions; an array of router weights is the argument of one."""
        weights = _arguments(router_weights_args)
        if self.weights == "array":
            weights = (_array(router_weights, (num_tokens, self.cfg.top_k), np.float32),)
        return dict(router_weights_args=weights, epilogue_args=_arguments(epilogue_args))


class _DispatchAsync(_Call):
    def __call__(
        self,
        input_tokens,
        topk_ids,
        send_buf_p,
        recv_buf_ptrs,
        recv_count_ptrs,
        ep_counters,
        my_rank,
        *,
        clean_topk_ids,
        input_scale=1.0,
        **where,
    ):
        self._launch(
            (
                *self._sent(input_tokens, topk_ids),
                send_buf_p,
                tuple(recv_buf_ptrs),
                tuple(recv_count_ptrs),
                ep_counters,
                my_rank,
            ),
            clean_topk_ids=clean_topk_ids,
            **_scale(self, input_scale),
            **where,
        )


class _DispatchWait(_Call):
    def __call__(
        self,
        format_handler,
        row_offsets,
        expert_ids,
        src_info,
        recv_buf_p,
        recv_count_p,
        ep_counters,
        my_rank,
        *,
        recv_counts,
        input_tokens,
        send_buf_p,
        **where,
    ):
        if self.cfg.fused_shared_expert:
            where |= dict(send_buf_p=send_buf_p, num_tokens=input_tokens.n)
        self._launch(
            (
                *self._grouped(format_handler, row_offsets, expert_ids, src_info),
                recv_buf_p,
                recv_count_p,
                ep_counters,
                my_rank,
            ),
            recv_counts=recv_counts,
            **where,
        )


class _Dispatch(_Call):
    def __call__(
        self,
        input_tokens,
        topk_ids,
        format_handler,
        row_offsets,
        expert_ids,
        src_info,
        send_buf_p,
        recv_buf_ptrs,
        recv_count_ptrs,
        ep_counters,
        my_rank,
        *,
        clean_topk_ids,
        recv_counts,
        input_scale=1.0,
        **where,
    ):
        self._launch(
            (
                *self._sent(input_tokens, topk_ids),
                *self._grouped(format_handler, row_offsets, expert_ids, src_info),
                send_buf_p,
                tuple(recv_buf_ptrs),
                tuple(recv_count_ptrs),
                ep_counters,
                my_rank,
            ),
            clean_topk_ids=clean_topk_ids,
            recv_counts=recv_counts,
            **_scale(self, input_scale),
            **where,
        )


class _CombineAsync(_Call):
    def __call__(
        self,
        input_tokens,
        src_info,
        send_buf_p,
        recv_buf_ptrs,
        recv_count_ptrs,
        ep_counters,
        my_rank,
        *,
        n_rows=None,
        **where,
    ):
        self._launch(
            (
                *self._returned(input_tokens, src_info, n_rows),
                send_buf_p,
                tuple(recv_buf_ptrs),
                tuple(recv_count_ptrs),
                ep_counters,
                my_rank,
            ),
            **where,
        )


class _CombineWait(_Call):
    def __call__(
        self,
        output_tokens,
        recv_buf_p,
        recv_count_p,
        ep_counters,
        my_rank,
        topk_ids,
        *,
        router_weights=0,
        router_weights_args=(),
        epilogue_args=(),
        input_tokens=0,
        **where,
    ):
        output, ids = self._reduced(output_tokens, topk_ids)
        self._launch(
            (output, recv_buf_p, recv_count_p, ep_counters, my_rank, ids),
            **({"input_tokens": input_tokens} if self.cfg.fused_shared_expert else {}),
            **self._of_functions(
                output_tokens.n, router_weights, router_weights_args, epilogue_args
            ),
            **where,
        )


class _Combine(_Call):
    def __call__(
        self,
        input_tokens,
        src_info,
        output_tokens,
        send_buf_p,
        recv_buf_ptrs,
        recv_count_ptrs,
        ep_counters,
        topk_ids,
        my_rank,
        *,
        n_rows=None,
        router_weights=0,
        router_weights_args=(),
        epilogue_args=(),
        **where,
    ):
        output, ids = self._reduced(output_tokens, topk_ids)
        self._launch(
            (
                *self._returned(input_tokens, src_info, n_rows),
                output,
                send_buf_p,
                tuple(recv_buf_ptrs),
                tuple(recv_count_ptrs),
                ep_counters,
                ids,
                my_rank,
            ),
            **self._of_functions(
                output_tokens.n, router_weights, router_weights_args, epilogue_args
            ),
            **where,
        )


def _scale(call, input_scale):
    return {"input_scales_args": () if call.scales else (input_scale,)}


class Factories:
    """The names of epmoe.kernels, for the plain kernels of a package: epmoe.kernels.plain, or an edited copy of it."""

    fused_silu_kernel = staticmethod(fused_silu_kernel)

    def __init__(self, package=plain):
        self._plain = package

    def dispatch_async_kernel(self, cfg, launch=None, *, input_scale=None):
        """As that of epmoe.kernels."""
        return _DispatchAsync(
            self._plain.dispatch_async_kernel(cfg, launch, **_sending(input_scale)), input_scale
        )

    def dispatch_wait_kernel(self, cfg, launch=None):
        """As that of epmoe.kernels."""
        return _DispatchWait(self._plain.dispatch_wait_kernel(cfg, launch))

    def dispatch_kernel(self, cfg, launch=None, *, input_scale=None):
        """As that of epmoe.kernels."""
        return _Dispatch(
            self._plain.dispatch_kernel(cfg, launch, **_sending(input_scale)), input_scale
        )

    def combine_async_kernel(self, cfg, launch=None):
        """As that of epmoe.kernels."""
        return _CombineAsync(self._plain.combine_async_kernel(cfg, launch))

    def combine_wait_kernel(self, cfg, launch=None, *, router_weights="array", **functions):
        """As that of epmoe.kernels."""
        options = self._reducing(router_weights, functions)
        return _CombineWait(
            self._plain.combine_wait_kernel(cfg, launch, **options), weights=router_weights
        )

    def combine_kernel(self, cfg, launch=None, *, router_weights="array", **functions):
        """As that of epmoe.kernels."""
        options = self._reducing(router_weights, functions)
        return _Combine(self._plain.combine_kernel(cfg, launch, **options), weights=router_weights)

    def _reducing(self, router_weights, functions):
        """The page's keywords for router weights, epilogue and elementwise_lambda_fn."""
        if router_weights == "array":
            router_weights = self._plain.given_weights
        elif router_weights is not None:
            router_weights = returned.checked("router_weights", router_weights)
        names = {"epilogue": "epilogue_fn", "elementwise_lambda_fn": "elementwise_lambda_fn"}
        return {"router_weights_wrapper": router_weights} | {
            names[what]: returned.checked(what, fn)
            for what, fn in functions.items()
            if fn is not None
        }


def _sending(input_scale):
    return (
        {}
        if input_scale is None
        else {"input_scales_wrapper": returned.checked("input_scale", input_scale)}
    )
