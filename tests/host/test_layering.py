"""Imports go down only: the table of layers, and what epmoe may know of the reference."""

import ast
import functools
import sys
from pathlib import Path

import pytest
from commands_shown import python

ROOT = Path(__file__).resolve().parents[2]
TOP = ROOT / "epmoe" / "__init__.py"  # names of all layers, imported when they are first used

# From the bottom up; a module may import from its own layer and from those before it.
LAYERS = [
    ("epmoe.device", "epmoe.capability", "epmoe.provenance"),
    # the layout asks the formats in kernels for their sizes; plain kernels take the arrays that the host side takes
    ("epmoe.layout", "epmoe.kernels", "epmoe.worlds", "epmoe.host.arrays", "epmoe.host.dlpack"),
    ("epmoe.host", "epmoe.expert_parallel"),
    ("epmoe.fused_a2a", "epmoe.torch"),
]
# may import the reference's semantics
COMPARING = "check", "verify", "vectors", "explain", "lessons", "mutants", "puzzles", "routing"
SHARED = {"epmoe_ref.config", "epmoe_ref.errors"}


def sources(package):
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imported(path):
    """Absolute names of all modules that a file imports, relative ones resolved, submodules as names of their own."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: package.count(".") + 2 - node.level]
                base = ".".join([*above, *filter(None, [base])])
            for alias in node.names:
                sub = ROOT.joinpath(*base.split("."), alias.name)
                is_module = sub.with_suffix(".py").exists() or sub.is_dir()
                names.add(f"{base}.{alias.name}" if is_module else base)
    return names


def layer(module):
    for n, names in enumerate(LAYERS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return n
    return len(LAYERS)  # the command line and what compares


def found_in(package, wrong):
    """{module: imports that are wrong there} of a package; wrong(path, its imports) -> those that are."""
    found = {module_name(path): wrong(path, imported(path)) for path in sources(package)}
    assert len(found) > 20, "the package's modules were looked at"
    return {module: sorted(names) for module, names in found.items() if names}


def test_the_reference_needs_numpy_and_ml_dtypes_only():
    allowed = {"epmoe_ref", "numpy", "ml_dtypes", *sys.stdlib_module_names}

    def wrong(path, names):
        more = {"hypothesis"} if path.name == "strategies.py" else set()
        return {name for name in names if name.split(".")[0] not in allowed | more}

    assert found_in("epmoe_ref", wrong) == {}


def test_epmoe_knows_sizes_and_errors_of_the_reference_and_no_more():
    def wrong(path, names):
        comparing = str(path.relative_to(TOP.parent)).startswith(COMPARING)
        return set() if comparing else {n for n in names if n.split(".")[0] == "epmoe_ref"} - SHARED

    assert found_in("epmoe", wrong) == {}


def test_imports_go_down_only():
    def wrong(path, names):
        here = len(LAYERS) if path == TOP else layer(module_name(path))
        return {n for n in names if n.startswith("epmoe.") and layer(n) > here}

    assert found_in("epmoe", wrong) == {}


def test_no_drawers():
    packages = "epmoe", "epmoe_ref", "tests", "benchmarks"
    names = {path.name for package in packages for path in sources(package)}
    assert not names & {"utils.py", "helpers.py", "common.py", "misc.py"}


def test_importing_epmoe_loads_nothing_heavy(monkeypatch):
    monkeypatch.delenv("EPMOE_DEVICE")
    heavy = ("numba", "numpy", "greenlet", "mpi4py", "rich", "cuda", "torch")
    done = python("-c", f"import epmoe, sys; print([m for m in {heavy} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("environment", [{"NUMBA_ENABLE_CUDASIM": "1"}, {"EPMOE_DEVICE": "sim"}], ids=str)
@pytest.mark.by_day(1)
def test_the_simulator_needs_no_numba(environment, monkeypatch):
    monkeypatch.delenv("EPMOE_DEVICE")
    code = (
        "import sys; sys.modules['numba'] = None; sys.modules['mpi4py'] = None\n"
        "from epmoe import *; ExpertParallel(EPConfig(1, 2, 1, 8, 1), LocalWorld(1)).close(); print('fine')"
    )
    done = python("-c", code, **environment)
    assert done.stdout.strip() == "fine", done.stderr


def test_every_public_name_resolves():
    import epmoe

    assert all(getattr(epmoe, name) is not None for name in epmoe.__all__)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        epmoe.nothing_like_it
