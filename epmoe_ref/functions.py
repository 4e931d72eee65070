"""Checks of the caller's functions (epilogue, output lambda, router weights): their parameters and return values."""

import inspect

import numpy as np

from .errors import EPValueError


def check_function(name: str, function, parameters: tuple[str, ...], args, args_name: str | None = None) -> None:
    """EPValueError unless `function` accepts the parameters and one more argument for each entry of args.

    If function is None, args must be empty. args_name: what errors call args; by default `name`_args.
    """
    args_name = args_name or f"{name}_args"
    if function is None:
        if args:
            raise EPValueError(
                f"{args_name} has {len(args)} entries, and there is no {name} function that would take "
                "them: leave them out"
            )
        return
    if not callable(function):
        raise EPValueError(
            f"{name} is of type {type(function).__name__} and must be a function "
            f"({', '.join(parameters)}, *{args_name})"
        )
    try:
        inspect.signature(function).bind(*parameters, *args)
    except TypeError as error:
        raise EPValueError(
            f"{name} cannot be called with ({', '.join(parameters)}) and {len(args)} of {args_name}: {error}"
        ) from None
    except ValueError:
        pass  # built-in functions and NumPy's have no signature


def returned_values(name: str, values, shape: tuple[int, ...]) -> np.ndarray:
    """The return value of a value function as float32, broadcast to `shape` (the shape of its index arrays, broadcast).

    values: a number, or an array of numbers with as many axes as `shape`, each of its length or 1. Errors: EPValueError
    naming the function, for None (returned by a function that stores its result itself), text, a list, complex numbers,
    and any other shape.
    """
    remedy = "return one real number for each element, or arrays computed from the arguments"
    if values is None:
        raise EPValueError(
            f"{name} returned None and must return a value: return the number to use; a function that "
            "stores its result itself is given as elementwise_lambda_fn"
        )
    array = None if isinstance(values, (list, tuple, str, bytes)) else np.asarray(values)
    if array is None or not (np.issubdtype(array.dtype, np.number) or array.dtype.kind in "bV"):
        what = type(values).__name__ if array is None or array.ndim == 0 else f"an array of {array.dtype}"
        raise EPValueError(f"{name} returned {what} and must return numbers that float32 can stand for: {remedy}")
    if array.dtype.kind == "c":
        raise EPValueError(f"{name} returned complex numbers and must return real ones: {remedy}")
    fits = len(array.shape) == len(shape) and all(got in (1, want) for got, want in zip(array.shape, shape))
    if array.ndim and not fits:
        raise EPValueError(
            f"{name} returned shape {list(array.shape)} and must return {list(shape)}, or 1 in place of "
            f"either: {remedy}"
        )
    with np.errstate(all="ignore"):
        return np.broadcast_to(array.astype(np.float32), shape)
