"""Every public name says what it does: functions, classes, and the methods and properties that they show."""

import inspect
from importlib import import_module

import pytest

from epmoe_ref import fused_a2a

MODULES = (
    "epmoe",
    "epmoe_ref",
    "epmoe.check",
    "epmoe.fused_a2a",
    "epmoe_ref.fused_a2a",
    "epmoe_ref.formats",
    "epmoe.kernels",
)


def public(module):
    """(name, object) of what a package offers, and of what its classes show themselves."""
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            continue
        yield f"{module.__name__}.{name}", thing
        if inspect.isclass(thing):
            for attribute, value in vars(thing).items():
                found = getattr(value, "__func__", value)
                if not attribute.startswith("_") and (inspect.isfunction(found) or isinstance(found, property)):
                    yield f"{module.__name__}.{name}.{attribute}", found


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module):
    names = dict(public(import_module(module)))
    silent = [name for name, thing in names.items() if not inspect.getdoc(thing)]
    assert len(names) >= 5 and silent == []


SPECIFIED = [
    *("epmoe_ref.dispatch", "epmoe_ref.combine", "epmoe_ref.fused_silu"),
    *(f"epmoe_ref.fused_a2a.{name}" for name in fused_a2a.__all__ if name.endswith(("_forward", "_backward"))),
]


@pytest.mark.parametrize("function", SPECIFIED)
def test_the_specification_tells_of_every_argument_of_errors_and_of_its_source(function):
    module, _, name = function.rpartition(".")
    function = getattr(import_module(module), name)
    text = inspect.getdoc(function)
    silent = [a for a in inspect.signature(function).parameters if a not in text and a not in ("cfg", "handle")]
    assert silent == [] and "Errors: " in text and "Source: " in text
