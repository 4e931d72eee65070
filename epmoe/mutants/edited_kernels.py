"""Loads an edited copy of the package epmoe.kernels under another name, beside the original.

Modules of epmoe.kernels import each other relatively, so a renamed copy is complete. It keeps the originals' file names
and line numbers, so reports name those.
"""

import importlib
import importlib.abc
import importlib.util
import sys
from pathlib import Path
from types import CodeType

from epmoe import device, kernels
from epmoe.device.intrinsics import INTRINSICS
from epmoe.mutants.plain_atomics import PLAIN_ATOMICS

FOLDER = Path(kernels.__file__).parent
NAME = "epmoe_edited_kernels"


def files():
    """Source files of the package, relative to it."""
    return sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py"))


def source_of(file):
    """The source of a file of epmoe.kernels."""
    return (FOLDER / file).read_text()


def is_of_copy(module):
    """Whether this is the name of the copy or of one of its modules."""
    return f"{module}.".startswith(f"{NAME}.")


class _Loader(importlib.abc.Loader):
    def __init__(self, finder, file):
        self.finder, self.file = finder, file

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        vars(module).update(PLAIN_ATOMICS)
        # helpers that an edit may use
        vars(module).update((name, getattr(device, name)) for name in INTRINSICS)
        vars(module).update(self.finder.names)
        exec(self.finder.code(self.file), vars(module))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of one copy."""

    compiled = {}  # file -> code of the unedited source

    def __init__(self, edits, names):
        self.edits, self.names = edits, names

    def find_spec(self, name, path=None, target=None):
        if not is_of_copy(name):
            return None
        stem = "/".join(name.split(".")[1:])
        for file, is_package in ((f"{stem}/__init__.py".lstrip("/"), True), (f"{stem}.py", False)):
            if (FOLDER / file).exists():
                spec = importlib.util.spec_from_loader(
                    name, _Loader(self, file), origin=str(FOLDER / file), is_package=is_package
                )
                if is_package:
                    spec.submodule_search_locations = []
                return spec
        return None

    def code(self, file):
        edit = self.edits.get(file)
        if isinstance(edit, CodeType):
            return edit
        if edit is not None:
            return compile(edit, str(FOLDER / file), "exec")
        if file not in self.compiled:
            self.compiled[file] = compile(source_of(file), str(FOLDER / file), "exec")
        return self.compiled[file]


def load(edits, *, constants=None, seen_by=None, names=None):
    """The package with some files replaced. It discards the previous copy.

    edits: {file: source or code}. constants: {"wait.POLLS_PER_LOOK": value}, set before any kernel is made. names: more
    global names for all modules. seen_by: the only module that uses the edited file; all others use the original.
    """
    for loaded in filter(is_of_copy, list(sys.modules)):
        del sys.modules[loaded]
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _Finder)]
    sys.meta_path.insert(0, _Finder({} if seen_by else edits, names or {}))
    package = importlib.import_module(NAME)
    if seen_by:
        ((file, _),) = edits.items()
        stem = file.removesuffix(".py").replace("/", ".")
        user = importlib.import_module(f"{NAME}.{seen_by.replace('/', '.')}")
        original = sys.modules[f"{NAME}.{stem}"]
        # the edited module has its own globals, and imports from the copy
        edited = importlib.util.module_from_spec(
            importlib.util.spec_from_loader(f"{NAME}.{stem}__edited", None, origin=str(FOLDER / file))
        )
        edited.__package__ = original.__package__
        vars(edited).update(vars(original) | {"__name__": f"{NAME}.{stem}__edited"})
        exec(compile(edits[file], str(FOLDER / file), "exec"), vars(edited))
        _replace(vars(user), original, edited)
    for place, value in (constants or {}).items():
        module, _, constant = place.rpartition(".")
        module = importlib.import_module(f"{NAME}.{module}")
        if not hasattr(module, constant):
            raise KeyError(f"epmoe/kernels has no {place}")
        setattr(module, constant, value)
    return package


def _replace(names, original, edited):
    """Replace the names that a module imported from `original` by the names in `edited`."""
    for name, value in list(names.items()):
        if value is original:
            names[name] = edited
        elif getattr(value, "__module__", None) == original.__name__ and vars(original).get(name) is value:
            names[name] = vars(edited)[name]
