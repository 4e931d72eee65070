"""Checks the arguments of the six factories and of launches before anything is launched. Names: docs/pages.md."""

import inspect
from collections import namedtuple
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import ml_dtypes
import numpy as np

from epmoe import layout
from epmoe.host.arrays import Array, view
from epmoe_ref.errors import EPValueError

from .. import formats
from ..launch import LaunchConfig, check_limits

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}

# Names on the specification's pages (docs/pages.md) that repeat a value of EPConfig.
SAME_AS_CONFIG = ("n_experts", "n_ranks", "max_tokens_per_rank", "p2p_world_size", "fused_shared_expert", "skip_a2a",
                  "use_shmem", "allreduce_world_size", "top_k")
EVERY = (*SAME_AS_CONFIG, "num_threads", "n_sms", "msg_bytes")
DISPATCH = (*EVERY, "token_fmt_type")
DISPATCH_SENDS = (*DISPATCH, "input_type", "input_scales_wrapper")
COMBINE = (*EVERY, "input_type")
COMBINE_REDUCES = (*COMBINE, "output_type", "router_weights_wrapper", "elementwise_lambda_fn", "epilogue_fn")


class Options(NamedTuple):
    """The compile-time choices of one kernel.

    input_type: dtype of input_tokens, a key of DTYPES. input_scale: function (i, *args) -> float32. router_weights:
    function (token, k, *args) -> float32, or None. elementwise: function (token, col, value, *args), or None.
    elementwise_stores: whether `elementwise` stores its results itself. launch: LaunchConfig.
    """

    input_type: str
    input_scale: object
    router_weights: object
    elementwise: object
    elementwise_stores: bool
    launch: LaunchConfig


def given_scale(i, scale):
    """input_scales_wrapper if the caller gives none: the one number in input_scales_args is the scale."""
    return scale


def given_weights(token, k, weights):
    """A router_weights_wrapper that reads the one array of router_weights_args, float32 [num_tokens, top_k]."""
    return weights[token, k]


def options(cfg, launch, page, allowed) -> Options:
    """Checks the keywords of a factory (page) and returns them as Options. Errors: EPValueError."""
    unknown = sorted(set(page) - set(allowed))
    if unknown:
        raise EPValueError(f"{', '.join(unknown)}: not a compile-time choice of this kernel; it takes "
                           f"{', '.join(sorted(allowed))}")
    check_limits(cfg, "plain")
    dispatches = "token_fmt_type" in allowed
    _restated(cfg, page, dispatches)
    launch = launch or LaunchConfig()
    if "n_sms" in page or "num_threads" in page:
        launch = LaunchConfig(page.get("n_sms", launch.n_sms), page.get("num_threads", launch.num_threads))
    weights, value = page.get("router_weights_wrapper"), page.get("epilogue_fn")
    lambda_fn = page.get("elementwise_lambda_fn")
    if value is not None and lambda_fn is not None:
        raise EPValueError("epilogue_fn and elementwise_lambda_fn: give one; the first returns the value to store, the "
                           "second stores it itself")
    reduces = "output_type" in allowed
    if reduces and weights is None and (value or lambda_fn or cfg.fused_shared_expert):
        raise EPValueError("router_weights_wrapper=None returns the rows unreduced, which goes with neither "
                           "fused_shared_expert nor an epilogue: give router weights")
    _takes(page.get("input_scales_wrapper"), "input_scales_wrapper", 1)
    _takes(weights, "router_weights_wrapper", 2)
    _takes(value, "epilogue_fn", 3)
    _takes(lambda_fn, "elementwise_lambda_fn", 3)
    return Options(_input_type(cfg, page, dispatches), page.get("input_scales_wrapper") or given_scale, weights,
                   value or lambda_fn, lambda_fn is not None, launch)


def _restated(cfg, page, dispatches):
    said = {name: getattr(cfg, name) for name in SAME_AS_CONFIG}
    said.update(token_fmt_type=cfg.token_format, output_type=cfg.combine_dtype,
                msg_bytes=layout.message(cfg).msg_bytes if dispatches else layout.combine_msg_bytes(cfg))
    for name, given in page.items():
        if name in said and given != said[name]:
            raise EPValueError(f"{name}={given!r} differs from {said[name]!r}, which the EPConfig says: leave it out, "
                               "or make another EPConfig")


def _input_type(cfg, page, dispatches):
    usual = "bf16" if dispatches else cfg.combine_dtype
    given = page.get("input_type", usual)
    possible = tuple(DTYPES) if dispatches and cfg.token_format == "bf16" else (usual,)
    if given not in possible:
        raise EPValueError(f"input_type={given!r} must be {' or '.join(map(repr, possible))} here")
    return given


def _takes(function, what, n):
    """Raises unless the function takes n arguments, followed by those given at the launch."""
    if function is None:
        return
    if not callable(function):
        raise EPValueError(f"{what} is {function!r}: give a function of {n} arguments and of those given at the launch")
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds and len(kinds) < n:
        raise EPValueError(f"{what} takes {len(kinds)} arguments, {n} are needed, and those given at the launch")


def capacity(cfg) -> int:
    """The most rows, with padding, that one rank can receive: the length of output_tokens and src_info."""
    rows = cfg.n_src_ranks * cfg.max_tokens_per_rank * min(cfg.top_k, cfg.n_local_experts)
    rows += cfg.max_tokens_per_rank * cfg.fused_shared_expert
    return rows + (formats.of(cfg).pad_rows - 1) * cfg.n_groups


def arrays(cfg, kernel_name, options) -> dict:
    """{name: (dtype, shape)} of the array arguments. Axes that are named by the same str must have the same length."""
    int32, combine = np.dtype(np.int32), DTYPES[cfg.combine_dtype]
    ids = (int32, ("num_tokens", cfg.top_k))
    if kernel_name.startswith("dispatch"):
        return dict(input_tokens=(DTYPES[options.input_type], ("num_tokens", cfg.hidden)), topk_ids=ids,
                    row_offsets=(np.dtype(np.uint32), (cfg.n_groups + 1,)), expert_ids=(int32, (cfg.n_groups,)),
                    src_info=(int32, ("rows", 2)))
    tokens = ("num_tokens", cfg.hidden) if options.router_weights else ("num_tokens", cfg.top_k, cfg.hidden)
    return dict(input_tokens=(combine, ("input rows", cfg.hidden)), src_info=(int32, ("rows", 2)),
                output_tokens=(combine, tokens), topk_ids=ids)


def array(given, what, dtype, shape, lengths) -> Array:
    """Checks an array argument and returns it as an Array. lengths: {axis name: length} of the axes seen so far."""
    seen = given if isinstance(given, Array) else view(given, what)
    raw = dtype.kind == "V" and seen.dtype.kind in "Vui" and seen.dtype.itemsize == dtype.itemsize
    if seen.dtype != dtype and not raw:
        raise EPValueError(f"{what} has dtype {seen.dtype}, {dtype} is needed: convert it")
    wanted = tuple(lengths.setdefault(n, m) if isinstance(n, str) else n for n, m in zip(shape, seen.shape))
    if len(seen.shape) != len(shape) or seen.shape != wanted:
        names = ", ".join(f"{n}={lengths[n]}" if n in lengths else str(n) for n in shape)
        raise EPValueError(f"{what} has shape {seen.shape}, ({names}) is needed")
    if seen.strides is not None:
        raise EPValueError(f"{what} is not C-contiguous (strides {seen.strides}): copy it into one that is")
    return seen


def format_handler(cfg, given):
    """The format's output arrays as a NamedTuple of Array. given: a dict, or an object with these attributes."""
    fmt, rows = formats.of(cfg), capacity(cfg)
    made = {}
    for name in fmt.output_fields:
        value = given.get(name) if isinstance(given, dict) else getattr(given, name, None)
        if value is None:
            raise EPValueError(f"format_handler has no {name}; token_format={cfg.token_format!r} writes "
                               f"{', '.join(fmt.output_fields)}")
        made[name] = value if isinstance(value, Array) else view(value, f"format_handler.{name}")
    has = made["output_tokens"].shape[0]
    if has < rows:
        raise EPValueError(f"format_handler.output_tokens has {has} rows; {rows} are needed, the most that this "
                           "rank can receive")
    for name, (shape, dtype) in fmt.outputs(cfg, has).items():
        array(made[name], f"format_handler.{name}", np.dtype(dtype), shape, {})
    return _handler_class(fmt.output_fields)(**made)


@cache
def _handler_class(names):
    return namedtuple("FormatHandler", names)       # one class, or the same kernel would be compiled again


def stand_ins(cfg, kernel_name, options, parameters) -> dict:
    """Arrays without memory, of the right types, for compiling: {name: Array or NamedTuple}."""
    lengths = {"num_tokens": 1, "rows": capacity(cfg), "input rows": 1}

    def empty(dtype, shape):
        return Array(None, 0, tuple(lengths.get(n, n) for n in shape), dtype, None, None, None)

    made = {name: empty(*spec) for name, spec in arrays(cfg, kernel_name, options).items()}
    outputs = formats.of(cfg).outputs(cfg, capacity(cfg))
    made["format_handler"] = format_handler(cfg, SimpleNamespace(
        **{name: empty(np.dtype(dtype), shape) for name, (shape, dtype) in outputs.items()}))
    return {name: made[name] for name in parameters if name in made}
