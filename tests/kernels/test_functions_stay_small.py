"""Device functions of the fast kernels take few parameters: a reader can see what each one needs."""

import ast
from pathlib import Path

from epmoe import kernels

FOLDER = Path(kernels.__file__).parent
MOST_PARAMETERS = 7


def device_functions(source):
    """(name, number of parameters) of the functions that @device_fn marks, lambdas apart."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            marks = {ast.unparse(mark) for mark in node.decorator_list}
            if "device_fn" in marks:
                yield node.name, len(node.args.args) + len(node.args.kwonlyargs)


def test_parameters_are_counted():
    source = "@device_fn\ndef f(a, b, *, c):\n    pass\n\ndef g(a):\n    pass\n"
    assert list(device_functions(source)) == [("f", 3)]


def test_no_device_function_takes_more_than_seven_parameters():
    files = [*FOLDER.glob("*.py"), *FOLDER.glob("pairs/*.py"), *FOLDER.glob("formats/*.py")]
    found = [
        (file.name, *function) for file in files for function in device_functions(file.read_text())
    ]
    assert len(found) > 150
    assert [f for f in found if f[2] > MOST_PARAMETERS] == []
