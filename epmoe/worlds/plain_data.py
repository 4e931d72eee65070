"""Encodes plain data for messages between processes. It uses JSON, never pickle, so received bytes cannot run code.

None, booleans, numbers, strings, bytes, NumPy scalars and arrays, and tuples, lists and dicts of these are restored
exactly. The sender refuses anything else; convert it into a dict or a tuple first.
"""

import base64
import json

import ml_dtypes  # noqa: F401     (names its types for np.dtype)
import numpy as np


def encode(value) -> bytes:
    """Plain data as bytes. Raises TypeError, naming the type, for anything else."""
    return json.dumps(_tagged(value)).encode()


def decode(raw):
    """Plain data from bytes. Raises ValueError for bytes that encode() did not make."""
    try:
        return _untagged(json.loads(bytes(raw)))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"these bytes are not plain data ({type(error).__name__}: {error})") from None


def _tagged(value):
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind != "O" and value.dtype.names is None:
        array = np.ascontiguousarray(value)
        raw = base64.b64encode(array.tobytes()).decode()
        return {"array": [_name(array.dtype), list(np.shape(value)), raw, isinstance(value, np.generic)]}
    if type(value) is list:
        return {"list": [_tagged(one) for one in value]}
    if type(value) is tuple:
        return {"tuple": [_tagged(one) for one in value]}
    if type(value) is dict:
        return {"dict": [[_tagged(name), _tagged(one)] for name, one in value.items()]}
    raise TypeError(
        f"a {type(value).__name__} is not plain data: ranks can exchange numbers, strings, bytes, arrays, "
        "and tuples, lists and dicts of these"
    )


def _name(dtype):
    return dtype.name if dtype.kind == "V" else dtype.str


def _untagged(value):
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "bytes":
        return base64.b64decode(held)
    if kind == "array":
        name, shape, raw, is_scalar = held
        array = np.frombuffer(base64.b64decode(raw), np.dtype(name)).reshape(shape).copy()
        return array[()] if is_scalar else array
    if kind == "dict":
        return {_untagged(name): _untagged(one) for name, one in held}
    return {"list": list, "tuple": tuple}[kind](_untagged(one) for one in held)
