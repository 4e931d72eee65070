"""Runs the plain kernels for an ExpertParallel: turns a phase's addresses into the arguments of the specification page.

The factories have the names and interface of epmoe.kernels, so the phases of a round need not know which kernels they
launch. A launch passes arrays where the page has tensors, and addresses where it has pointers.
"""

from functools import partial, partialmethod
from itertools import islice
from types import SimpleNamespace

import numpy as np

from epmoe import device
from epmoe.host.arrays import Array
from epmoe.host.dlpack import numpy_at
from epmoe.kernels import formats, fused_silu_kernel, plain, user_functions
from epmoe.kernels.plain.arguments import arrays

PAGE_NAMES = {  # function argument of the fast kernels' factories: its name on the page
    "input_scale": "input_scales_wrapper",
    "router_weights": "router_weights_wrapper",
    "epilogue": "epilogue_fn",
    "elementwise_lambda_fn": "elementwise_lambda_fn",
}


def _array(address, shape, dtype):
    """C-contiguous memory at an address as an Array; in the simulator also as a NumPy array."""
    host = numpy_at(address, shape, dtype) if device.SIM else None
    return Array(host, address, tuple(shape), np.dtype(dtype), None, None, None)


def _number(word, dtype):
    """The number of this dtype in the low bytes of a word."""
    return np.array([word], np.uint64).view(dtype)[0]


def _arguments(types, words):
    """Arguments of a user's function, read from an iterator over their words: NumPy numbers, and Arrays."""
    taken = [(dtype, next(words), tuple(islice(words, n_axes))) for dtype, n_axes, _ in types]
    return tuple(_array(w, shape, d) if shape else _number(w, d) for d, w, shape in taken)


class _Call:
    """A plain kernel with the interface of epmoe.kernels' KernelCall. options: of its factory."""

    def __init__(self, kernel, options):
        self.kernel, self.options, self.cfg = kernel, options, kernel.cfg
        dispatches = kernel.__name__.startswith("dispatch")
        self._named = self._of_dispatch if dispatches else self._of_combine

    def close(self):
        """Nothing is kept between launches."""

    def prepared(self, wanted):
        """An object whose start(*words) launches the kernel, like a KernelCall's."""
        return SimpleNamespace(start=partial(self._start, wanted))

    def _start(self, wanted, *words):
        """Launch with the page's arguments, made from the words that a fast kernel would get."""
        kernel, named = self.kernel, self._named(wanted, *words)
        named |= wanted.regions | dict(my_rank=wanted.my_rank, num_tokens=wanted.num_tokens)
        for name, (dtype, shape) in arrays(self.cfg, kernel.__name__, kernel.options).items():
            if name in kernel.page_arguments:
                named[name] = _array(named[name], [named.get(n, n) for n in shape], dtype)
        where = kernel.options.launch.grid(wanted.machine), kernel.block(), wanted.stream
        kernel.launch(where, named, named["status"], wanted.timeout_s)

    def _of_dispatch(self, wanted, *words):
        """Named values for dispatch: {name: argument, or address of an array, or length of an axis}."""
        fmt, sent = formats.of(self.cfg), ("input_tokens", "topk_ids", "clean_topk_ids", "scale")
        made = "rows", "row_offsets", "expert_ids", "src_info", "recv_counts"
        named = dict(zip((*sent, *fmt.output_fields, *made), words))
        of, scale = fmt.outputs(self.cfg, named["rows"]), _number(named["scale"], np.float32)
        named["format_handler"] = {n: _array(named[n], *of[n]) for n in fmt.output_fields}
        has_function = self.options.get("input_scale") is not None
        return named | dict(input_scales_args=() if has_function else (scale,))

    def _of_combine(self, wanted, *words):
        """The same for combine. An array of router weights becomes the argument of a function."""
        names = "input_tokens", "src_info", "rows", "output_tokens", "topk_ids", "router_weights"
        named, of_functions = dict(zip(names, words)), iter(words[len(names) :])
        weights_args = _arguments(wanted.weights_types, of_functions)
        if self.options.get("router_weights") == "array":
            shape = wanted.num_tokens, self.cfg.top_k
            weights_args = (_array(named["router_weights"], shape, np.float32),)
        named["epilogue_args"] = _arguments(wanted.epilogue_types, of_functions)
        return named | {"router_weights_args": weights_args, "input rows": named["rows"]}


class Factories:
    """The names of epmoe.kernels, for the plain kernels of a package: epmoe.kernels.plain, or an edited copy of it."""

    def __init__(self, package=plain):
        self._plain = package

    def _make(self, name, cfg, launch=None, **options):
        """Make a plain kernel from the arguments of epmoe.kernels' factory of this name."""
        on_page = {}
        for what, function in options.items():
            if function == "array":
                on_page[PAGE_NAMES[what]] = self._plain.given_weights
            elif function is not None:
                on_page[PAGE_NAMES[what]] = user_functions.checked(what, function)
        return _Call(getattr(self._plain, name)(cfg, launch, **on_page), options)

    fused_silu_kernel = staticmethod(fused_silu_kernel)
    dispatch_async_kernel = partialmethod(_make, "dispatch_async_kernel")
    dispatch_wait_kernel = partialmethod(_make, "dispatch_wait_kernel")
    dispatch_kernel = partialmethod(_make, "dispatch_kernel")
    combine_async_kernel = partialmethod(_make, "combine_async_kernel")
    combine_wait_kernel = partialmethod(_make, "combine_wait_kernel")
    combine_kernel = partialmethod(_make, "combine_kernel")
