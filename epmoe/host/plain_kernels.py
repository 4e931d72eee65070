"""The plain kernels for an ExpertParallel: what a phase has by address becomes the page's arguments.

Factories of the names and the plans that epmoe.kernels has, so that the phases of a round need not know which kernels
they launch. A launch gets arrays where the page has tensors, and addresses where it has pointers.
"""

import ctypes
import math
from functools import partial
from itertools import islice
from types import SimpleNamespace

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


def _number(word, dtype):
    """The number of a type in the low half of a word."""
    return np.array([word], np.uint64).view(dtype)[0]


def _arguments(types, words):
    """Arguments of a user's function out of an iterator over their words: numbers of NumPy, and arrays."""
    taken = [(dtype, next(words), tuple(islice(words, n_axes))) for dtype, n_axes, _ in types]
    return tuple(_array(w, shape, d) if shape else _number(w, d) for d, w, shape in taken)


class _Call:
    """A plain kernel, prepared and started as a KernelCall of epmoe.kernels is. options: of its factory."""

    def __init__(self, kernel, options):
        self.kernel, self.options, self.cfg = kernel, options, kernel.cfg
        dispatches = kernel.__name__.startswith("dispatch")
        self._named = self._of_dispatch if dispatches else self._of_combine

    def close(self):
        """Nothing is kept between launches."""

    def prepared(self, wanted):
        """What launches the kernel; as of a KernelCall."""
        return SimpleNamespace(start=partial(self._start, wanted))

    def _start(self, wanted, *words):
        """Launch with the page's arguments, made of the words that a fast kernel is given."""
        kernel = self.kernel
        arrays, others = self._named(wanted, *words)
        others |= wanted.regions | dict(my_rank=wanted.my_rank, num_tokens=wanted.num_tokens)
        page = [_array(*arrays[n]) if n in arrays else others[n] for n in kernel.page_arguments]
        behind = kernel.parameters[len(page) + 2 :]  # status and timeout_ns
        kernel[kernel.options.launch.grid(wanted.machine), kernel.block(), wanted.stream](
            *page,
            status=others["status"],
            timeout=wanted.timeout_s,
            **{name: others[name] for name in behind},
        )

    def _of_dispatch(self, wanted, tokens, ids, clean, scale, *words):
        """({name: (address, shape, dtype)}, {name: argument}) of what the dispatch kernels take."""
        *outputs, rows, row_offsets, expert_ids, src_info, recv_counts = words
        cfg, n, fmt = self.cfg, wanted.num_tokens, formats.of(self.cfg)
        arrays = dict(
            input_tokens=(tokens, (n, cfg.hidden), ml_dtypes.bfloat16),
            topk_ids=(ids, (n, cfg.top_k), np.int32),
            row_offsets=(row_offsets, (cfg.n_groups + 1,), np.uint32),
            expert_ids=(expert_ids, (cfg.n_groups,), np.int32),
            src_info=(src_info, (rows, 2), np.int32),
        )
        of, has_function = fmt.outputs(cfg, rows), self.options.get("input_scale") is not None
        return arrays, dict(
            format_handler={n: _array(at, *of[n]) for n, at in zip(fmt.output_fields, outputs)},
            clean_topk_ids=clean,
            recv_counts=recv_counts,
            input_scales_args=() if has_function else (_number(scale, np.float32),),
        )

    def _of_combine(self, wanted, rows, src_info, n_rows, output, ids, weights, *words):
        """The same of the combine kernels; an array of router weights is the argument of a function."""
        cfg, n, reduces = self.cfg, wanted.num_tokens, self.options.get("router_weights")
        dtype, of_functions = COMBINE_DTYPE[cfg.combine_dtype], iter(words)
        shape = (n, cfg.hidden) if reduces else (n, cfg.top_k, cfg.hidden)
        arrays = dict(
            input_tokens=(rows, (n_rows, cfg.hidden), dtype),
            src_info=(src_info, (n_rows, 2), np.int32),
            output_tokens=(output, shape, dtype),
            topk_ids=(ids, (n, cfg.top_k), np.int32),
        )
        weights_args = _arguments(wanted.weights_types, of_functions)
        if reduces == "array":
            weights_args = (_array(weights, (n, cfg.top_k), np.float32),)
        return arrays, dict(
            input_tokens=rows,  # where a kernel takes the shared expert's rows by address
            router_weights_args=weights_args,
            epilogue_args=_arguments(wanted.epilogue_types, of_functions),
        )


_DISPATCH = "dispatch_async_kernel", "dispatch_wait_kernel", "dispatch_kernel"
_COMBINE = "combine_async_kernel", "combine_wait_kernel", "combine_kernel"


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
    dispatch_async_kernel, dispatch_wait_kernel, dispatch_kernel = map(_factory, _DISPATCH)
    combine_async_kernel, combine_wait_kernel, combine_kernel = map(_factory, _COMBINE)

    def __init__(self, package=plain):
        self._plain = package
