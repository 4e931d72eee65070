"""Prints, as JSON, which device functions are one function. Run with EPMOE_DEVICE=gpu."""

import json
from types import ModuleType

import numpy as np

from epmoe.device import device_fn


def plus(n):
    return device_fn(lambda x: x + n)


def twice(function):
    return device_fn(lambda x: function(function(x)))


def of_namespace(**functions):
    made = ModuleType("functions")
    made.__dict__.update(functions)
    return device_fn(lambda x: made.add(x))


def with_default(n):
    def add(x, y=n):
        return x + y

    return device_fn(add)


table = {}
print(
    json.dumps(
        {
            "equal closures": plus(1) is plus(1),
            "closures of closures": twice(plus(1)) is twice(plus(1)),
            "namespaces": of_namespace(add=plus(1)) is of_namespace(add=plus(1)),
            "other numbers": plus(1) is plus(2),
            "other types": plus(1) is plus(True) or plus(1) is plus(1.0),
            "other signs of zero": plus(0.0) is plus(-0.0),
            "other signs of float32": plus(np.float32(0)) is plus(np.float32(-0.0)),
            "other namespaces": of_namespace(add=plus(1)) is of_namespace(add=plus(2)),
            "other functions": twice(plus(1)) is twice(plus(2)),
            "other defaults": with_default(1) is with_default(2),
            "what cannot be compared": plus(table) is plus(table),
        }
    )
)
