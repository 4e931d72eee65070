"""Device functions of the fast kernels take few parameters: a reader can see what each one needs."""

import ast
from pathlib import Path

from epmoe import kernels

FOLDER = Path(kernels.__file__).parent
MOST_PARAMETERS = 7
MOST_IFS = 12


def fast_kernels():
    """Files of the fast kernels."""
    plain = FOLDER / "plain"
    return [file for file in FOLDER.rglob("*.py") if plain not in file.parents]


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
    found = [
        (file.name, *function)
        for file in fast_kernels()
        for function in device_functions(file.read_text())
    ]
    assert len(found) > 400
    assert [f for f in found if f[2] > MOST_PARAMETERS] == []


def kernels_of(source):
    """(name, number of ifs) of the functions that @kernel marks."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(mark).startswith("kernel") for mark in node.decorator_list
        ):
            yield node.name, sum(isinstance(n, (ast.If, ast.IfExp)) for n in ast.walk(node))


def test_ifs_are_counted():
    source = "@kernel(words=2)\ndef f(a):\n    if a:\n        return 1 if a > 1 else 0\n"
    assert list(kernels_of(source)) == [("f", 2)]


def test_no_kernel_has_more_than_twelve_ifs():
    found = [(file.name, *made) for file in fast_kernels() for made in kernels_of(file.read_text())]
    assert {"rows_dispatch", "rows_resend", "rows_combine"} <= {name for _, name, _ in found}
    assert [made for made in found if made[2] > MOST_IFS] == []
