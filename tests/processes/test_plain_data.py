"""Ranks exchange plain data: it is restored exactly, and received bytes run no code."""

import pickle

import ml_dtypes
import numpy as np
import pytest

from epmoe.worlds.plain_data import decode, encode

VALUES = [
    None,
    True,
    3,
    -2.5,
    float("inf"),
    "text \u00e9",
    b"\x00\xff",
    [],
    (),
    {},
    [1, (2, [3])],
    {"a": (1, None), 3: b"x"},
    {"list": [1]},
    2**70,
    np.float32(1.5),
    np.int64(-3),
]
ARRAYS = [
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.zeros((0, 4)),
    np.array(7, ">i4"),
    np.ones(3, bool),
    np.array([1.5, -0.0], ml_dtypes.bfloat16),
    np.array([0.5], ml_dtypes.float8_e4m3fn),
    np.eye(4)[:, ::2],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_it_went(value):
    back = decode(encode(value))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype} {a.shape}")
def test_an_array_comes_back_to_the_bit(array):
    back = decode(encode({"of": array}))["of"]
    assert back.dtype == array.dtype and back.shape == array.shape and back.tobytes() == array.tobytes()
    assert back.flags.writeable


class Trap:
    """Its pickle would run code."""

    def __reduce__(self):
        return pytest.fail, ("code of another process has run",)


@pytest.mark.parametrize("value", [Trap(), {1, 2}, print, np.array([Trap()])], ids=lambda v: type(v).__name__)
def test_what_is_no_plain_data_is_refused_where_it_is_sent(value):
    with pytest.raises(TypeError, match="is not plain data"):
        encode(value)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80",
        pickle.dumps(Trap()),
        b'{"array": ["O", [1], "AAAAAAAAAAA=", false]}',
        b'{"array": ["<i4", [2], "AAAA", false]}',
        b'{"Trap": []}',
        b'{"a": 1, "b": 2}',
        b'{"dict": [[1]]}',
    ],
)
def test_bytes_from_elsewhere_run_no_code(raw):
    with pytest.raises(ValueError):
        decode(raw)
