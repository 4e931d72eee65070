"""Device functions that factories make anew are one function if they are equal, so that they are compiled once."""

from pathlib import Path


def test_equal_functions_are_one(gpu_side):
    same = gpu_side(Path(__file__).with_name("equal_functions.py"))
    equal = "equal closures", "closures of closures", "namespaces"
    assert same == {name: name in equal for name in same} and len(same) == 11
