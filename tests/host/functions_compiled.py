"""Prints as JSON what the GPU's compiler says to functions of the caller: {name: "" or the EPValueError's message}.

Run with EPMOE_DEVICE=gpu in a process of its own. Needs no GPU.
"""

import json
import sys
import types

import numpy as np

from epmoe import fma_rn
from epmoe.host.user_functions import check_function
from epmoe.kernels import ArrayArg
from epmoe_ref.errors import EPValueError

WHERE = types.SimpleNamespace(compute_capability=(9, 0))
TABLE, WRITABLE = [ArrayArg(0, (4, 16), "float32", writable) for writable in (False, True)]


def right(token, col, value, table):
    return fma_rn(value, table[token, col], np.float32(1))


def whole(token, col, value, table):
    return token


def nothing(token, col, value, table):
    pass


def sometimes(token, col, value, table):
    if token > 3:
        return value


def text(token, col, value, table):
    return "1"


def imaginary(token, col, value, table):
    return 1j * value


def several(token, col, value, table):
    return value, value


def row(token, col, value, table):
    return table[token]


def store(token, col, value, table):
    table[token, col] = value


CASES = {
    f"epilogue {f.__name__}": ("epilogue", f, TABLE)
    for f in (right, whole, nothing, sometimes, text, imaginary, several, row, store)
}
CASES |= {
    f"elementwise_lambda_fn {name}": ("elementwise_lambda_fn", f, table)
    for name, f, table in (("store", store, WRITABLE), ("store, read-only", store, TABLE), ("right", right, WRITABLE))
}


def said(what, function, table):
    try:
        check_function(WHERE, function, what, (table,))
    except EPValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    json.dump({name: said(*case) for name, case in CASES.items()}, sys.stdout)
